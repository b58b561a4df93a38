// What goes from one rank to another outside the rounds: messages over a channel per ordered pair, and the token board that
// one rank writes and all may read, by step.
#include "collectives.h"

#include <string.h>

// A message is one or more slots; an empty one takes a slot too. The sender is ahead by at most num_slots.
bool send_message(operation *op, const unsigned char *bytes, uint64_t count, uint64_t to, uint64_t tag) {
    communicator *comm = op->comm;
    channel_lines *channel = channel_of(comm, comm->rank, to);
    uint64_t num_slots = comm->layout.num_slots, from = 0;
    do {
        uint64_t width = at_most(count - from, comm->layout.slot_bytes), ordinal = atomic_load(&channel->sent);
        if (!await(op, WAIT_CREDIT, &channel->consumed, ordinal + 1 - num_slots, num_slots - 1, to)) return false;
        channel_slot *slot = slot_of(comm, comm->rank, to, ordinal);
        slot->ordinal = ordinal, slot->tag = tag, slot->message_bytes = count;
        if (width) memcpy(slot->bytes, bytes + from, width);
        store_and_wake(comm, &channel->sent, ordinal + 1, to, to + 1);
        from += width;
    } while (from < count);
    return true;
}

bool recv_message(operation *op, unsigned char *bytes, uint64_t count, uint64_t peer, uint64_t tag) {
    communicator *comm = op->comm;
    channel_lines *channel = channel_of(comm, peer, comm->rank);
    uint64_t from = 0;
    do {
        uint64_t width = at_most(count - from, comm->layout.slot_bytes), ordinal = atomic_load(&channel->consumed);
        if (!await(op, WAIT_MESSAGE, &channel->sent, ordinal + 1, comm->layout.num_slots - 1, peer)) return false;
        const channel_slot *slot = slot_of(comm, peer, comm->rank, ordinal);
        if (!agree(op, AGREE_ORDINAL, peer, ordinal, slot->ordinal) || !agree(op, AGREE_TAG, peer, tag, slot->tag) ||
            !agree(op, AGREE_BYTES, peer, count, slot->message_bytes))
            return false;
        if (width) memcpy(bytes + from, slot->bytes, width);
        store_and_wake(comm, &channel->consumed, ordinal + 1, peer, peer + 1);
        from += width;
    } while (from < count);
    return true;
}

bool publish_tokens(operation *op, uint64_t sequence, const int32_t *ids, uint64_t num_ids) {
    board_entry *entry = entry_of(op->comm, sequence);
    uint64_t stamp = 2 * sequence + 2, seen = atomic_load(&entry->stamp);
    if ((int64_t)(seen - stamp) >= 0) return fail(op, AHEAD, WAIT_BOARD, op->comm->rank, stamp, seen);
    atomic_store_explicit(&entry->stamp, stamp - 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&entry->num_ids, (uint32_t)num_ids, memory_order_relaxed);
    for (uint64_t i = 0; i < num_ids; i++) atomic_store_explicit(&entry->ids[i], ids[i], memory_order_relaxed);
    store_and_wake(op->comm, &entry->stamp, stamp, 0, op->comm->layout.num_ranks);
    return true;
}

bool read_tokens(operation *op, uint64_t sequence, int32_t *out, uint64_t capacity, uint64_t *num_ids) {
    board_entry *entry = entry_of(op->comm, sequence);
    uint64_t stamp = 2 * sequence + 2;
    if (!await(op, WAIT_BOARD, &entry->stamp, stamp, 0, op->comm->rank)) return false;
    *num_ids = atomic_load_explicit(&entry->num_ids, memory_order_relaxed);
    for (uint64_t i = 0; i < at_most(*num_ids, capacity); i++)
        out[i] = atomic_load_explicit(&entry->ids[i], memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    uint64_t seen = atomic_load_explicit(&entry->stamp, memory_order_relaxed);
    if (seen != stamp) return fail(op, OVERWRITTEN, WAIT_BOARD, op->comm->rank, stamp, seen);
    return *num_ids <= capacity || agree(op, AGREE_BYTES, op->comm->rank, capacity, *num_ids);
}
