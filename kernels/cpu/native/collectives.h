// The shared region of one communicator, as all ranks of a host map it: every word on it has one writer, except the bell,
// its sleepers and the abort word. A zero-filled region is the start of a generation.
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { LINE_BYTES = 64, NUM_BANKS = 2, MAX_RANKS = 32, PAGE_BYTES = 4096 };
static const uint64_t REGION_MAGIC = 0x3168736d70696c66u;  // "flipmsh1", little endian

// The closed set of outcomes; kernels/cpu/collectives.py mirrors it and a test holds the two together.
enum status { OK, DATA_TIMEOUT, ACK_TIMEOUT, ABORTED, AHEAD, MISMATCH, OVERWRITTEN };
// What an operation waited for, or which agreement failed.
enum wait { WAIT_NONE, WAIT_DATA, WAIT_ACKNOWLEDGEMENT, WAIT_MESSAGE, WAIT_CREDIT, WAIT_BOARD,
            AGREE_OPERATION, AGREE_PURPOSE, AGREE_BYTES, AGREE_TAG, AGREE_ORDINAL };
enum operation_code { NO_OPERATION, ALL_REDUCE, ALL_GATHER, BROADCAST, BARRIER, SEND, RECV, PUBLISH, READ,
                      ALL_TO_ALL };

typedef struct {
    uint64_t magic, num_ranks, stage_bytes, num_slots, slot_bytes, num_board_steps, max_rows;
    _Alignas(LINE_BYTES) _Atomic uint64_t abort_reason;  // zero: none; the first reason stays
} region_header;

// A rank's data flag of one bank: the round whose bytes stand in its stage, and what they are.
typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint64_t round;
    uint64_t bytes;
    uint32_t operation, purpose;
} data_flag;

// What a rank is in and waits for, for readers outside; stays as it was when an operation fails.
typedef struct {
    _Alignas(LINE_BYTES) uint32_t pid;
    uint32_t operation, purpose, status, wait, peer;
    uint64_t waited, seen, wait_ns, num_operations;
} mirror_line;

typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint32_t bell;  // the futex word this rank sleeps on
    _Atomic uint32_t sleepers;
    _Alignas(LINE_BYTES) _Atomic uint64_t acknowledged;  // every round up to this one has been read by this rank
    data_flag data[NUM_BANKS];
    mirror_line mirror;
} rank_lines;

// One ordered pair of ranks; both count slots (chunks of messages), not messages.
typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint64_t sent;
    _Alignas(LINE_BYTES) _Atomic uint64_t consumed;
} channel_lines;

typedef struct {
    _Alignas(LINE_BYTES) uint64_t ordinal;
    uint64_t tag, message_bytes;
    _Alignas(LINE_BYTES) unsigned char bytes[];
} channel_slot;

// stamp: 2 * sequence + 1 while it is being written, 2 * sequence + 2 once it can be read.
typedef struct {
    _Alignas(LINE_BYTES) _Atomic uint64_t stamp;
    _Atomic uint32_t num_ids;
    _Atomic int32_t ids[];
} board_entry;

typedef struct {
    uint64_t num_ranks, stage_bytes, num_slots, slot_bytes, num_board_steps, max_rows;
    uint64_t ranks, channels, board, board_entry_bytes, stages, slots, slot_stride, total_bytes;  // offsets and sizes
} region_layout;

typedef struct {
    uint32_t status, wait, peer;
    uint64_t waited, seen;
} failure;

// One rank's end of the region.
typedef struct {
    unsigned char *base;  // NULL once closed
    region_layout layout;
    uint64_t rank, round, spin_turns, yield_ns, one_shot_bytes;
    failure failure;  // the first one; every later operation repeats it
    uint32_t in_flight;  // operations inside, counted under the interpreter lock
    // One user at a time: the collectives as a whole, each end of each channel, the writing of the board.
    atomic_flag collective_busy, send_busy[MAX_RANKS], recv_busy[MAX_RANKS], publish_busy;
} communicator;

typedef struct {
    communicator *comm;
    uint64_t timeout_ns, deadline_ns;  // the deadline is fixed when the operation first has to wait
    uint32_t operation, purpose;
    failure failure;
} operation;

static inline uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static inline uint64_t at_most(uint64_t value, uint64_t bound) { return value < bound ? value : bound; }

// Where things stand in the region: collectives_wait.c computes the offsets once, from the shape; false if that is refused.
bool fill_layout(region_layout *at);

static inline region_header *header_of(const communicator *comm) { return (region_header *)comm->base; }

static inline rank_lines *lines_of(const communicator *comm, uint64_t rank) {
    return (rank_lines *)(comm->base + comm->layout.ranks) + rank;
}

static inline channel_lines *channel_of(const communicator *comm, uint64_t from, uint64_t to) {
    return (channel_lines *)(comm->base + comm->layout.channels) + from * comm->layout.num_ranks + to;
}

static inline channel_slot *slot_of(const communicator *comm, uint64_t from, uint64_t to, uint64_t ordinal) {
    const region_layout *at = &comm->layout;
    uint64_t slot = (from * at->num_ranks + to) * at->num_slots + ordinal % at->num_slots;
    return (channel_slot *)(comm->base + at->slots + slot * at->slot_stride);
}

static inline board_entry *entry_of(const communicator *comm, uint64_t sequence) {
    const region_layout *at = &comm->layout;
    return (board_entry *)(comm->base + at->board + sequence % at->num_board_steps * at->board_entry_bytes);
}

static inline unsigned char *stage_of(const communicator *comm, uint64_t rank, uint64_t round) {
    return comm->base + comm->layout.stages + (rank * NUM_BANKS + round % NUM_BANKS) * comm->layout.stage_bytes;
}

// Stores a word and wakes those of the ranks [first, end) that sleep.
void store_and_wake(communicator *comm, _Atomic uint64_t *word, uint64_t value, uint64_t first, uint64_t end);
// Waits until a word is at its target or at most `max_ahead` past it; further than that, nothing may be trusted.
bool await(operation *op, enum wait wait, const _Atomic uint64_t *word, uint64_t target, uint64_t max_ahead, uint64_t peer);
// Records a failure in the operation and in the rank's mirror line; false.
bool fail(operation *op, enum status status, enum wait wait, uint64_t peer, uint64_t waited, uint64_t seen);
bool agree(operation *op, enum wait what, uint64_t peer, uint64_t expected, uint64_t got);
bool is_aborted(operation *op, enum wait wait, uint64_t peer, uint64_t waited);
void abort_region(unsigned char *base, uint64_t num_ranks, uint64_t reason);

// The operations; false with op->failure filled. Sizes are checked by the caller.
bool all_reduce(operation *op, float *x, uint64_t count);
bool all_gather(operation *op, const unsigned char *source, uint64_t rows, const uint64_t *row_bytes, unsigned char *out);
bool all_to_all(operation *op, const unsigned char *source, const uint64_t *bytes, unsigned char *out);
bool broadcast(operation *op, unsigned char *bytes, uint64_t count, uint64_t root);
bool barrier(operation *op);
bool send_message(operation *op, const unsigned char *bytes, uint64_t count, uint64_t to, uint64_t tag);
bool recv_message(operation *op, unsigned char *bytes, uint64_t count, uint64_t peer, uint64_t tag);
bool publish_tokens(operation *op, uint64_t sequence, const int32_t *ids, uint64_t num_ids);
bool read_tokens(operation *op, uint64_t sequence, int32_t *out, uint64_t capacity, uint64_t *num_ids);
