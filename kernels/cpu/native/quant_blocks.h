// Products of a few rows of x with quantised blocks, without writing weights anywhere. Two ways:
//   scaled sums    the quants of a group are multiplied as whole numbers; its scale enters once, for their sum, and its
//                  minimum as minimum * (sum of x over the group), sums that are made once for all rows of weights.
//   weights        each weight is made in a register and used for all rows of x; best from three rows of x on.
// Compiled once per instruction set, which defines beside what quant_tiles.h needs:
//   SUMS_TOKENS     rows of x up to which the first way is taken: 1 or 2
//   WEIGHTS_TOKENS  rows of x up to which the second is: 8, or 0 for never (then panels follow at once)
//   WEIGHTS_SUMS    accumulators there are registers for in the second way
//   WEIGHTS_ROWS    rows of weights at once in the second way, at most
#pragma once
#include "quant_decode.h"
#include "quant_tiles.h"

enum {
    SUMS_ROWS = 2,        // rows of weights at once: they share the loads of x
    SUMS_COLUMNS = 4096,  // bounds the sums of x kept on the stack
    WEIGHTS_X = 6144,     // floats of x in work in the second way: 24 KiB, so that it stays in the first cache
};

// Groups are unrolled where a group is a few wide vectors; narrow ones would only make a great deal of code.
#if LANES > 4
#define UNROLL_GROUPS _Pragma("GCC unroll 32")
#else
#define UNROLL_GROUPS _Pragma("GCC unroll 1")
#endif

typedef void prepare_fn(const uint8_t *block, struct decoded *out);                    // scales and minimums, at least
typedef vec lanes_fn(const uint8_t *block, const struct decoded *decoded, int first);  // quants [first, first + LANES)

// What a type is, all of it known when compiling. Two quants that share a byte lie `pair` apart; 0: none do.
struct format {
    prepare_fn *prepare;
    lanes_fn *lanes;
    int length, size_bytes, group, pair;
    bool has_minimum;
};

typedef float group_sums[SUMS_COLUMNS / 16];

INLINE void unpack_blocks(const struct format f, const uint8_t *restrict block, int64_t num_columns, int64_t ahead,
                          float *restrict out) {
    for (int64_t k = 0; k < num_columns; k += f.length, block += f.size_bytes) {
        struct decoded decoded;
        prefetch(block + ahead, f.size_bytes);
        f.prepare(block, &decoded);
        for (int g = 0; g < f.length / f.group; g++)
#pragma GCC unroll 8
            for (int i = g * f.group; i < (g + 1) * f.group; i += LANES)
                *(loose_vec *)(out + k + i) = f.lanes(block, &decoded, i) * decoded.scale[g] + decoded.minimum[g];
    }
}

INLINE void sums_of_block(const struct format f, const uint8_t *restrict block, const int num_tokens, const float *x,
                          int64_t x_stride, int64_t first_group, const group_sums *x_sums, vec *sums, float *minimums) {
    struct decoded decoded;
    f.prepare(block, &decoded);
    UNROLL_GROUPS
    for (int g = 0; g < f.length / f.group; g++) {
        vec products[SUMS_TOKENS] = {0};
        UNROLL_GROUPS
        for (int i = g * f.group; i < (g + 1) * f.group; i += LANES) {
            vec quants = f.lanes(block, &decoded, i);
            for (int t = 0; t < num_tokens; t++) products[t] += quants * vec_at(x + t * x_stride + i);
        }
        for (int t = 0; t < num_tokens; t++) {
            sums[t] += products[t] * decoded.scale[g];
            if (f.has_minimum) minimums[t] += decoded.minimum[g] * x_sums[t][first_group + g];
        }
    }
}

INLINE void rows_by_sums(const struct format f, const int num_tokens, int64_t ahead, const group_sums *x_sums,
                         const struct product *p) {
    vec sums[SUMS_ROWS][SUMS_TOKENS] = {0};
    float minimums[SUMS_ROWS][SUMS_TOKENS] = {0};
    const uint8_t *block = p->matrix.weights;
    int64_t first_group = 0;
    for (int64_t k = 0; k < p->matrix.num_columns; k += f.length, block += f.size_bytes) {
#pragma GCC unroll 2
        for (int r = 0; r < SUMS_ROWS; r++) {
            prefetch(block + r * p->matrix.row_bytes + ahead, f.size_bytes);
            sums_of_block(f, block + r * p->matrix.row_bytes, num_tokens, p->x + k, p->x_stride, first_group, x_sums,
                          sums[r], minimums[r]);
        }
        first_group += f.length / f.group;
    }
#pragma GCC unroll 2
    for (int r = 0; r < SUMS_ROWS; r++)
        for (int t = 0; t < num_tokens; t++)
            put(p->out + t * p->out_stride + r, sum(sums[r][t]) + minimums[r][t], p->accumulate);
}

static void sum_groups(const struct product *p, int group, group_sums *out) {
    for (int64_t t = 0; t < p->num_tokens; t++)
        for (int64_t g = 0; g < p->matrix.num_columns / group; g++) {
            vec total = {0};
            for (int i = 0; i < group; i += LANES) total += vec_at(p->x + t * p->x_stride + g * group + i);
            out[t][g] = sum(total);
        }
}

