// The kernels for any processor: vectors of four lanes, which the compiler lowers to what the target has.
#define LANES 4
#define BYTE_LANES 16
#define TILE_TOKENS 3
#define SUMS_TOKENS 1
#define WEIGHTS_TOKENS 0
#define KERNELS portable_kernels
#include "quant_vector.h"

INLINE whole_vec widen_signed(const int8_t *bytes) { return (whole_vec){bytes[0], bytes[1], bytes[2], bytes[3]}; }

INLINE whole_vec widen_unsigned(const uint8_t *bytes) { return (whole_vec){bytes[0], bytes[1], bytes[2], bytes[3]}; }

INLINE whole_vec widen_words(const uint8_t *bytes) {
    uint16_t words[4];
    memcpy(words, bytes, sizeof words);
    return (whole_vec){words[0], words[1], words[2], words[3]};
}

INLINE vec halves(const uint8_t *bytes) {
    return (vec){half_at(bytes), half_at(bytes + 2), half_at(bytes + 4), half_at(bytes + 6)};
}

INLINE float sum(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

INLINE void sum4(const vec *vectors, float *out) {
    for (int i = 0; i < 4; i++) out[i] = sum(vectors[i]);
}

#include "quant_formats.h"
