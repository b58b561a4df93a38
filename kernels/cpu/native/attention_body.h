// One tile of attention: up to 48 rows (query, head of one KV group) against 64 keys at a time: scores, an online
// softmax, values. Few rows (a decode step) read a block by dot products and are bound by memory; many rows transpose it
// once and are bound by FMA. Compiled once per instruction set.
#pragma once
#include "attention.h"
#include "lanes.h"

enum { KEY_LANES = TILE_KEYS / LANES };

INLINE int64_t row_offset(const RowTile *tile, int64_t row, int64_t stride) {
    int64_t group = group_of(tile->batch), r = tile->first_row + row;
    return (tile->first_token + r / group) * stride + (tile->kv_head * group + r % group) * tile->batch->head_dim;
}

INLINE const float *block_at(const RowTile *tile, const float *pool, int64_t block) {
    const Batch *b = tile->batch;
    int64_t plane = block * b->num_pool_heads + b->kv_head_begin + tile->kv_head;
    return pool + plane * BLOCK_SLOTS * b->head_dim;
}

// The blocks from the table's place `next` on that this rank has, before `end`.
INLINE KeyTile next_keys(const RowTile *tile, int64_t next, int64_t end) {
    const int32_t *places = tile->batch->places;
    KeyTile keys = {.num_blocks = 0};
    for (; next < end && keys.num_blocks < TILE_BLOCKS; next++) {
        int64_t block = places ? places[tile->table[next]] : tile->table[next];
        if (block < 0) continue;
        keys.position[keys.num_blocks] = next * BLOCK_SLOTS;
        keys.block[keys.num_blocks++] = block;
    }
    keys.next = next;
    return keys;
}

INLINE int64_t clamp(int64_t value, int64_t most) { return value < 0 ? 0 : value < most ? value : most; }

// How many of the keys stand at positions before `end`: they are the first ones.
INLINE int64_t keys_before(const RowTile *tile, const KeyTile *keys, int64_t end) {
    if (!tile->batch->places) return clamp(end - keys->position[0], TILE_KEYS);
    int64_t count = 0;
    for (int64_t i = 0; i < keys->num_blocks; i++) count += clamp(end - keys->position[i], BLOCK_SLOTS);
    return count;
}

INLINE void prefetch_floats(const float *from, int64_t num_floats) {
    for (int64_t i = 0; i < num_floats; i += 16) __builtin_prefetch(from + i);
}

#define PAIRS_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define PAIRS_HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define FOURS_LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define FOURS_HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)

// The sums of four vectors, in order.
INLINE void store_sums(float *to, const lanes *four) {
    lanes ab = PAIRS_LOW(four[0], four[1]) + PAIRS_HIGH(four[0], four[1]);
    lanes cd = PAIRS_LOW(four[2], four[3]) + PAIRS_HIGH(four[2], four[3]);
    lanes halves = FOURS_LOW(ab, cd) + FOURS_HIGH(ab, cd);
    *(unaligned_quad *)to = halves_sum(halves);
}

// Scores of 1 to 3 rows for one block, four keys at a time; asks for the block's values meanwhile.
INLINE void score_rows(const int rows, const float *q, const float *keys, int64_t dim, const float *next,
                       float *scores) {
    for (int key = 0; key < BLOCK_SLOTS; key += 4) {
        lanes sums[3][4] = {0};
        const float *k = keys + key * dim;
        prefetch_floats(next + key * dim, 4 * dim);
        for (int64_t d = 0; d < dim; d += LANES) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                lanes part = load(k + i * dim + d);
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) sums[r][i] += load(q + r * dim + d) * part;
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++)
            store_sums(scores + r * TILE_KEYS + key, sums[r]);
    }
}

INLINE void score_direct(int64_t rows, const float *q, const float *keys, int64_t dim, const float *next,
                         float *scores) {
    for (int64_t r = 0; r < rows; r += 3) {
        const float *from = q + r * dim;
        float *to = scores + r * TILE_KEYS;
        if (rows - r >= 3)
            score_rows(3, from, keys, dim, next, to);
        else if (rows - r == 2)
            score_rows(2, from, keys, dim, next, to);
        else
            score_rows(1, from, keys, dim, next, to);
    }
}

