// What the entry points of checksums and of moving rows share with their bodies. Names as in reshard.py and checksum.py.
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { POOL_BLOCK_SLOTS = 16, VECTOR_BYTES = 32, WORD_BYTES = 8 };
enum { STREAM_BYTES = 8 << 20 }; // measured: beyond, lines are better written past the caches

// Rows of every plane, between their places in the pool and one contiguous staging buffer.
typedef struct {
    uint8_t *const *planes; // [num_planes], each [num_blocks][num_pool_heads][16] rows
    const int32_t *runs;    // [num_runs][2]: begin and length, ascending and disjoint, in units of run_slots
    uint8_t *staging;       // [planes][pieces of runs cut at block bounds][heads][slots of the piece] rows
    int64_t num_planes, num_blocks, num_pool_heads, row_bytes, head_begin, num_heads, num_runs, run_slots;
    bool pack, summed, streamed;
    uint64_t first_word;
} Move;

// Return the checksum of the staging's bytes: 0 where none is asked for.
uint64_t move_rows_avx2(const Move *move);
uint64_t move_rows_portable(const Move *move);
uint64_t sum_bytes_avx2(const uint8_t *from, int64_t num_bytes, uint64_t first_word);
uint64_t sum_bytes_portable(const uint8_t *from, int64_t num_bytes, uint64_t first_word);
