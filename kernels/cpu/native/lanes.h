// Eight floats at a time in the compiler's vector types, so that each body is written once: bodies_avx2.c compiles it
// for AVX2 with FMA, bodies_portable.c for the baseline machine, and the entry points choose at run time.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// Every function that takes or returns a vector is inlined, so no calling convention for vectors is ever used and the
// build turns the compiler's notes on those (psabi) off.
#pragma GCC diagnostic ignored "-Wpsabi"
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(32)));
typedef int32_t int_lanes __attribute__((vector_size(32)));
typedef uint32_t bit_lanes __attribute__((vector_size(32)));
typedef float quad __attribute__((vector_size(16)));
typedef float unaligned_lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef float unaligned_quad __attribute__((vector_size(16), aligned(4), may_alias));
enum { LANES = 8 };

INLINE lanes load(const float *from) { return *(const unaligned_lanes *)from; }
INLINE void store(float *to, lanes values) { *(unaligned_lanes *)to = values; }
INLINE lanes fill(float value) { 
    return (lanes){value, value, value, value, value, value, value, value};
}
INLINE lanes select_lanes(int_lanes mask, lanes yes, lanes no) {
    return (lanes)((mask & (int_lanes)yes) | (~mask & (int_lanes)no));
}
// As the machine's max: the second where either is NaN.
INLINE lanes max_lanes(lanes a, lanes b) { return select_lanes(a > b, a, b); }

// The first num values; the rest take the filler.
INLINE lanes load_part(const float *from, int64_t num, float filler) {
    lanes values = fill(filler);
    memcpy(&values, from, (size_t)num * sizeof(float));
    return values;
}
INLINE void store_part(float *to, lanes values, int64_t num) { memcpy(to, &values, (size_t)num * sizeof(float)); }

INLINE quad halves_sum(lanes x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
INLINE float sum_lanes(lanes x) {
    quad s = halves_sum(x);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE float largest_lane(lanes x) {
    x = max_lanes(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = max_lanes(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return x[0] > x[1] ? x[0] : x[1];
}

// e^x within 2e-7 relative for x in [-87.33, 88]; 0 below (so e^-inf is 0), undefined above 88, NaN stays NaN.
// x = n ln2 + r: the sum with 1.5 * 2^23 leaves n in the low bits, and 2^n is added to the exponent field.
INLINE lanes exp_lanes(lanes x) {
    const float round = 12582912.0f;
    lanes shifted = x * 1.44269504f + round, n = shifted - round;
    lanes r = x - n * 0.693145751953125f;
    r = r - n * 1.42860677e-6f;
    lanes p = r * 1.381460185e-3f + 8.368715219e-3f;
    p = p * r + 4.166838789e-2f;
    p = p * r + 1.666652065e-1f;
    p = p * r + 4.999999345e-1f;
    p = p * (r * r) + (r + 1.0f);
    // Bits, not numbers: what overflows here, far below -87, is not taken.
    lanes scaled = (lanes)((bit_lanes)p + ((bit_lanes)shifted << 23));
    return select_lanes(x < -87.33f, fill(0.0f), scaled);
}

// 1 / (1 + e^-x) within 4e-7 relative where x > -88, and 0 below.
INLINE lanes sigmoid_lanes(lanes x) {
    return 1.0f / (1.0f + select_lanes(-x > 88.0f, fill(INFINITY), exp_lanes(-x)));
}

// tanh within 4e-7 relative: an odd polynomial near 0, where the quotient would cancel.
INLINE lanes tanh_lanes(lanes x) {
    lanes magnitude = (lanes)((bit_lanes)x & 0x7fffffffu), square = x * x;
    lanes p = square * -5.895157650e-3f + 2.079597127e-2f;
    p = p * square - 5.378383015e-2f;
    p = p * square + 1.333192413e-1f;
    p = p * square - 3.333329800e-1f;
    lanes small = x + x * (square * p);
    lanes decay = exp_lanes(magnitude * -2.0f);
    lanes large = (1.0f - decay) / (1.0f + decay);
    large = (lanes)((bit_lanes)large | ((bit_lanes)x & 0x80000000u));
    return select_lanes(magnitude < 0.6f, small, large);
}
