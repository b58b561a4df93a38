// How one block of a quantised type becomes weights: weight[i] = scale[g] * quant[i] + minimum[g], where g = i / group.
// Every instruction set compiles its own copy, after its conversions from memory to vectors.
//
// All products scale * quant are exact in float32 (at most 11 + 6 + 6 significant bits), so it makes no difference to
// any bit of a weight whether the compiler fuses the multiplication with the addition. A type without a minimum has
// -0.0 as its minimum: the only number whose addition changes nothing, the sign of a zero included.
#pragma once
#include "quant_vector.h"

#define NO_MINIMUM (-0.0f)

// A decoded block: up to 256 quants, with a scale and a minimum for each group of 16 or 32 of them.
struct decoded {
    int8_t quant[256];
    float scale[16], minimum[16];
};

// Sixteen signed bytes, made in registers: a vector read back from two shorter stores would wait for both.
struct sixteen {
    uint64_t bytes[2] __attribute__((aligned(16)));
};

INLINE struct sixteen sixteen(uint64_t low, uint64_t high) {
    typedef uint64_t two __attribute__((vector_size(16)));
    struct sixteen joined;
    *(two *)joined.bytes = (two){low, high};
    return joined;
}

// Has what was decoded written out: widening bytes or spreading a scale from memory takes one instruction, cutting them
// out of a register takes three.
#define IN_MEMORY(decoded) __asm__("" : "+m"(decoded))

// out[i] = factor * bytes[i] for i < count; all 16 bytes may be read and all 16 floats written.
INLINE void scale_bytes(const void *bytes, int count, float factor, float *out) {
    for (int i = 0; i < count; i += LANES)
        *(loose_vec *)(out + i) = floats(widen_signed((const int8_t *)bytes + i)) * factor;
}

INLINE void no_minimums(int count, float *out) {
    for (int i = 0; i < count; i += LANES) *(loose_vec *)(out + i) = -(vec){0};
}

// The fifth bits of 32 quants, bit i of the four bytes for quant i, as 0 or 16.
INLINE void fifth_bits(const uint8_t *bits, int8_t *out) {
#ifdef __AVX2__
    // Byte i of the vector gets byte i / 8 of the word, of which only bit i % 8 is kept.
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word_at(bits)), spread);
    bytes = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    _mm256_storeu_si256((__m256i *)out, _mm256_and_si256(bytes, _mm256_set1_epi8(16)));
#else
    for (int i = 0; i < 32; i++) out[i] = (int8_t)((bits[i / 8] >> i % 8 & 1) << 4);
#endif
}

// 16 bytes of nibbles: the low ones are quants 0-15, the high ones 16-31; the fifth bits are added, `offset` taken off.
INLINE void five_bits(const uint8_t *bits, const uint8_t *nibbles, uint64_t offset, int8_t *quant) {
    int8_t fifth[32];
    fifth_bits(bits, fifth);
    typedef uint64_t two __attribute__((vector_size(16), aligned(1), may_alias));
    typedef uint8_t bytes __attribute__((vector_size(16)));
    two both = *(const two *)nibbles;
    const uint64_t low_nibbles = 0x0f0f0f0f0f0f0f0full;
    *(two *)quant = (two)((bytes)((both & low_nibbles) | *(two *)fifth) - (uint8_t)offset);
    *(two *)(quant + 16) = (two)((bytes)((both >> 4 & low_nibbles) | *(two *)(fifth + 16)) - (uint8_t)offset);
}

INLINE void decode_q5_0(const uint8_t *restrict block, struct decoded *out) {
    out->scale[0] = half_at(block);
    out->minimum[0] = NO_MINIMUM;
    five_bits(block + 2, block + 6, 16, out->quant);
    IN_MEMORY(out->quant);
}

INLINE void decode_q5_1(const uint8_t *restrict block, struct decoded *out) {
    out->scale[0] = half_at(block);
    out->minimum[0] = half_at(block + 2);
    five_bits(block + 4, block + 8, 0, out->quant);
    IN_MEMORY(out->quant);
}

INLINE void decode_q2_k(const uint8_t *restrict block, struct decoded *out) {
    const uint64_t nibbles = 0x0f0f0f0f0f0f0f0full, low = long_at(block), high = long_at(block + 8);
    struct sixteen scales = sixteen(low & nibbles, high & nibbles);
    struct sixteen minimums = sixteen(low >> 4 & nibbles, high >> 4 & nibbles);
    scale_bytes(scales.bytes, 16, half_at(block + 80), out->scale);
    scale_bytes(minimums.bytes, 16, -half_at(block + 82), out->minimum);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += BYTE_LANES) {
            pair_vec quants = bytes_at(block + 16 + half * 32 + i);
            for (int part = 0; part < 4; part++)
                put_bytes(out->quant + half * 128 + part * 32 + i, quants >> 2 * part & each_byte(3));
        }
    IN_MEMORY(out->quant);
}

