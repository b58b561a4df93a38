// What the entry points (linear.c) and the kernels (quant_*.c) share: one product as a value, and a table of kernels
// for each instruction set. Numbers of types are ggml's.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NUM_TYPE_NUMBERS = 31 };  // ggml's highest number read here is 30 (BF16); holes in the tables are NULL

// A matrix of any type: `num_rows` rows of `num_columns` weights, `row_bytes` apart.
struct matrix {
    const uint8_t *weights;
    int64_t row_bytes, num_rows, num_columns;
};

// out[t][n] (+)= sum over k of x[t][k] * matrix[n][k]; strides in floats.
struct product {
    struct matrix matrix;
    const float *x;
    float *out;
    int64_t x_stride, out_stride, num_tokens;
    bool accumulate;
};

// Makes float32 of a row; `ahead` bytes from each block is what will be wanted soon.
typedef void unpack_fn(const uint8_t *row, int64_t num_columns, int64_t ahead, float *out);

struct kernels {
    void (*multiply[NUM_TYPE_NUMBERS])(const struct product *product);
    unpack_fn *unpack[NUM_TYPE_NUMBERS];
};

struct block_layout {
    int64_t length, size_bytes;
};

extern const struct block_layout block_layouts[NUM_TYPE_NUMBERS];  // length 0: not a type that can be read
extern const struct kernels portable_kernels;
#if defined(__x86_64__)
extern const struct kernels avx2_kernels, avx512_kernels;
#endif
