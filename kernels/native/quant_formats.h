// Each type's kernels, made from the template by naming its block: included last by each instruction set's file.
#pragma once
#include "quant.h"
#include "quant_template.h"

// ---- the types whose quants come straight from the block ----

INLINE void prepare_scale(const uint8_t *block, struct decoded *out) {
    out->scale[0] = half_at(block);
    out->minimum[0] = NO_MINIMUM;
}

INLINE void prepare_scale_and_minimum(const uint8_t *block, struct decoded *out) {
    out->scale[0] = half_at(block);
    out->minimum[0] = half_at(block + 2);
}

INLINE whole_vec nibbles(const uint8_t *bytes, int first) {
    whole_vec pairs = widen_unsigned(bytes + first % 16);
    return first < 16 ? pairs & 15 : pairs >> 4;
}

INLINE vec lanes_q4_0(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(nibbles(block + 2, first) - 8);
}

INLINE vec lanes_q4_1(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(nibbles(block + 4, first));
}

INLINE vec lanes_q8_0(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)decoded;
    return floats(widen_signed((const int8_t *)block + 2 + first));
}

INLINE vec lanes_decoded(const uint8_t *block, const struct decoded *decoded, int first) {
    (void)block;
    return floats(widen_signed(decoded->quant + first));
}

// name, ggml's number, block length, block bytes, group length, whether it has minimums, prepare, lanes
#define QUANTISED_FORMATS(FORMAT)                                                   \
    FORMAT(q4_0, 2, 32, 18, 32, false, prepare_scale, lanes_q4_0)                   \
    FORMAT(q4_1, 3, 32, 20, 32, true, prepare_scale_and_minimum, lanes_q4_1)        \
    FORMAT(q5_0, 6, 32, 22, 32, false, decode_q5_0, lanes_decoded)                  \
    FORMAT(q5_1, 7, 32, 24, 32, true, decode_q5_1, lanes_decoded)                   \
    FORMAT(q8_0, 8, 32, 34, 32, false, prepare_scale, lanes_q8_0)                   \
    FORMAT(q2_k, 10, 256, 84, 16, true, decode_q2_k, lanes_decoded)                 \
    FORMAT(q3_k, 11, 256, 110, 16, false, decode_q3_k, lanes_decoded)               \
    FORMAT(q4_k, 12, 256, 144, 32, true, decode_q4_k, lanes_decoded)                \
    FORMAT(q5_k, 13, 256, 176, 32, true, decode_q5_k, lanes_decoded)                \
    FORMAT(q6_k, 14, 256, 210, 16, false, decode_q6_k, lanes_decoded)

#if FUSED_TOKENS == 3
#define FUSED_CASES(...) FUSED_CASE(1, __VA_ARGS__) FUSED_CASE(2, __VA_ARGS__) FUSED_CASE(3, __VA_ARGS__)
#else
#define FUSED_CASES(...) FUSED_CASE(1, __VA_ARGS__)
#endif
#define FUSED_CASE(num_tokens, ...) case num_tokens: multiply_fused(__VA_ARGS__, num_tokens, p); break;

#define DEFINE_QUANTISED(name, number, length, size_bytes, group, has_minimum, prepare, lanes)       \
    static void unpack_##name(const uint8_t *row, int64_t num_columns, float *out) {                 \
        unpack_blocks(prepare, lanes, length, size_bytes, group, row, num_columns, out);             \
    }                                                                                                \
    static void multiply_##name(const struct product *p) {                                           \
        switch (p->num_tokens) {                                                                     \
            FUSED_CASES(prepare, lanes, length, size_bytes, group, has_minimum)                      \
            default: multiply_panels(unpack_##name, (struct block_layout){length, size_bytes}, p);   \
        }                                                                                            \
    }
QUANTISED_FORMATS(DEFINE_QUANTISED)

// ---- the types without blocks ----

INLINE vec load_half(const uint8_t *weights) { return halves(weights); }

INLINE vec load_bfloat(const uint8_t *weights) {
    whole_vec bits = widen_words(weights) << 16;
    return (vec)bits;
}

#define DEFINE_UNQUANTISED(name, load, load_one, weight_bytes)                                              \
    static void unpack_##name(const uint8_t *row, int64_t num_columns, float *out) {                        \
        int64_t k = 0;                                                                                      \
        for (; k + LANES <= num_columns; k += LANES) *(loose_vec *)(out + k) = load(row + k * weight_bytes); \
        for (; k < num_columns; k++) out[k] = load_one(row + k * weight_bytes);                             \
    }                                                                                                       \
    static void multiply_##name(const struct product *p) {                                                  \
        if (p->num_tokens <= TILE_TOKENS)                                              \
            strips(load, load_one, weight_bytes, p);                                                        \
        else                                                                                                \
            multiply_panels(unpack_##name, (struct block_layout){1, weight_bytes}, p);                      \
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
