// Products with weights that are plain numbers: in memory (float32, float16, bfloat16), or made float32 four rows at a
// time in a panel that stays in the first cache. Compiled once per instruction set, which defines before it:
//   LANES, BYTE_LANES  see quant_vector.h
//   TILE_TOKENS        rows of x that a tile of four rows of weights keeps in registers: 3 or 6
// and, after including quant_vector.h, how memory becomes vectors (widen_signed, widen_unsigned, widen_words, halves)
// and how the lanes of one vector, or of four, are summed (sum, sum4).
//
// Sums are float32 in a fixed order, which depends on the number of rows of x but never on what they hold.
#pragma once
#include "quant.h"
#include "quant_vector.h"

enum {
    TILE_ROWS = 4,          // rows of weights in a panel and in a tile
    PANEL_COLUMNS = 1536,   // 4 * 1536 floats are 24 KiB: half of a first-level cache, the other half is for x
    PANEL_TOKENS = 64,      // their x is at most 64 * 1536 floats, 384 KiB: it stays in a second-level cache
    PREFETCH_BYTES = 8192,  // at least so far ahead of the work, see prefetch_distance
};

typedef vec load_fn(const uint8_t *weights);          // LANES weights
typedef float load_one_fn(const uint8_t *weight);

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE void put(float *out, float value, bool accumulate) { *out = accumulate ? *out + value : value; }

// Bytes from a block to the one to prefetch: in whole rows, so that a shard by columns never fetches its neighbours'
// columns, and at least two, because two rows are in work at once. Prefetching past the end of a mapping is harmless.
INLINE int64_t prefetch_distance(const struct matrix *matrix, int64_t bytes_of_row) {
    int64_t num_rows = (PREFETCH_BYTES + bytes_of_row - 1) / bytes_of_row;
    return (num_rows < 2 ? 2 : num_rows) * matrix->row_bytes;
}

INLINE void prefetch(const uint8_t *address, const int size_bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < size_bytes; i += 64) __builtin_prefetch(address + i);
}

// `num_rows` (4 or 1) rows of weights times `num_tokens` rows of x; `ahead` is 0 where nothing is to be prefetched.
INLINE void tile(load_fn *load, load_one_fn *load_one, const int weight_bytes, const int num_rows, const int num_tokens,
                 const int64_t ahead, const struct product *p) {
    const uint8_t *weights = p->matrix.weights;
    const int64_t columns = p->matrix.num_columns, stride = p->matrix.row_bytes;
    // One row of x alone would wait for its own additions, so it alternates between two sets of accumulators.
    const int num_sets = num_tokens == 1 ? 2 : 1, num_x = num_tokens * num_sets;
    vec sums[TILE_TOKENS][TILE_ROWS] = {0};
    int64_t k = 0;
    for (; k + num_sets * LANES <= columns; k += num_sets * LANES) {
        vec x[TILE_TOKENS];
#pragma GCC unroll 8
        for (int i = 0; i < num_x; i++)
            x[i] = num_sets == 2 ? vec_at(p->x + k + i * LANES) : vec_at(p->x + i * p->x_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            if (ahead != 0) prefetch(weights + r * stride + k * weight_bytes + ahead, num_sets * LANES * weight_bytes);
#pragma GCC unroll 8
            for (int i = 0; i < num_x; i++)
                sums[i][r] += load(weights + r * stride + (k + (num_sets == 2 ? i * LANES : 0)) * weight_bytes) * x[i];
        }
    }
    for (int t = 0; t < num_tokens; t++) {
        float values[TILE_ROWS];
        if (num_sets == 2)
            for (int r = 0; r < num_rows; r++) sums[0][r] += sums[1][r];
        if (num_rows == TILE_ROWS)
            sum4(sums[t], values);
        else
            values[0] = sum(sums[t][0]);
        for (int r = 0; r < num_rows; r++) {
            for (int64_t rest = k; rest < columns; rest++)
                values[r] += load_one(weights + r * stride + rest * weight_bytes) * p->x[t * p->x_stride + rest];
            put(p->out + t * p->out_stride + r, values[r], p->accumulate);
        }
    }
}

