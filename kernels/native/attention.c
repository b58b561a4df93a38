// Attention of a ragged batch over the paged pool of keys and values, read where they lie: no gather of blocks or tables.
// One tile is up to 48 rows (query, head of one KV group) against 64 keys: scores, an online softmax, values. Few rows (a
// decode step) read a block by dot products and are bound by memory; many rows transpose it once and are bound by FMA.
#include "arguments.h"
#include "lanes.h"
#include <stdio.h>

enum { BLOCK_SLOTS = 16, PANEL_ROWS = 6, TILE_ROWS = 48, TILE_BLOCKS = 4, MAX_HEAD_DIM = 256 };
enum { TILE_KEYS = TILE_BLOCKS * BLOCK_SLOTS, KEY_LANES = TILE_KEYS / LANES };
enum { MAX_DIRECT_ROWS = 6 }; // measured: beyond, one transposition costs less than the sums across lanes

// Shapes and names as in attention.py; strides in floats; window 0 and softcap 0 mean none.
typedef struct {
    const float *q, *k_pool, *v_pool;
    const int32_t *block_tables, *row_of_sequence, *query_start, *context_tokens;
    float *out;
    int64_t num_sequences, num_tokens, num_q_heads, num_kv_heads, head_dim, q_stride, out_stride;
    int64_t num_blocks, num_pool_heads, kv_head_begin, num_table_rows, table_stride, window;
    float scale, softcap;
} Batch;

// Rows of one KV head of one sequence: row r of the sequence is query r / group, head r % group.
typedef struct {
    const Batch *batch;
    const int32_t *table;
    int64_t kv_head, first_token, first_position, first_row, num_rows;
} RowTile;

// 140 KB, on the stack of the calling thread.
typedef struct {
    _Alignas(64) float q[TILE_ROWS * MAX_HEAD_DIM];   // direct: [rows][head_dim]; else panels [head_dim][6]
    _Alignas(64) float sums[TILE_ROWS * MAX_HEAD_DIM]; // [rows][head_dim], of values, not yet divided
    _Alignas(64) float scores[TILE_ROWS * TILE_KEYS];
    _Alignas(64) float keys[BLOCK_SLOTS * MAX_HEAD_DIM]; // one block transposed, [head_dim][16]
    float row_max[TILE_ROWS], row_sum[TILE_ROWS], decay[TILE_ROWS];
} Scratch;

INLINE int64_t group_of(const Batch *batch) { return batch->num_q_heads / batch->num_kv_heads; }

INLINE int64_t row_offset(const RowTile *tile, int64_t row, int64_t stride) {
    int64_t group = group_of(tile->batch), r = tile->first_row + row;
    return (tile->first_token + r / group) * stride + (tile->kv_head * group + r % group) * tile->batch->head_dim;
}

