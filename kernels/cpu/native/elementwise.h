// What the entry points of the elementwise kernels share with their bodies. Strides in floats; inner strides are 1.
#pragma once
#include <stdbool.h>
#include <stdint.h>

// out = norm(x) * weight over rows of `width`: the heads of each token, or one row a token.
typedef struct {
    const float *x, *weight;
    float *out;
    int64_t num_tokens, num_heads, width, x_stride, x_head_stride, out_stride, out_head_stride;
    float eps;
} Norm;

// x and out of a norm; a bytes object in Python, made by kernels/cpu/elementwise.py.
typedef struct {
    uint64_t x, out;
    int64_t num_tokens, num_heads, width, x_stride, x_head_stride, out_stride, out_head_stride;
} NormOperands;

// out = cap * tanh(x / cap).
typedef struct {
    const float *x;
    float *out;
    int64_t num_rows, width, x_stride, out_stride;
    float cap;
} Cap;

typedef enum { GATE_SILU, GATE_GELU_TANH, GATE_NONE } Gate;

// out = gate(x) * y, or x + y without a gate.
typedef struct {
    const float *x, *y;
    float *out;
    int64_t num_rows, width, x_stride, y_stride, out_stride;
    Gate gate;
} Pairwise;

// As NormOperands, of two inputs.
typedef struct {
    uint64_t x, y, out;
    int64_t num_rows, width, x_stride, y_stride, out_stride;
} PairOperands;

// The slot of a token whose row another rank has.
enum { NO_SLOT = -1 };

// Rotates heads of q and k in place and writes k and v rows into the pool.
typedef struct {
    float *q, *k;
    const float *v;
    const int32_t *positions, *slots;
    const float *cos_sin;
    float *k_pool, *v_pool;
    int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t q_stride, k_stride, v_stride, num_pool_heads, kv_head_begin;
    bool interleaved;
} Rope;

// What every layer gives alike; a bytes object in Python, made by kernels/cpu/attention.py.
typedef struct {
    uint64_t q, k, v, cos_sin;
    int64_t q_stride, k_stride, v_stride, num_kv_heads, rotary_dim, max_positions, interleaved;
} RopeOperands;

#define DECLARE_PATHS(name, type)    \
    void name##_avx2(const type *);  \
    void name##_portable(const type *);
DECLARE_PATHS(norm_rows, Norm)
DECLARE_PATHS(cap_rows, Cap)
DECLARE_PATHS(combine_rows, Pairwise)
DECLARE_PATHS(rope_rows, Rope)