// All rows of x against `num_rows` rows of weights (not the product's own count), in tiles as even as can be.
INLINE void strip(load_fn *load, load_one_fn *load_one, const int weight_bytes, const int num_rows, const int64_t ahead,
                  struct product p) {
    while (p.num_tokens > 0) {
        int64_t num_tiles = (p.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        int64_t taken = (p.num_tokens + num_tiles - 1) / num_tiles;
#define TILE(n) case n: tile(load, load_one, weight_bytes, num_rows, n, ahead, &p); break;
        switch (taken) {
            TILE(1) TILE(2) TILE(3)
#if TILE_TOKENS == 6
            TILE(4) TILE(5) TILE(6)
#endif
        }
#undef TILE
        p.x += taken * p.x_stride;
        p.out += taken * p.out_stride;
        p.num_tokens -= taken;
    }
}

// Weights straight from memory, for as few rows of x as one tile holds.
INLINE void strips(load_fn *load, load_one_fn *load_one, const int weight_bytes, const struct product *product) {
    struct product p = *product;
    const int64_t ahead = prefetch_distance(&p.matrix, p.matrix.num_columns * weight_bytes);
    for (int64_t n = 0; n < product->matrix.num_rows;) {
        bool whole = n + TILE_ROWS <= product->matrix.num_rows;
        p.matrix.weights = product->matrix.weights + n * p.matrix.row_bytes;
        p.out = product->out + n;
        if (whole)
            strip(load, load_one, weight_bytes, TILE_ROWS, ahead, p);
        else
            strip(load, load_one, weight_bytes, 1, ahead, p);
        n += whole ? TILE_ROWS : 1;
    }
}

INLINE vec load_float(const uint8_t *weights) { return vec_at((const float *)weights); }
INLINE float load_one_float(const uint8_t *weight) { return float_of_bits(word_at(weight)); }

static __attribute__((noinline)) void strip_of_panel(const struct product *p) {
    if (p->matrix.num_rows == TILE_ROWS) {
        strip(load_float, load_one_float, sizeof(float), TILE_ROWS, 0, *p);
        return;
    }
    for (int64_t r = 0; r < p->matrix.num_rows; r++) {
        struct product row = *p;
        row.matrix.weights += r * p->matrix.row_bytes;
        row.out += r;
        strip(load_float, load_one_float, sizeof(float), 1, 0, row);
    }
}

// Up to PANEL_TOKENS rows of x: rows of weights become float32 in a panel, a bounded number of columns at a time.
static __attribute__((noinline)) void multiply_panels_once(unpack_fn *unpack, struct block_layout layout,
                                                           const struct product *product) {
    float panel[TILE_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
    const struct matrix *matrix = &product->matrix;
    struct product p = *product;
    for (int64_t k = 0; k < matrix->num_columns; k += PANEL_COLUMNS) {
        int64_t columns = least(matrix->num_columns - k, PANEL_COLUMNS);
        int64_t ahead = prefetch_distance(matrix, columns / layout.length * layout.size_bytes);
        p.x = product->x + k;
        p.accumulate = product->accumulate || k > 0;
        for (int64_t n = 0; n < matrix->num_rows; n += TILE_ROWS) {
            int64_t rows = least(matrix->num_rows - n, TILE_ROWS);
            const uint8_t *weights = matrix->weights + n * matrix->row_bytes + k / layout.length * layout.size_bytes;
            for (int64_t r = 0; r < rows; r++)
                unpack(weights + r * matrix->row_bytes, columns, ahead, panel + r * PANEL_COLUMNS);
            p.matrix = (struct matrix){(const uint8_t *)panel, PANEL_COLUMNS * sizeof(float), rows, columns};
            p.out = product->out + n;
            strip_of_panel(&p);
        }
    }
}

static void multiply_panels(unpack_fn *unpack, struct block_layout layout, const struct product *product) {
    struct product p = *product;
    for (int64_t t = 0; t < product->num_tokens; t += PANEL_TOKENS) {
        p.num_tokens = least(product->num_tokens - t, PANEL_TOKENS);
        p.x = product->x + t * p.x_stride;
        p.out = product->out + t * p.out_stride;
        multiply_panels_once(unpack, layout, &p);
    }
}