// Sixteen 6-bit scales less 32: the low four bits lie in eight bytes of nibbles, the high two in four bytes.
INLINE struct sixteen scales_q3_k(const uint8_t *restrict bytes) {
    const uint64_t nibbles = 0x0f0f0f0f0f0f0f0full, twos = 0x0303030303030303ull, sign = 0x2020202020202020ull;
    uint64_t low = long_at(bytes), high = word_at(bytes + 8);
    uint64_t first = (low & nibbles) | ((high | high >> 2 << 32) & twos) << 4;
    uint64_t second = (low >> 4 & nibbles) | ((high >> 4 | high >> 6 << 32) & twos) << 4;
    // Taking 32 off a number below 64 turns bit 5 over and copies it to bits 6 and 7.
    uint64_t less[2] = {first ^ sign, second ^ sign};
    for (int i = 0; i < 2; i++) less[i] |= (less[i] & sign) << 1 | (less[i] & sign) << 2;
    return sixteen(less[0], less[1]);
}

INLINE void decode_q3_k(const uint8_t *restrict block, struct decoded *out) {
    struct sixteen scales = scales_q3_k(block + 96);
    scale_bytes(scales.bytes, 16, half_at(block + 108), out->scale);
    no_minimums(16, out->minimum);
    for (int i = 0; i < 32; i += BYTE_LANES) {
        pair_vec thirds = bytes_at(block + i);
        for (int half = 0; half < 2; half++) {
            pair_vec quants = bytes_at(block + 32 + half * 32 + i);
            for (int part = 0; part < 4; part++) {
                pair_vec third = (thirds >> (4 * half + part) & each_byte(1)) << 2;
                pair_vec whole = (quants >> 2 * part & each_byte(3)) | third;
                put_bytes(out->quant + half * 128 + part * 32 + i, minus(whole, 4));
            }
        }
    }
    IN_MEMORY(out->quant);
}

// The 12 bytes that hold eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K, taken four at a time: the first
// four of each lie in the low bits, the last four are put together from nibbles and the others' two high bits.
INLINE void six_bit_scales(const uint8_t *restrict block, struct decoded *out) {
    uint32_t first = word_at(block + 4), second = word_at(block + 8), third = word_at(block + 12);
    uint32_t last_scales = (third & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4;
    uint32_t last_minimums = (third >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4;
    struct sixteen scales = sixteen((first & 0x3f3f3f3f) | (uint64_t)last_scales << 32, 0);
    struct sixteen minimums = sixteen((second & 0x3f3f3f3f) | (uint64_t)last_minimums << 32, 0);
    scale_bytes(scales.bytes, 8, half_at(block), out->scale);
    scale_bytes(minimums.bytes, 8, -half_at(block + 2), out->minimum);
}

INLINE void decode_q5_k(const uint8_t *restrict block, struct decoded *out) {
    six_bit_scales(block, out);
    for (int i = 0; i < 32; i += BYTE_LANES) {
        pair_vec fifths = bytes_at(block + 16 + i);
        for (int part = 0; part < 4; part++) {
            pair_vec nibbles = bytes_at(block + 48 + part * 32 + i);
            pair_vec low = (fifths >> 2 * part & each_byte(1)) << 4;
            pair_vec high = (fifths >> (2 * part + 1) & each_byte(1)) << 4;
            put_bytes(out->quant + part * 64 + i, (nibbles & each_byte(15)) | low);
            put_bytes(out->quant + part * 64 + 32 + i, (nibbles >> 4 & each_byte(15)) | high);
        }
    }
    IN_MEMORY(out->quant);
}

INLINE void decode_q6_k(const uint8_t *restrict block, struct decoded *out) {
    scale_bytes(block + 192, 16, half_at(block + 208), out->scale);
    no_minimums(16, out->minimum);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += BYTE_LANES) {
            pair_vec first = bytes_at(block + half * 64 + i), second = bytes_at(block + half * 64 + 32 + i);
            pair_vec high = bytes_at(block + 128 + half * 32 + i);
            int8_t *quant = out->quant + half * 128 + i;
            put_bytes(quant, minus((first & each_byte(15)) | (high << 4 & each_byte(48)), 32));
            put_bytes(quant + 32, minus((second & each_byte(15)) | (high << 2 & each_byte(48)), 32));
            put_bytes(quant + 64, minus((first >> 4 & each_byte(15)) | (high & each_byte(48)), 32));
            put_bytes(quant + 96, minus((second >> 4 & each_byte(15)) | (high >> 2 & each_byte(48)), 32));
        }
    IN_MEMORY(out->quant);
}