// A row left over at the end is not worth a kernel of its own: it goes through a panel.
INLINE void multiply_by_sums(const struct format f, unpack_fn *unpack, const int num_tokens,
                             const struct product *product) {
    group_sums x_sums[SUMS_TOKENS];
    const struct matrix *matrix = &product->matrix;
    struct product p = *product;
    for (int64_t k = 0; k < matrix->num_columns; k += SUMS_COLUMNS) {
        p.matrix.num_columns = least(matrix->num_columns - k, SUMS_COLUMNS);
        p.x = product->x + k;
        p.accumulate = product->accumulate || k > 0;
        int64_t ahead = prefetch_distance(matrix, p.matrix.num_columns / f.length * f.size_bytes);
        if (f.has_minimum) sum_groups(&p, f.group, x_sums);
        p.matrix.weights = matrix->weights + k / f.length * f.size_bytes;
        p.out = product->out;
        int64_t left = matrix->num_rows;
        for (; left >= SUMS_ROWS; left -= SUMS_ROWS) {
            rows_by_sums(f, num_tokens, ahead, x_sums, &p);
            p.out += SUMS_ROWS;
            p.matrix.weights += SUMS_ROWS * matrix->row_bytes;
        }
        p.matrix.num_rows = left;
        if (left > 0) multiply_panels(unpack, (struct block_layout){f.length, f.size_bytes}, &p);
    }
}

#if WEIGHTS_TOKENS > 0
// Visits quants that share a byte one after the other, so that the byte need not be kept in a register for long.
INLINE int paired(int step, const int pair) {
    if (pair <= LANES) return step;
    int base = step / (2 * pair) * (2 * pair), k = (step - base) / LANES;
    return base + k % 2 * pair + k / 2 * LANES;
}

// Sums of the lanes of `num_tokens` vectors of one row of weights, four at a time.
INLINE void put_sums(const vec *sums, const int num_tokens, const struct product *p, float *out) {
    float values[WEIGHTS_TOKENS];
    int t = 0;
    for (; t + 4 <= num_tokens; t += 4) sum4(sums + t, values + t);
    for (; t < num_tokens; t++) values[t] = sum(sums[t]);
    for (t = 0; t < num_tokens; t++) put(out + t * p->out_stride, values[t], p->accumulate);
}

INLINE void rows_by_weights(const struct format f, const int num_rows, const int num_tokens, int64_t ahead,
                            const struct product *p) {
    vec sums[WEIGHTS_ROWS][WEIGHTS_TOKENS] = {0};
    const uint8_t *restrict block = p->matrix.weights;
    for (int64_t k = 0; k < p->matrix.num_columns; k += f.length, block += f.size_bytes) {
        struct decoded decoded[WEIGHTS_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            prefetch(block + r * p->matrix.row_bytes + ahead, f.size_bytes);
            f.prepare(block + r * p->matrix.row_bytes, &decoded[r]);
            if (f.length > f.group) IN_MEMORY(decoded[r]);
        }
        UNROLL_GROUPS
        for (int step = 0; step < f.length; step += LANES) {
            const int i = paired(step, f.pair), g = i / f.group;
            vec weights[WEIGHTS_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++)
                weights[r] = f.lanes(block + r * p->matrix.row_bytes, &decoded[r], i) * decoded[r].scale[g] +
                             decoded[r].minimum[g];
#pragma GCC unroll 8
            for (int t = 0; t < num_tokens; t++) {
                vec x = vec_at(p->x + t * p->x_stride + k + i);
#pragma GCC unroll 4
                for (int r = 0; r < num_rows; r++) sums[r][t] += weights[r] * x;
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) put_sums(sums[r], num_tokens, p, p->out + r);
}

// Rows left over at the end are too few to be worth a kernel of their own: they go through a panel.
INLINE void multiply_by_weights(const struct format f, unpack_fn *unpack, const int num_tokens,
                                const struct product *product) {
    const int most_rows = WEIGHTS_SUMS / num_tokens;
    const int num_rows = most_rows >= 4 && WEIGHTS_ROWS >= 4 ? 4 : most_rows >= 2 ? 2 : 1;
    const int max_columns = WEIGHTS_X / num_tokens / 256 * 256;
    const struct matrix *matrix = &product->matrix;
    struct product p = *product;
    for (int64_t k = 0; k < matrix->num_columns; k += max_columns) {
        p.matrix.num_columns = least(matrix->num_columns - k, max_columns);
        p.matrix.weights = matrix->weights + k / f.length * f.size_bytes;
        p.x = product->x + k;
        p.out = product->out;
        p.accumulate = product->accumulate || k > 0;
        int64_t ahead = prefetch_distance(matrix, p.matrix.num_columns / f.length * f.size_bytes);
        int64_t left = matrix->num_rows;
        for (; left >= num_rows; left -= num_rows) {
            rows_by_weights(f, num_rows, num_tokens, ahead, &p);
            p.out += num_rows;
            p.matrix.weights += num_rows * matrix->row_bytes;
        }
        p.matrix.num_rows = left;
        if (left > 0) multiply_panels(unpack, (struct block_layout){f.length, f.size_bytes}, &p);
    }
}
#endif
