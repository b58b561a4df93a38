// The kernels for x86 processors with AVX-512 (F, BW, DQ, VL): twice the lanes and twice the registers.
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define LANES 16
#define BYTE_LANES 32
#define TILE_TOKENS 6
#define SUMS_TOKENS 1
#define WEIGHTS_TOKENS 8
#define WEIGHTS_SUMS 16
#define WEIGHTS_ROWS 4
#define KERNELS avx512_kernels
#include "quant_vector.h"

INLINE whole_vec widen_signed(const int8_t *bytes) {
    return (whole_vec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

INLINE whole_vec widen_unsigned(const uint8_t *bytes) {
    return (whole_vec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

INLINE whole_vec widen_words(const uint8_t *bytes) {
    return (whole_vec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bytes));
}

INLINE vec halves(const uint8_t *bytes) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bytes)); }

INLINE __m256 folded(vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

INLINE float sum(vec v) {
    __m256 eight = folded(v);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE void sum4(const vec *vectors, float *out) {
    __m256 pairs = _mm256_hadd_ps(folded(vectors[0]), folded(vectors[1]));
    __m256 fours = _mm256_hadd_ps(pairs, _mm256_hadd_ps(folded(vectors[2]), folded(vectors[3])));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

#include "quant_formats.h"
#endif
