// The kernels of every type, once per instruction set. The file that includes this defines, before it does:
//   LANES, BYTE_LANES  see quant_vector.h
//   TILE_TOKENS        rows of x that a tile of four rows of weights keeps in registers
//   FUSED_TOKENS       rows of x up to which blocks are multiplied without making weights of them first
//   KERNELS            the name of the table to define
// and, after including quant_vector.h, how memory becomes vectors (widen_signed, widen_unsigned, widen_words, halves) and
// how the lanes of one vector, or of four, are summed (sum, sum4).
//
// Two ways to multiply. For up to FUSED_TOKENS rows of x, blocks are turned into vectors of small whole numbers and
// multiplied as such; the scale of a group enters once for its sum, and its minimum as minimum * (sum of x over the group),
// where those sums are made once for all rows of weights. For more rows of x, four rows of weights at a time become
// float32 in a panel that stays in the first cache, and tiles of registers run over it.
// Sums are float32 in a fixed order, which depends on the number of rows of x but not on what the rows hold.
#pragma once
#include "quant_decode.h"

// Groups are unrolled where a group is a few wide vectors; narrow ones would only make a great deal of code.
#if LANES > 4
#define UNROLL_GROUPS _Pragma("GCC unroll 16")
#else
#define UNROLL_GROUPS _Pragma("GCC unroll 1")
#endif

enum {
    TILE_ROWS = 4,            // rows of weights in a panel and in a tile
    PANEL_COLUMNS = 1536,     // 4 * 1536 floats are 24 KiB: half of a first-level cache, the other half is for x
    PANEL_TOKENS = 64,        // their x is at most 64 * 1536 floats, 384 KiB: it stays in a second-level cache
    FUSED_COLUMNS = 4096,     // bounds the sums of x kept on the stack: 3 * 256 floats
    PREFETCH_BYTES = 2048,    // ahead of the block in work; prefetching past the end of a mapping is harmless
};

typedef void prepare_fn(const uint8_t *block, struct decoded *out);                         // scales and minimums, at least
typedef vec lanes_fn(const uint8_t *block, const struct decoded *decoded, int first);       // quants [first, first + LANES)
typedef vec load_fn(const uint8_t *weights);                                                // LANES unquantised weights
typedef float load_one_fn(const uint8_t *weight);

// ---- tiles: unquantised weights times up to TILE_TOKENS rows of x ----

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE void put(float *out, float value, bool accumulate) { *out = accumulate ? *out + value : value; }

