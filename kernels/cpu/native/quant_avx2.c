// The kernels for x86 processors with AVX2, FMA and F16C, whatever the rest of the extension is compiled for.
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define BYTE_LANES 32
#define TILE_TOKENS 3
#define SUMS_TOKENS 2
#define WEIGHTS_TOKENS 8
#define WEIGHTS_SUMS 8
#define WEIGHTS_ROWS 2
#define KERNELS avx2_kernels
#include "quant_vector.h"

INLINE whole_vec widen_signed(const int8_t *bytes) {
    return (whole_vec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

INLINE whole_vec widen_unsigned(const uint8_t *bytes) {
    return (whole_vec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

INLINE whole_vec widen_words(const uint8_t *bytes) {
    return (whole_vec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

INLINE vec halves(const uint8_t *bytes) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bytes)); }

INLINE float sum(vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// The sums of four vectors at once: two rounds of adding neighbours, then the halves.
INLINE void sum4(const vec *vectors, float *out) {
    __m256 pairs = _mm256_hadd_ps(vectors[0], vectors[1]), others = _mm256_hadd_ps(vectors[2], vectors[3]);
    __m256 fours = _mm256_hadd_ps(pairs, others);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

#include "quant_formats.h"
#endif
