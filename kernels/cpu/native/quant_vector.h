// Vectors in the compiler's own vector types, and the small things every kernel reads memory with; included by each
// instruction set's file after it has said how wide its vectors are:
//   LANES       floats (or 32-bit whole numbers) in a vector
//   BYTE_LANES  bytes in a vector: at most 32, the quants that every type keeps side by side
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(1), may_alias));  // anywhere in memory
typedef int32_t whole_vec __attribute__((vector_size(4 * LANES)));
typedef uint8_t byte_vec __attribute__((vector_size(BYTE_LANES)));
// Bytes are shifted as pairs (no processor shifts single ones), always with a mask that drops what crossed over.
typedef uint16_t pair_vec __attribute__((vector_size(BYTE_LANES)));
typedef uint16_t loose_pair_vec __attribute__((vector_size(BYTE_LANES), aligned(1), may_alias));

INLINE vec vec_at(const float *address) { return *(const loose_vec *)address; }

INLINE vec floats(whole_vec whole) { return __builtin_convertvector(whole, vec); }

INLINE pair_vec bytes_at(const void *address) { return *(const loose_pair_vec *)address; }

INLINE void put_bytes(int8_t *address, pair_vec bytes) { *(loose_pair_vec *)address = bytes; }

INLINE pair_vec each_byte(uint8_t value) { return (pair_vec)((byte_vec){0} + value); }

INLINE pair_vec minus(pair_vec bytes, uint8_t value) { return (pair_vec)((byte_vec)bytes - value); }

INLINE uint32_t word_at(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

INLINE uint64_t long_at(const uint8_t *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// float16 as it lies in a block, on any byte border.
INLINE float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
#endif
}

INLINE float bfloat_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return float_of_bits((uint32_t)half << 16);
}

typedef float four_floats __attribute__((vector_size(16)));

// The two float16 a block begins with, in the first two lanes; AVX2 reads eight bytes, which every block has.
INLINE four_floats halves_at(const uint8_t *block) {
#ifdef __F16C__
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)block));
#else
    return (four_floats){half_at(block), half_at(block + 2)};
#endif
}
