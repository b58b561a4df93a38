// Collectives between the processes of one host over one mapped region (collectives.h): the data plane of CPU ranks.
//
// Rounds are counted by every rank alike and grow for ever. In a round a rank may publish bytes in its stage, of which it
// has two banks used in turn, each with a data flag of its own:
//   1. wait until every peer has acknowledged the round that used this bank before;
//   2. write the stage, then the flag (release);
//   3. wait for the flags of the peers it reads (acquire), read them;
//   4. acknowledge the round.
// Step 1 is what makes step 3 exact: a flag can only be behind its round or at it. One that is ahead is a fault with its
// own status, never read. All topologies share the rounds, the stages and this one path. Where every rank reads every
// other, step 1 never waits: a peer's flag of the round before already implies its acknowledgement of the one before that.
#include "collectives.h"

#include <string.h>

enum { SUM_BLOCK = 256, SHARE_FLOATS = LINE_BYTES / sizeof(float) };

// Returns this rank's stage for the next round once no peer can still be reading it, or NULL. A peer that need not read this
// rank can be at most one round ahead of it, hence the bound on its acknowledgement.
static unsigned char *begin_round(operation *op) {
    communicator *comm = op->comm;
    uint64_t round = ++comm->round;
    for (uint64_t peer = 0; peer < comm->layout.num_ranks; peer++) {
        const _Atomic uint64_t *word = &lines_of(comm, peer)->acknowledged;
        if (peer != comm->rank && !await(op, WAIT_ACKNOWLEDGEMENT, word, round - NUM_BANKS, NUM_BANKS + 1, peer)) return NULL;
    }
    return stage_of(comm, comm->rank, round);
}

static void publish_round(operation *op, uint64_t bytes) {
    communicator *comm = op->comm;
    data_flag *flag = &lines_of(comm, comm->rank)->data[comm->round % NUM_BANKS];
    flag->bytes = bytes;
    flag->operation = op->operation;
    flag->purpose = op->purpose;
    store_and_wake(comm, &flag->round, comm->round, 0, comm->layout.num_ranks);
}

// Returns a peer's stage of this round once it is written and is what this rank expects, or NULL.
static const unsigned char *await_round(operation *op, uint64_t peer, uint64_t bytes) {
    communicator *comm = op->comm;
    const data_flag *flag = &lines_of(comm, peer)->data[comm->round % NUM_BANKS];
    bool good = await(op, WAIT_DATA, &flag->round, comm->round, 0, peer) &&
                agree(op, AGREE_OPERATION, peer, op->operation, flag->operation) &&
                agree(op, AGREE_PURPOSE, peer, op->purpose, flag->purpose) && agree(op, AGREE_BYTES, peer, bytes, flag->bytes);
    return good ? stage_of(comm, peer, comm->round) : NULL;
}

static void end_round(operation *op) {
    communicator *comm = op->comm;
    store_and_wake(comm, &lines_of(comm, comm->rank)->acknowledged, comm->round, 0, comm->layout.num_ranks);
}

static void sum_in_rank_order(float *out, const float *const *parts, uint64_t num_parts, uint64_t count) {
    float sum[SUM_BLOCK];  // `out` may be one of the parts
    for (uint64_t at = 0; at < count; at += SUM_BLOCK) {
        uint64_t width = at_most(count - at, SUM_BLOCK);
        memcpy(sum, parts[0] + at, width * sizeof(float));
        for (uint64_t part = 1; part < num_parts; part++)
            for (uint64_t i = 0; i < width; i++) sum[i] += parts[part][at + i];
        memcpy(out + at, sum, width * sizeof(float));
    }
}

static bool reduce_one_shot(operation *op, float *x, uint64_t count) {
    communicator *comm = op->comm;
    const float *parts[MAX_RANKS];
    unsigned char *stage = begin_round(op);
    if (!stage) return false;
    memcpy(stage, x, count * sizeof(float));
    publish_round(op, count * sizeof(float));
    for (uint64_t rank = 0; rank < comm->layout.num_ranks; rank++) {
        parts[rank] = (const float *)(rank == comm->rank ? stage : await_round(op, rank, count * sizeof(float)));
        if (!parts[rank]) return false;
    }
    sum_in_rank_order(x, parts, comm->layout.num_ranks, count);
    end_round(op);
    return true;
}

// Each rank sums its share of the floats, in whole cache lines, then takes the other shares from their owners.
static bool reduce_two_shot(operation *op, float *x, uint64_t count) {
    communicator *comm = op->comm;
    uint64_t num_ranks = comm->layout.num_ranks, first[MAX_RANKS + 1];
    for (uint64_t rank = 0; rank <= num_ranks; rank++)
        first[rank] = at_most(count, round_up((count * rank + num_ranks - 1) / num_ranks, SHARE_FLOATS));
    uint64_t own = first[comm->rank], own_end = first[comm->rank + 1];
    const float *parts[MAX_RANKS];
    float *stage = (float *)begin_round(op);
    if (!stage) return false;
    memcpy(stage, x, own * sizeof(float));
    memcpy(stage + own_end, x + own_end, (count - own_end) * sizeof(float));
    publish_round(op, count * sizeof(float));
    for (uint64_t rank = 0; rank < num_ranks; rank++) {
        const float *part = rank == comm->rank ? x : (const float *)await_round(op, rank, count * sizeof(float));
        if (!part) return false;
        parts[rank] = part + own;
    }
    sum_in_rank_order(x + own, parts, num_ranks, own_end - own);
    end_round(op);
    if (!(stage = (float *)begin_round(op))) return false;
    memcpy(stage, x + own, (own_end - own) * sizeof(float));
    publish_round(op, (own_end - own) * sizeof(float));
    for (uint64_t rank = 0; rank < num_ranks; rank++) {
        uint64_t bytes = (first[rank + 1] - first[rank]) * sizeof(float);
        const unsigned char *part = rank == comm->rank ? NULL : await_round(op, rank, bytes);
        if (rank != comm->rank && !part) return false;
        if (part) memcpy(x + first[rank], part, bytes);
    }
    end_round(op);
    return true;
}