INLINE void tile(load_fn *load, load_one_fn *load_one, const int weight_bytes, const int num_rows, const int num_tokens,
                 const struct product *p) {
    const uint8_t *weights = p->matrix.weights;
    const int64_t columns = p->matrix.num_columns, stride = p->matrix.row_bytes;
    // One row of x alone would wait for its own additions, so it alternates between two sets of accumulators.
    const int num_sets = num_tokens == 1 && TILE_TOKENS > 1 ? 2 : 1, num_x = num_tokens * num_sets;
    vec sums[TILE_TOKENS][TILE_ROWS] = {0};
    int64_t k = 0;
    for (; k + num_sets * LANES <= columns; k += num_sets * LANES) {
        vec x[TILE_TOKENS];
#pragma GCC unroll 8
        for (int i = 0; i < num_x; i++)
            x[i] = num_sets == 2 ? vec_at(p->x + k + i * LANES) : vec_at(p->x + i * p->x_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
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

// All rows of x against `num_rows` rows of weights (the product's own count is not looked at), in tiles as even as can be.
INLINE void strip(load_fn *load, load_one_fn *load_one, const int weight_bytes, const int num_rows, struct product p) {
    while (p.num_tokens > 0) {
        int64_t num_tiles = (p.num_tokens + TILE_TOKENS - 1) / TILE_TOKENS, taken = (p.num_tokens + num_tiles - 1) / num_tiles;
        switch (taken) {
#define TILE(n) case n: tile(load, load_one, weight_bytes, num_rows, n, &p); break;
            TILE(1)
#if TILE_TOKENS >= 3
            TILE(2) TILE(3)
#endif
#if TILE_TOKENS >= 6
            TILE(4) TILE(5) TILE(6)
#endif
#undef TILE
        }
        p.x += taken * p.x_stride;
        p.out += taken * p.out_stride;
        p.num_tokens -= taken;
    }
}

INLINE void strips(load_fn *load, load_one_fn *load_one, const int weight_bytes, const struct product *product) {
    struct product p = *product;
    for (int64_t n = 0; n < product->matrix.num_rows;) {
        bool whole = n + TILE_ROWS <= product->matrix.num_rows;
        p.matrix.weights = product->matrix.weights + n * p.matrix.row_bytes;
        p.out = product->out + n;
        if (whole)
            strip(load, load_one, weight_bytes, TILE_ROWS, p);
        else
            strip(load, load_one, weight_bytes, 1, p);
        n += whole ? TILE_ROWS : 1;
    }
}

INLINE vec load_float(const uint8_t *weights) { return vec_at((const float *)weights); }
INLINE float load_one_float(const uint8_t *weight) { return float_of_bits(word_at(weight)); }

static __attribute__((noinline)) void strip_of_panel(const struct product *p) {
    if (p->matrix.num_rows == TILE_ROWS)
        strip(load_float, load_one_float, sizeof(float), TILE_ROWS, *p);
    else
        for (int64_t r = 0; r < p->matrix.num_rows; r++) {
            struct product row = *p;
            row.matrix.weights += r * p->matrix.row_bytes;
            row.out += r;
            strip(load_float, load_one_float, sizeof(float), 1, row);
        }
}

typedef void unpack_fn(const uint8_t *row, int64_t num_columns, float *out);

// Rows of weights become float32 in a panel, four at a time and a bounded number of columns at a time.
static __attribute__((noinline)) void multiply_tokens(unpack_fn *unpack, struct block_layout layout, const struct product *product) {
    float panel[TILE_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
    const struct matrix *matrix = &product->matrix;
    struct product p = *product;
    for (int64_t k = 0; k < matrix->num_columns; k += PANEL_COLUMNS) {
        int64_t columns = least(matrix->num_columns - k, PANEL_COLUMNS);
        p.x = product->x + k;
        p.accumulate = product->accumulate || k > 0;
        for (int64_t n = 0; n < matrix->num_rows; n += TILE_ROWS) {
            int64_t rows = least(matrix->num_rows - n, TILE_ROWS);
            const uint8_t *weights = matrix->weights + n * matrix->row_bytes + k / layout.length * layout.size_bytes;
            for (int64_t r = 0; r < rows; r++) unpack(weights + r * matrix->row_bytes, columns, panel + r * PANEL_COLUMNS);
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
        multiply_tokens(unpack, layout, &p);
    }
}

// ---- quantised blocks ----

INLINE void unpack_blocks(prepare_fn *prepare, lanes_fn *lanes, const int length, const int size_bytes, const int group,
                          const uint8_t *restrict block, int64_t num_columns, float *restrict out) {
    for (int64_t k = 0; k < num_columns; k += length, block += size_bytes) {
        struct decoded decoded;
        __builtin_prefetch(block + PREFETCH_BYTES);
        prepare(block, &decoded);
        for (int g = 0; g < length / group; g++)
#pragma GCC unroll 8
            for (int i = 0; i < group; i += LANES)
                *(loose_vec *)(out + k + g * group + i) =
                    lanes(block, &decoded, g * group + i) * decoded.scale[g] + decoded.minimum[g];
    }
}

// `num_rows` rows of weights times `num_tokens` rows of x, straight from the blocks; group_sums[t][g] is the sum of x.
INLINE void dot_blocks(prepare_fn *prepare, lanes_fn *lanes, const int length, const int size_bytes, const int group,
                       const bool has_minimum, const int num_rows, const int num_tokens, const struct product *p,
                       float (*group_sums)[FUSED_COLUMNS / 16]) {
    vec sums[2][FUSED_TOKENS] = {0};
    float from_minimums[2][FUSED_TOKENS] = {0};
    const uint8_t *restrict block = p->matrix.weights;
    for (int64_t k = 0, first_group = 0; k < p->matrix.num_columns; k += length, block += size_bytes) {
#pragma GCC unroll 2
        for (int r = 0; r < num_rows; r++) {
            const uint8_t *weights = block + r * p->matrix.row_bytes;
            struct decoded decoded;
            __builtin_prefetch(weights + PREFETCH_BYTES);
            prepare(weights, &decoded);
            UNROLL_GROUPS
            for (int g = 0; g < length / group; g++) {
                vec products[FUSED_TOKENS] = {0};
                UNROLL_GROUPS
                for (int i = 0; i < group; i += LANES) {
                    vec quants = lanes(weights, &decoded, g * group + i);
#pragma GCC unroll 3
                    for (int t = 0; t < num_tokens; t++) {
                        vec x = vec_at(p->x + t * p->x_stride + k + g * group + i);
                        products[t] = i == 0 ? quants * x : products[t] + quants * x;
                    }
                }
#pragma GCC unroll 3
                for (int t = 0; t < num_tokens; t++) {
                    sums[r][t] += products[t] * decoded.scale[g];
                    if (has_minimum) from_minimums[r][t] += decoded.minimum[g] * group_sums[t][first_group + g];
                }
            }
        }
        first_group += length / group;
    }
#pragma GCC unroll 2
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 3
        for (int t = 0; t < num_tokens; t++)
            put(p->out + t * p->out_stride + r, sum(sums[r][t]) + from_minimums[r][t], p->accumulate);
}

static void sum_groups(const struct product *p, int group, float (*group_sums)[FUSED_COLUMNS / 16]) {
    for (int64_t t = 0; t < p->num_tokens; t++)
        for (int64_t g = 0; g < p->matrix.num_columns / group; g++) {
            vec total = {0};
            for (int i = 0; i < group; i += LANES) total += vec_at(p->x + t * p->x_stride + g * group + i);
            group_sums[t][g] = sum(total);
        }
}

INLINE void multiply_fused(prepare_fn *prepare, lanes_fn *lanes, const int length, const int size_bytes, const int group,
                           const bool has_minimum, const int num_tokens, const struct product *product) {
    float group_sums[FUSED_TOKENS][FUSED_COLUMNS / 16];
    const struct matrix *matrix = &product->matrix;
    struct product p = *product;
    for (int64_t k = 0; k < matrix->num_columns; k += FUSED_COLUMNS) {
        p.matrix.num_columns = least(matrix->num_columns - k, FUSED_COLUMNS);
        p.x = product->x + k;
        p.accumulate = product->accumulate || k > 0;
        if (has_minimum) sum_groups(&p, group, group_sums);
        int64_t n = 0;
        p.matrix.weights = matrix->weights + k / length * size_bytes;
        for (; n + 2 <= matrix->num_rows; n += 2, p.matrix.weights += 2 * matrix->row_bytes) {
            p.out = product->out + n;
            dot_blocks(prepare, lanes, length, size_bytes, group, has_minimum, 2, num_tokens, &p, group_sums);
        }
        p.out = product->out + n;
        if (n < matrix->num_rows)
            dot_blocks(prepare, lanes, length, size_bytes, group, has_minimum, 1, num_tokens, &p, group_sums);
    }
}
