// Norms, gated activations and rotary positions, a row at a time. Compiled once per instruction set.
#pragma once
#include "attention.h"
#include "elementwise.h"
#include "lanes.h"

INLINE float square_sum(const float *x, int64_t width) {
    lanes sums[4] = {0};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            lanes part = load(x + i + j * LANES);
            sums[j] += part * part;
        }
    for (; i < width; i += LANES) {
        lanes part = i + LANES <= width ? load(x + i) : load_part(x + i, width - i, 0.0f);
        sums[0] += part * part;
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE void norm_row(const Norm *n, const float *x, float *out) {
    const int64_t whole = n->width / LANES * LANES;
    const float factor = 1.0f / sqrtf(square_sum(x, n->width) / (float)n->width + n->eps);
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(x + i) * factor * load(n->weight + i));
    for (int64_t i = whole; i < n->width; i++) out[i] = x[i] * factor * n->weight[i];
}

void PATH(norm_rows)(const Norm *n) {
    for (int64_t t = 0; t < n->num_tokens; t++)
        for (int64_t h = 0; h < n->num_heads; h++)
            norm_row(n, n->x + t * n->x_stride + h * n->x_head_stride,
                     n->out + t * n->out_stride + h * n->out_head_stride);
}

void PATH(cap_rows)(const Cap *c) {
    for (int64_t row = 0; row < c->num_rows; row++) {
        const float *x = c->x + row * c->x_stride;
        float *out = c->out + row * c->out_stride;
        for (int64_t i = 0; i < c->width; i += LANES) {
            const int64_t left = c->width - i;
            lanes part = left >= LANES ? load(x + i) : load_part(x + i, left, 0.0f);
            part = tanh_lanes(part / c->cap) * c->cap;
            if (left >= LANES)
                store(out + i, part);
            else
                store_part(out + i, part, left);
        }
    }
}

// GELU by tanh is x * sigmoid(2u), which does not cancel where tanh is near -1.
INLINE lanes gated(const Gate gate, lanes x, lanes y) {
    if (gate == GATE_SILU) return x * sigmoid_lanes(x) * y;
    if (gate == GATE_GELU_TANH) return x * sigmoid_lanes(x * (x * x * 0.0713548163f + 1.5957691216f)) * y;
    return x + y;
}

INLINE void combine(const Gate gate, const Pairwise *p) {
    for (int64_t row = 0; row < p->num_rows; row++) {
        const float *x = p->x + row * p->x_stride, *y = p->y + row * p->y_stride;
        float *out = p->out + row * p->out_stride;
        int64_t i = 0;
        for (; i + LANES <= p->width; i += LANES) store(out + i, gated(gate, load(x + i), load(y + i)));
        if (i < p->width) {
            const int64_t left = p->width - i;
            store_part(out + i, gated(gate, load_part(x + i, left, 0.0f), load_part(y + i, left, 0.0f)), left);
        }
    }
}

void PATH(combine_rows)(const Pairwise *p) {
    switch (p->gate) {
    case GATE_SILU: combine(GATE_SILU, p); break;
    case GATE_GELU_TANH: combine(GATE_GELU_TANH, p); break;
    case GATE_NONE: combine(GATE_NONE, p); break;
    }
}

// Pairs (i, i + half).
INLINE void rotate_halves(float *x, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes c = load(cosine + i), s = load(sine + i), a = load(x + i), b = load(x + half + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

// Pairs (2i, 2i + 1).
INLINE void rotate_neighbours(float *x, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes first = load(x + 2 * i), second = load(x + 2 * i + LANES), c = load(cosine + i), s = load(sine + i);
        lanes a = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
        lanes b = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
        lanes even = a * c - b * s, odd = b * c + a * s;
        store(x + 2 * i, __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
        store(x + 2 * i + LANES, __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
    }
    for (; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
}

INLINE void rotate_heads(const Rope *r, float *x, int64_t num_heads, const float *cosine) {
    const int64_t half = r->rotary_dim / 2;
    for (int64_t head = 0; head < num_heads; head++, x += r->head_dim)
        if (r->interleaved)
            rotate_neighbours(x, cosine, cosine + half, half);
        else
            rotate_halves(x, cosine, cosine + half, half);
}

// A slot's row of one head lies 16 rows from that of the next head.
INLINE void store_heads(const Rope *r, const float *from, float *pool, int64_t slot) {
    const int64_t block = slot / BLOCK_SLOTS, offset = slot % BLOCK_SLOTS, dim = r->head_dim;
    float *to = pool + ((block * r->num_pool_heads + r->kv_head_begin) * BLOCK_SLOTS + offset) * dim;
    for (int64_t head = 0; head < r->num_kv_heads; head++, from += dim, to += BLOCK_SLOTS * dim)
        memcpy(to, from, (size_t)dim * sizeof(float));
}

void PATH(rope_rows)(const Rope *r) {
    for (int64_t t = 0; t < r->num_tokens; t++) {
        const float *cosine = r->cos_sin + (int64_t)r->positions[t] * r->rotary_dim;
        rotate_heads(r, r->q + t * r->q_stride, r->num_q_heads, cosine);
        rotate_heads(r, r->k + t * r->k_stride, r->num_kv_heads, cosine);
        if (r->slots[t] == NO_SLOT) continue;
        store_heads(r, r->k + t * r->k_stride, r->k_pool, r->slots[t]);
        store_heads(r, r->v + t * r->v_stride, r->v_pool, r->slots[t]);
    }
}