bool all_reduce(operation *op, float *x, uint64_t count) {
    uint64_t piece = op->comm->layout.stage_bytes / sizeof(float);
    for (uint64_t at = 0; at < count; at += piece) {
        uint64_t floats = at_most(count - at, piece);
        bool one_shot = count * sizeof(float) <= op->comm->one_shot_bytes;
        if (!(one_shot ? reduce_one_shot : reduce_two_shot)(op, x + at, floats)) return false;
    }
    return true;
}

// Copies bytes [from, from + bytes) of one rank's rows into their columns of the wide rows of `out`.
static void scatter(unsigned char *out, uint64_t stride, uint64_t row_bytes, uint64_t from, const unsigned char *part,
                    uint64_t bytes) {
    while (bytes) {
        uint64_t column = from % row_bytes, width = at_most(row_bytes - column, bytes);
        memcpy(out + from / row_bytes * stride + column, part, width);
        from += width, part += width, bytes -= width;
    }
}

static uint64_t piece_of(uint64_t share, uint64_t from, uint64_t max_bytes) {
    return share > from ? at_most(share - from, max_bytes) : 0;
}

// Every rank gives `rows` rows of row_bytes[rank]; a rank with an `out` takes all of them side by side, one without only gives.
bool all_gather(operation *op, const unsigned char *source, uint64_t rows, const uint64_t *row_bytes, unsigned char *out) {
    communicator *comm = op->comm;
    uint64_t longest = 0, stride = 0, max_bytes = comm->layout.stage_bytes;
    for (uint64_t rank = 0; rank < comm->layout.num_ranks; rank++) {
        stride += row_bytes[rank];
        if (rows * row_bytes[rank] > longest) longest = rows * row_bytes[rank];
    }
    for (uint64_t from = 0; from < longest; from += max_bytes) {
        uint64_t own = piece_of(rows * row_bytes[comm->rank], from, max_bytes), column = 0;
        unsigned char *stage = begin_round(op);
        if (!stage) return false;
        if (own) memcpy(stage, source + from, own);
        publish_round(op, own);
        for (uint64_t rank = 0; out && rank < comm->layout.num_ranks; column += row_bytes[rank++]) {
            uint64_t bytes = piece_of(rows * row_bytes[rank], from, max_bytes);
            if (!bytes) continue;
            const unsigned char *part = rank == comm->rank ? source + from : await_round(op, rank, bytes);
            if (!part) return false;
            scatter(out + column, stride, row_bytes[rank], from, part, bytes);
        }
        end_round(op);
    }
    return true;
}

// Every rank gives bytes[rank] to each rank, one after the other in `source`; `out` takes the parts for this one, in rank order.
bool all_to_all(operation *op, const unsigned char *source, const uint64_t *bytes, unsigned char *out) {
    communicator *comm = op->comm;
    uint64_t total = 0, begin = 0, own = bytes[comm->rank], max_bytes = comm->layout.stage_bytes;
    for (uint64_t rank = 0; rank < comm->layout.num_ranks; total += bytes[rank++])
        if (rank == comm->rank) begin = total;
    for (uint64_t from = 0; from < total; from += max_bytes) {
        uint64_t width = at_most(total - from, max_bytes), low = from > begin ? from : begin;
        uint64_t high = at_most(from + width, begin + own);
        unsigned char *stage = begin_round(op);
        if (!stage) return false;
        memcpy(stage, source + from, width);
        publish_round(op, width);
        for (uint64_t rank = 0; low < high && rank < comm->layout.num_ranks; rank++) {
            const unsigned char *part = rank == comm->rank ? stage : await_round(op, rank, width);
            if (!part) return false;
            memcpy(out + rank * own + low - begin, part + low - from, high - low);
        }
        end_round(op);
    }
    return true;
}

bool broadcast(operation *op, unsigned char *bytes, uint64_t count, uint64_t root) {
    communicator *comm = op->comm;
    for (uint64_t from = 0; from < count; from += comm->layout.stage_bytes) {
        uint64_t width = at_most(count - from, comm->layout.stage_bytes);
        unsigned char *stage = begin_round(op);
        if (!stage) return false;
        if (root == comm->rank) memcpy(stage, bytes + from, width);
        publish_round(op, root == comm->rank ? width : 0);
        if (root != comm->rank) {
            const unsigned char *part = await_round(op, root, width);
            if (!part) return false;
            memcpy(bytes + from, part, width);
        }
        end_round(op);
    }
    return true;
}

bool barrier(operation *op) {
    if (!begin_round(op)) return false;
    publish_round(op, 0);
    for (uint64_t peer = 0; peer < op->comm->layout.num_ranks; peer++)
        if (peer != op->comm->rank && !await_round(op, peer, 0)) return false;
    end_round(op);
    return true;
}