INLINE const float *block_at(const RowTile *tile, const float *pool, int64_t block) {
    const Batch *b = tile->batch;
    int64_t plane = tile->table[block] * b->num_pool_heads + b->kv_head_begin + tile->kv_head;
    return pool + plane * BLOCK_SLOTS * b->head_dim;
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
INLINE void score_rows(const int rows, const float *q, const float *keys, int64_t dim, const float *next, float *scores) {
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

INLINE void score_direct(int64_t rows, const float *q, const float *keys, int64_t dim, const float *next, float *scores) {
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
            lanes factor = fill(q[d * PANEL_ROWS + r]);
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
    lanes top = fill(-INFINITY), total = fill(0.0f);
    for (int i = 0; i < KEY_LANES; i++) {
        lanes s = load(scores + i * LANES);
        if (softcap != 0.0f) s = tanh_lanes(s / softcap) * softcap;
        int_lanes key = count + i * LANES;
        s = select_lanes((key >= (int32_t)begin) & (key < (int32_t)end), s, fill(-INFINITY));
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
    for (int64_t key = begin; key < end; key++) {
        const float *value = values[key / BLOCK_SLOTS] + key % BLOCK_SLOTS * dim + column;
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            lanes part = load(value + w * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) total[r][w] += part * weights[r * TILE_KEYS + key];
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

// Keys from block `first` on: one tile of scores, softmax and values. [begin, end) are the positions any row sees.
INLINE void attend_keys(const RowTile *tile, int64_t first, int64_t begin, int64_t end, bool direct, Scratch *s) {
    const Batch *b = tile->batch;
    const int64_t dim = b->head_dim, rows = tile->num_rows, base = first * BLOCK_SLOTS, group = group_of(b);
    const int64_t last = (end - 1) / BLOCK_SLOTS, num_blocks = last - first + 1 < TILE_BLOCKS ? last - first + 1 : TILE_BLOCKS;
    const float *values[TILE_BLOCKS];
    for (int64_t i = 0; i < num_blocks; i++) {
        const float *keys = block_at(tile, b->k_pool, first + i);
        values[i] = block_at(tile, b->v_pool, first + i);
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
        int64_t seen = tile->first_position + (tile->first_row + r) / group + 1, oldest = b->window ? seen - b->window : 0;
        s->decay[r] = soften_row(s->scores + r * TILE_KEYS, oldest > base ? oldest - base : 0, seen - base, b->softcap,
                                 s->row_max + r, s->row_sum + r);
    }
    if (direct)
        for (int64_t i = first + TILE_BLOCKS; i < first + 2 * TILE_BLOCKS && i <= last; i++)
            prefetch_floats(block_at(tile, b->k_pool, i), BLOCK_SLOTS * dim);
    const int64_t from = begin > base ? begin - base : 0, to = end - base < TILE_KEYS ? end - base : TILE_KEYS;
    for (int64_t r = 0; r < rows; r += PANEL_ROWS)
        add_panel(rows - r, values, from, to, dim, s->decay + r, s->scores + r * TILE_KEYS, s->sums + r * dim);
}

INLINE void attend_rows_body(const RowTile *tile, Scratch *s) {
    const Batch *b = tile->batch;
    const int64_t dim = b->head_dim, group = group_of(b);
    const bool direct = tile->num_rows <= MAX_DIRECT_ROWS;
    const int64_t end = tile->first_position + (tile->first_row + tile->num_rows - 1) / group + 1;
    const int64_t first_seen = tile->first_position + tile->first_row / group + 1;
    const int64_t begin = b->window && first_seen > b->window ? first_seen - b->window : 0;
    begin_tile(tile, direct, s);
    for (int64_t first = begin / BLOCK_SLOTS; first * BLOCK_SLOTS < end; first += TILE_BLOCKS)
        attend_keys(tile, first, begin, end, direct, s);
    for (int64_t r = 0; r < tile->num_rows; r++) {
        float *out = b->out + row_offset(tile, r, b->out_stride);
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(s->sums + r * dim + d) / s->row_sum[r]);
    }
}
TWO_PATHS(attend_rows, (const RowTile *tile, Scratch *scratch), (tile, scratch))

static void attend_batch(const Batch *b) {
    Scratch scratch;
    for (int64_t i = 0; i < b->num_sequences; i++) {
        int64_t num_queries = b->query_start[i + 1] - b->query_start[i], num_rows = num_queries * group_of(b);
        RowTile tile = {.batch = b, .table = b->block_tables + b->row_of_sequence[i] * b->table_stride};
        tile.first_token = b->query_start[i];
        tile.first_position = b->context_tokens[i] - num_queries;
        for (tile.kv_head = 0; tile.kv_head < b->num_kv_heads; tile.kv_head++)
            for (tile.first_row = 0; tile.first_row < num_rows; tile.first_row += TILE_ROWS) {
                int64_t left = num_rows - tile.first_row;
                tile.num_rows = left < TILE_ROWS ? left : TILE_ROWS;
                attend_rows(&tile, &scratch);
            }
    }
}

// Everything read from the tables is checked before anything is written.
static void check_sequence(const Batch *b, int64_t i, Refusal *refusal) {
    int64_t row = b->row_of_sequence[i], begin = b->query_start[i], end = b->query_start[i + 1], context = b->context_tokens[i];
    if (row < 0 || row >= b->num_table_rows) {
        REFUSE(refusal, "sequence %ld: table row %ld outside the %ld resident rows", i, row, b->num_table_rows);
    } else if (begin > end || begin < 0 || end > b->num_tokens) {
        REFUSE(refusal, "sequence %ld: queries [%ld, %ld) outside the %ld of the batch", i, begin, end, b->num_tokens);
    } else if (context < end - begin || context > b->table_stride * BLOCK_SLOTS) {
        REFUSE(refusal, "sequence %ld: context of %ld tokens, but %ld queries and a table for %ld tokens", i, context,
               end - begin, b->table_stride * BLOCK_SLOTS);
    } else {
        int64_t oldest = context - (end - begin) + 1 - b->window;
        const int32_t *table = b->block_tables + row * b->table_stride;
        for (int64_t j = b->window && oldest > 0 ? oldest / BLOCK_SLOTS : 0; j * BLOCK_SLOTS < context; j++)
            if (table[j] < 0 || table[j] >= b->num_blocks)
                REFUSE(refusal, "sequence %ld: block %d at place %ld of table row %ld outside the pool's %ld blocks", i,
                       table[j], j, row, b->num_blocks);
    }
}

static void check_batch(const Batch *b, Refusal *refusal) {
    if (b->query_start[0] != 0 || b->query_start[b->num_sequences] != b->num_tokens)
        REFUSE(refusal, "query_start runs from %d to %d, but q has %ld tokens", b->query_start[0],
               b->query_start[b->num_sequences], b->num_tokens);
    for (int64_t i = 0; i < b->num_sequences && refusal->text[0] == 0; i++) check_sequence(b, i, refusal);
}

static PyObject *paged_attention(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("paged_attention", items, count, 23);
    Batch batch = {
        .q = address_at(&a, 0), .k_pool = address_at(&a, 1), .v_pool = address_at(&a, 2),
        .block_tables = address_at(&a, 3), .row_of_sequence = address_at(&a, 4), .query_start = address_at(&a, 5),
        .context_tokens = address_at(&a, 6), .out = address_at(&a, 7), .num_sequences = int_at(&a, 8),
        .num_tokens = int_at(&a, 9), .num_q_heads = int_at(&a, 10), .num_kv_heads = int_at(&a, 11),
        .head_dim = int_at(&a, 12), .q_stride = int_at(&a, 13), .out_stride = int_at(&a, 14),
        .num_blocks = int_at(&a, 15), .num_pool_heads = int_at(&a, 16), .kv_head_begin = int_at(&a, 17),
        .num_table_rows = int_at(&a, 18), .table_stride = int_at(&a, 19), .window = int_at(&a, 20),
        .scale = float_at(&a, 21), .softcap = float_at(&a, 22),
    };
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    Py_BEGIN_ALLOW_THREADS;
    check_batch(&batch, &refusal);
    if (refusal.text[0] == 0) attend_batch(&batch);
    Py_END_ALLOW_THREADS;
    return none_or_raise(&refusal);
}

INLINE void spin_fma_body(int64_t rounds, float *out) {
    lanes x[12];
    for (int i = 0; i < 12; i++) x[i] = fill(1.0f + (float)i);
    for (int64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) x[i] = x[i] * 0.5f + 0.25f;
        __asm__ volatile("" ::: "memory");
    }
    *out = 0;
    for (int i = 0; i < 12; i++) *out += sum_lanes(x[i]);
}
TWO_PATHS(spin_fma, (int64_t rounds, float *out), (rounds, out))

// The core's own peak, for the bench to measure against: returns the flops done.
static PyObject *fma_rounds(PyObject *self, PyObject *rounds) {
    (void)self;
    int64_t num = PyLong_AsLongLong(rounds);
    if (num == -1 && PyErr_Occurred()) return NULL;
    float out;
    Py_BEGIN_ALLOW_THREADS;
    spin_fma(num, &out);
    Py_END_ALLOW_THREADS;
    return out > 0 ? PyLong_FromLongLong(num * 12 * LANES * 2) : PyLong_FromLong(0);
}

static PyMethodDef methods[] = {
    {"paged_attention", (PyCFunction)(void (*)(void))paged_attention, METH_FASTCALL, "See kernels/attention.py."},
    {"fma_rounds", fma_rounds, METH_O, "fma_rounds(n) -> flops: n rounds of twelve independent vector FMAs."},
    {NULL, NULL, 0, NULL},
};

int add_attention(PyObject *module) { return PyModule_AddFunctions(module, methods); }