// Eight keys by eight dimensions, to columns of a [head_dim][16] block.
INLINE void transpose_square(const float *from, int64_t dim, float *to) {
    lanes row[LANES], pair[LANES], four[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) row[i] = load(from + i * dim);
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 2) {
        pair[i] = PAIRS_LOW(row[i], row[i + 1]);
        pair[i + 1] = PAIRS_HIGH(row[i], row[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 4) {
        four[i] = FOURS_LOW(pair[i], pair[i + 2]);
        four[i + 1] = FOURS_HIGH(pair[i], pair[i + 2]);
        four[i + 2] = FOURS_LOW(pair[i + 1], pair[i + 3]);
        four[i + 3] = FOURS_HIGH(pair[i + 1], pair[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        store(to + i * BLOCK_SLOTS, __builtin_shufflevector(four[i], four[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (i + 4) * BLOCK_SLOTS, __builtin_shufflevector(four[i], four[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

INLINE void transpose_block(const float *keys, int64_t dim, float *to) {
    for (int64_t d = 0; d < dim; d += LANES)
        for (int half = 0; half < 2; half++)
            transpose_square(keys + half * LANES * dim + d, dim, to + d * BLOCK_SLOTS + half * LANES);
}

// Scores of one panel of six rows for one transposed block.
INLINE void score_panel(const float *q, const float *keys, int64_t dim, float *scores) {
    lanes low[PANEL_ROWS] = {0}, high[PANEL_ROWS] = {0};
    for (int64_t d = 0; d < dim; d++) {
        lanes first = load(keys + d * BLOCK_SLOTS), second = load(keys + d * BLOCK_SLOTS + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < PANEL_ROWS; r++) {
            float factor = q[d * PANEL_ROWS + r];
            low[r] += factor * first;
            high[r] += factor * second;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < PANEL_ROWS; r++) {
        store(scores + r * TILE_KEYS, low[r]);
        store(scores + r * TILE_KEYS + LANES, high[r]);
    }
}

// One row: softcap, mask outside [begin, end), running maximum and sum; scores become weights. Returns what the sums
// gathered so far are to be multiplied by.
INLINE float soften_row(float *scores, int64_t begin, int64_t end, float softcap, float *row_max, float *row_sum) {
    const int_lanes count = {0, 1, 2, 3, 4, 5, 6, 7};
    const bool masked = begin > 0 || end < TILE_KEYS;
    lanes top = fill(-INFINITY), total = fill(0.0f);
    for (int i = 0; i < KEY_LANES; i++) {
        lanes s = load(scores + i * LANES);
        if (softcap != 0.0f) s = tanh_lanes(s / softcap) * softcap;
        if (masked) {
            int_lanes key = count + i * LANES;
            s = select_lanes((key >= (int32_t)begin) & (key < (int32_t)end), s, fill(-INFINITY));
        }
        top = max_lanes(top, s);
        store(scores + i * LANES, s);
    }
    float before = *row_max, largest = largest_lane(top);
    if (before > largest) largest = before;
    *row_max = largest;
    if (largest == -INFINITY) largest = 0.0f; // nothing seen yet: every weight is 0, none is NaN
    for (int i = 0; i < KEY_LANES; i++) {
        lanes weight = exp_lanes(load(scores + i * LANES) - largest);
        total += weight;
        store(scores + i * LANES, weight);
    }
    float decay = exp_lanes(fill(before - largest))[0];
    *row_sum = *row_sum * decay + sum_lanes(total);
    return decay;
}

// sums[rows][8 * width] = sums * decay + weights times values, over the keys [begin, end) of one tile.
INLINE void add_columns(const int rows, const int width, const float *const *values, int64_t column, int64_t begin,
                        int64_t end, int64_t dim, const float *decay, const float *weights, float *sums) {
    lanes total[PANEL_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) total[r][w] = load(sums + r * dim + column + w * LANES) * decay[r];
    for (int64_t key = begin; key < end;) {
        const float *value = values[key / BLOCK_SLOTS] + key % BLOCK_SLOTS * dim + column, *weight = weights + key;
        int64_t stop = (key / BLOCK_SLOTS + 1) * BLOCK_SLOTS;
        if (stop > end) stop = end;
        for (; key < stop; key++, value += dim, weight++) {
            // Of parts of values and weights the fewer stay in registers, the others pass through one.
            lanes part[4];
#pragma GCC unroll 4
            for (int w = 0; w < width; w++) part[w] = load(value + w * LANES);
            if (rows > width) {
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int w = 0; w < width; w++) total[r][w] += part[w] * weight[r * TILE_KEYS];
            } else {
#pragma GCC unroll 4
                for (int w = 0; w < width; w++)
#pragma GCC unroll 6
                    for (int r = 0; r < rows; r++) total[r][w] += part[w] * weight[r * TILE_KEYS];
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) store(sums + r * dim + column + w * LANES, total[r][w]);
}

INLINE void add_values(const int rows, const float *const *values, int64_t begin, int64_t end, int64_t dim,
                       const float *decay, const float *weights, float *sums) {
    const int width = rows <= 3 ? 4 : 2;
    int64_t column = 0;
    for (; column + width * LANES <= dim; column += width * LANES)
        add_columns(rows, width, values, column, begin, end, dim, decay, weights, sums);
    for (; column < dim; column += LANES)
        add_columns(rows, 1, values, column, begin, end, dim, decay, weights, sums);
}

INLINE void add_panel(int64_t rows, const float *const *values, int64_t begin, int64_t end, int64_t dim,
                      const float *decay, const float *weights, float *sums) {
    switch (rows) {
    case 1: add_values(1, values, begin, end, dim, decay, weights, sums); break;
    case 2: add_values(2, values, begin, end, dim, decay, weights, sums); break;
    case 3: add_values(3, values, begin, end, dim, decay, weights, sums); break;
    case 4: add_values(4, values, begin, end, dim, decay, weights, sums); break;
    case 5: add_values(5, values, begin, end, dim, decay, weights, sums); break;
    default: add_values(6, values, begin, end, dim, decay, weights, sums); break;
    }
}

INLINE void begin_tile(const RowTile *tile, bool direct, Scratch *s) {
    int64_t dim = tile->batch->head_dim, padded = (tile->num_rows + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    for (int64_t r = 0; r < padded; r++) {
        bool real = r < tile->num_rows;
        const float *q = tile->batch->q + (real ? row_offset(tile, r, tile->batch->q_stride) : 0);
        float scale = real ? tile->batch->scale : 0.0f;
        float *panel = s->q + r / PANEL_ROWS * PANEL_ROWS * dim + r % PANEL_ROWS;
        if (direct)
            for (int64_t d = 0; d < dim; d++) s->q[r * dim + d] = q[d] * scale;
        else
            for (int64_t d = 0; d < dim; d++) panel[d * PANEL_ROWS] = real ? q[d] * scale : 0.0f;
        s->row_max[r] = -INFINITY;
        s->row_sum[r] = s->decay[r] = 0.0f;
    }
    memset(s->sums, 0, (size_t)(padded * dim) * sizeof(float));
}

// One tile of scores, softmax and values; asks for the next one. [begin, end) are the positions any row sees.
INLINE void attend_keys(const RowTile *tile, const KeyTile *now, const KeyTile *next, int64_t begin, int64_t end,
                        bool direct, Scratch *s) {
    const Batch *b = tile->batch;
    const int64_t dim = b->head_dim, rows = tile->num_rows, group = group_of(b);
    const float *values[TILE_BLOCKS];
    for (int64_t i = 0; i < now->num_blocks; i++) {
        const float *keys = block_at(tile, b->k_pool, now->block[i]);
        values[i] = block_at(tile, b->v_pool, now->block[i]);
        float *scores = s->scores + i * BLOCK_SLOTS;
        if (direct) {
            score_direct(rows, s->q, keys, dim, values[i], scores);
            continue;
        }
        transpose_block(keys, dim, s->keys);
        for (int64_t r = 0; r < rows; r += PANEL_ROWS)
            score_panel(s->q + r * dim, s->keys, dim, scores + r * TILE_KEYS);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t seen = tile->first_position + (tile->first_row + r) / group + 1;
        const int64_t oldest = b->window ? keys_before(tile, now, seen - b->window) : 0;
        s->decay[r] = soften_row(s->scores + r * TILE_KEYS, oldest, keys_before(tile, now, seen), b->softcap,
                                 s->row_max + r, s->row_sum + r);
    }
    if (direct)
        for (int64_t i = 0; i < next->num_blocks; i++)
            prefetch_floats(block_at(tile, b->k_pool, next->block[i]), BLOCK_SLOTS * dim);
    const int64_t from = keys_before(tile, now, begin), to = keys_before(tile, now, end);
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
        add_panel(rows - r, values, from, to, dim, s->decay + r, s->scores + r * TILE_KEYS, s->sums + r * dim);
}

void PATH(attend_rows)(const RowTile *tile, Scratch *s) {
    const Batch *b = tile->batch;
    const int64_t dim = b->head_dim, group = group_of(b);
    const bool direct = tile->num_rows <= MAX_DIRECT_ROWS;
    const int64_t end = tile->first_position + (tile->first_row + tile->num_rows - 1) / group + 1;
    const int64_t first_seen = tile->first_position + tile->first_row / group + 1;
    const int64_t begin = b->window && first_seen > b->window ? first_seen - b->window : 0;
    const int64_t end_block = (end + BLOCK_SLOTS - 1) / BLOCK_SLOTS;
    begin_tile(tile, direct, s);
    for (KeyTile now = next_keys(tile, begin / BLOCK_SLOTS, end_block), next; now.num_blocks; now = next) {
        next = next_keys(tile, now.next, end_block);
        attend_keys(tile, &now, &next, begin, end, direct, s);
    }
    for (int64_t r = 0; r < tile->num_rows; r++) {
        float *out = b->out + row_offset(tile, r, b->out_stride), sum = s->row_sum[r];
        if (b->lse) {
            int64_t row = tile->first_row + r, head = tile->kv_head * group + row % group;
            b->lse[(tile->first_token + row / group) * b->lse_stride + head] = s->row_max[r] + logf(sum);
            if (sum == 0.0f) sum = 1.0f; // nothing seen here: zeros
        }
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(s->sums + r * dim + d) / sum);
    }
}

// out = sum of parts * e^(lse - m) / sum of e^(lse - m), m the largest: weights in double, so that none adds an error.
INLINE void merge_head(const Merge *m, const float *parts, const float *lse, float *out) {
    double top = -INFINITY, sum = 0;
    for (int64_t p = 0; p < m->num_parts; p++)
        if (lse[p * m->lse_part_stride] > top) top = lse[p * m->lse_part_stride];
    for (int64_t p = 0; p < m->num_parts; p++) sum += exp(lse[p * m->lse_part_stride] - top);
    for (int64_t p = 0; p < m->num_parts; p++) {
        const float *part = parts + p * m->part_stride, weight = (float)(exp(lse[p * m->lse_part_stride] - top) / sum);
        for (int64_t d = 0; d < m->head_dim; d += LANES)
            store(out + d, p ? load(out + d) + load(part + d) * weight : load(part + d) * weight);
    }
}

void PATH(merge_parts)(const Merge *m) {
    for (int64_t t = 0; t < m->num_tokens; t++)
        for (int64_t h = 0; h < m->num_heads; h++)
            merge_head(m, m->parts + t * m->token_stride + h * m->head_dim, m->lse + t * m->lse_token_stride + h,
                       m->out + t * m->out_stride + h * m->head_dim);
}

// Twelve independent chains: the core's peak. Returns the flops done; out keeps them from being left out.
int64_t PATH(spin_fma)(int64_t rounds, float *out) {
    lanes x[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) x[i] = fill(1.0f + (float)i);
    for (int64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) x[i] = x[i] * 0.5f + 0.25f;
    }
    *out = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) *out += sum_lanes(x[i]);
    return rounds * 12 * LANES * 2;
}
