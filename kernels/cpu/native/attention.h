// What the entry point of attention shares with its body: the batch, one tile of it, and the tile's scratch.
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { BLOCK_SLOTS = 16, PANEL_ROWS = 6, TILE_ROWS = 48, TILE_BLOCKS = 4, MAX_HEAD_DIM = 256 };
enum { TILE_KEYS = TILE_BLOCKS * BLOCK_SLOTS };
enum { MAX_DIRECT_ROWS = 12 }; // measured: beyond, one transposition costs less than the sums across lanes

// One layer's work of a plan. Shapes and names as in backend.py; strides in floats; window 0, softcap 0, no lse and no
// places mean none.
typedef struct {
    const float *q, *k_pool, *v_pool;
    const int32_t *block_tables, *row_of_sequence, *query_start, *context_tokens;
    float *out, *lse;
    const int32_t *places; // of a block id in this rank's pool; below 0: another rank has it
    int64_t num_sequences, num_tokens, num_q_heads, num_kv_heads, head_dim, q_stride, out_stride;
    int64_t num_blocks, num_pool_heads, kv_head_begin, num_table_rows, table_stride, window;
    int64_t lse_stride, num_places;
    float scale, softcap;
} Batch;

// A step's attention of one shape, checked: what a layer adds is its tensors. A bytes object in Python.
typedef struct {
    Batch batch;
    const int32_t *positions, *slots;                // [num_tokens]; a slot below 0: another rank's row
    int64_t most_block, most_slot, most_position;    // the largest that a layer will touch; -1: none
} Plan;

// A layer's tensors that lie where they lay in the layer before; bytes objects in Python, made by kernels/cpu/attention.py.
typedef struct {
    uint64_t q, out, lse;
    int64_t q_stride, out_stride, lse_stride;
} AttendOperands;

// Rows of one KV head of one sequence: row r of the sequence is query r / group, head r % group.
typedef struct {
    const Batch *batch;
    const int32_t *table;
    int64_t kv_head, first_token, first_position, first_row, num_rows;
} RowTile;

// Up to four of the sequence's blocks that this rank has, in the order of their positions.
typedef struct {
    int64_t num_blocks, next; // the table's place after the last one looked at
    int64_t block[TILE_BLOCKS], position[TILE_BLOCKS];
} KeyTile;

// Parts of one attention, [num_parts][num_tokens][num_heads][head_dim], and their log-sum-exps without the last axis.
typedef struct {
    const float *parts, *lse;
    float *out;
    int64_t num_parts, num_tokens, num_heads, head_dim;
    int64_t part_stride, token_stride, lse_part_stride, lse_token_stride, out_stride;
} Merge;

// 140 KB, on the stack of the calling thread.
typedef struct {
    _Alignas(64) float q[TILE_ROWS * MAX_HEAD_DIM];   // direct: [rows][head_dim]; else panels [head_dim][6]
    _Alignas(64) float sums[TILE_ROWS * MAX_HEAD_DIM]; // [rows][head_dim], of values, not yet divided
    _Alignas(64) float scores[TILE_ROWS * TILE_KEYS];
    _Alignas(64) float keys[BLOCK_SLOTS * MAX_HEAD_DIM]; // one block transposed, [head_dim][16]
    float row_max[TILE_ROWS], row_sum[TILE_ROWS], decay[TILE_ROWS];
} Scratch;

static inline int64_t group_of(const Batch *batch) { return batch->num_q_heads / batch->num_kv_heads; }

void attend_rows_avx2(const RowTile *tile, Scratch *scratch);
void attend_rows_portable(const RowTile *tile, Scratch *scratch);
void merge_parts_avx2(const Merge *merge);
void merge_parts_portable(const Merge *merge);
int64_t spin_fma_avx2(int64_t rounds, float *out);
int64_t spin_fma_portable(int64_t rounds, float *out);
