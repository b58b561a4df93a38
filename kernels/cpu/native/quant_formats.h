// The table of kernels: each type's, made from quant_blocks.h and quant_tiles.h by saying what its block is. Included
// last by each instruction set's file, which has named the table in KERNELS.
#pragma once
#include "quant_blocks.h"

// ---- the types whose quants are read straight from the block; two float16 may always be read from its begin ----

INLINE void prepare_scale(const uint8_t *block, struct decoded *out) {
    out->scale[0] = halves_at(block)[0];
    out->minimum[0] = NO_MINIMUM;
}

INLINE void prepare_scale_and_minimum(const uint8_t *block, struct decoded *out) {
    four_floats both = halves_at(block);
    out->scale[0] = both[0];
    out->minimum[0] = both[1];
}

// Bytes of two quants: the low halves come first, `pair` of them, then the high ones.
INLINE whole_vec nibbles(const uint8_t *bytes, int first, const int pair) {
    whole_vec both = widen_unsigned(bytes + first / (2 * pair) * pair + first % pair);
    return first % (2 * pair) < pair ? both & 15 : both >> 4;
}

INLINE vec lanes_q4_0(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(nibbles(block + 2, first, 16) - 8);
}

INLINE vec lanes_q4_1(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(nibbles(block + 4, first, 16));
}

INLINE vec lanes_q4_k(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(nibbles(block + 16, first, 32));
}

INLINE vec lanes_q8_0(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(widen_signed((const int8_t *)block + 2 + first));
}

INLINE vec lanes_decoded(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)block;
    return floats(widen_signed(decoded->quant + first));
}

// name, ggml's number, what its blocks are
#define QUANTISED_FORMATS(FORMAT)                                                          \
    FORMAT(q4_0, 2, {prepare_scale, lanes_q4_0, 32, 18, 32, 16, false})                    \
    FORMAT(q4_1, 3, {prepare_scale_and_minimum, lanes_q4_1, 32, 20, 32, 16, true})         \
    FORMAT(q5_0, 6, {decode_q5_0, lanes_decoded, 32, 22, 32, 0, false})                    \
    FORMAT(q5_1, 7, {decode_q5_1, lanes_decoded, 32, 24, 32, 0, true})                     \
    FORMAT(q8_0, 8, {prepare_scale, lanes_q8_0, 32, 34, 32, 0, false})                     \
    FORMAT(q2_k, 10, {decode_q2_k, lanes_decoded, 256, 84, 16, 0, true})                   \
    FORMAT(q3_k, 11, {decode_q3_k, lanes_decoded, 256, 110, 16, 0, false})                 \
    FORMAT(q4_k, 12, {six_bit_scales, lanes_q4_k, 256, 144, 32, 32, true})                 \
    FORMAT(q5_k, 13, {decode_q5_k, lanes_decoded, 256, 176, 32, 0, true})                  \
    FORMAT(q6_k, 14, {decode_q6_k, lanes_decoded, 256, 210, 16, 0, false})

#define BY_SUMS(n) case n: multiply_by_sums(format, unpack, n, p); break;
#define BY_WEIGHTS(n) case n: multiply_by_weights(format, unpack, n, p); break;
#if WEIGHTS_TOKENS == 0
#define FEW_TOKENS BY_SUMS(1)
#elif SUMS_TOKENS == 1
#define FEW_TOKENS BY_SUMS(1) BY_WEIGHTS(2) MORE_TOKENS
#else
#define FEW_TOKENS BY_SUMS(1) BY_SUMS(2) MORE_TOKENS
#endif
#define MORE_TOKENS BY_WEIGHTS(3) BY_WEIGHTS(4) BY_WEIGHTS(5) BY_WEIGHTS(6) BY_WEIGHTS(7) BY_WEIGHTS(8)

#define DEFINE_QUANTISED(name, number, ...)                                                                     \
    static void unpack_##name(const uint8_t *row, int64_t num_columns, int64_t ahead, float *out) {             \
        unpack_blocks((struct format)__VA_ARGS__, row, num_columns, ahead, out);                                \
    }                                                                                                           \
    static void multiply_##name(const struct product *p) {                                                      \
        const struct format format = __VA_ARGS__;                                                               \
        unpack_fn *const unpack = unpack_##name;                                                                \
        switch (p->num_tokens) {                                                                                \
            FEW_TOKENS                                                                                          \
            default: multiply_panels(unpack, (struct block_layout){format.length, format.size_bytes}, p);       \
        }                                                                                                       \
    }
QUANTISED_FORMATS(DEFINE_QUANTISED)

// ---- the types without blocks ----

INLINE vec load_half(const uint8_t *weights) { return halves(weights); }

INLINE vec load_bfloat(const uint8_t *weights) {
    whole_vec bits = widen_words(weights) << 16;
    return (vec)bits;
}

#define DEFINE_UNQUANTISED(name, load, load_one, weight_bytes)                                          \
    static void unpack_##name(const uint8_t *row, int64_t num_columns, int64_t ahead, float *out) {     \
        int64_t k = 0;                                                                                  \
        for (; k + LANES <= num_columns; k += LANES) {                                                  \
            prefetch(row + k * weight_bytes + ahead, LANES * weight_bytes);                             \
            *(loose_vec *)(out + k) = load(row + k * weight_bytes);                                     \
        }                                                                                               \
        for (; k < num_columns; k++) out[k] = load_one(row + k * weight_bytes);                         \
    }                                                                                                   \
    static void multiply_##name(const struct product *p) {                                              \
        if (p->num_tokens <= TILE_TOKENS)                                                               \
            strips(load, load_one, weight_bytes, p);                                                    \
        else                                                                                            \
            multiply_panels(unpack_##name, (struct block_layout){1, weight_bytes}, p);                  \
    }
DEFINE_UNQUANTISED(f32, load_float, load_one_float, 4)
DEFINE_UNQUANTISED(f16, load_half, half_at, 2)
DEFINE_UNQUANTISED(bf16, load_bfloat, bfloat_at, 2)

#define MULTIPLY_ENTRY(name, number, ...) [number] = multiply_##name,
#define UNPACK_ENTRY(name, number, ...) [number] = unpack_##name,
const struct kernels KERNELS = {
    .multiply = {[0] = multiply_f32, [1] = multiply_f16, [30] = multiply_bf16, QUANTISED_FORMATS(MULTIPLY_ENTRY)},
    .unpack = {[0] = unpack_f32, [1] = unpack_f16, [30] = unpack_bf16, QUANTISED_FORMATS(UNPACK_ENTRY)},
};
