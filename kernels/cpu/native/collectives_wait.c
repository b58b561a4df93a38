// How a rank waits for a word of the region and wakes those that wait for its own; and where the words stand.
//
// Waits spin, then yield, then sleep on the rank's own bell. A sleeper counts itself in, reads the bell, looks once more and
// sleeps on the value it read; a writer stores its word, then rings the bells of ranks that have sleepers. So no wake is
// lost, and an abort rings every bell. No wait is without a deadline, and none touches Python.
#include "collectives.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

bool fill_layout(region_layout *at) {
    const uint64_t limit = (uint64_t)1 << 32;  // each size; keeps the products below far from overflow
    if (at->num_ranks < 1 || at->num_ranks > MAX_RANKS || at->stage_bytes < LINE_BYTES || at->stage_bytes > limit ||
        at->stage_bytes % LINE_BYTES || at->num_slots < 2 || at->num_slots > (1 << 16) || at->slot_bytes < LINE_BYTES ||
        at->slot_bytes > limit || at->slot_bytes % LINE_BYTES || at->num_board_steps < 2 || at->num_board_steps > (1 << 16) ||
        at->max_rows < 1 || at->max_rows > (1 << 20))
        return false;
    uint64_t pairs = at->num_ranks * at->num_ranks;  // the diagonal is never touched, so it costs no memory
    at->ranks = sizeof(region_header);
    at->channels = at->ranks + at->num_ranks * sizeof(rank_lines);
    at->board = at->channels + pairs * sizeof(channel_lines);
    at->board_entry_bytes = round_up(sizeof(board_entry) + at->max_rows * sizeof(int32_t), LINE_BYTES);
    at->stages = round_up(at->board + at->num_board_steps * at->board_entry_bytes, PAGE_BYTES);
    at->slots = round_up(at->stages + at->num_ranks * NUM_BANKS * at->stage_bytes, PAGE_BYTES);
    at->slot_stride = sizeof(channel_slot) + at->slot_bytes;
    at->total_bytes = round_up(at->slots + pairs * at->num_slots * at->slot_stride, PAGE_BYTES);
    return true;
}

static void ring(rank_lines *lines) {
    atomic_fetch_add(&lines->bell, 1);
    syscall(SYS_futex, &lines->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

// The fence orders the store before the look at the sleepers.
void store_and_wake(communicator *comm, _Atomic uint64_t *word, uint64_t value, uint64_t first, uint64_t end) {
    atomic_store_explicit(word, value, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (uint64_t rank = first; rank < end; rank++) {
        rank_lines *lines = lines_of(comm, rank);
        if (rank != comm->rank && atomic_load_explicit(&lines->sleepers, memory_order_relaxed)) ring(lines);
    }
}

static bool reached(const _Atomic uint64_t *word, uint64_t target) {
    return (int64_t)(atomic_load(word) - target) >= 0;
}

static void sleep_until_rung(operation *op, const _Atomic uint64_t *word, uint64_t target) {
    rank_lines *own = lines_of(op->comm, op->comm->rank);
    struct timespec until = {op->deadline_ns / 1000000000u, op->deadline_ns % 1000000000u};
    atomic_fetch_add(&own->sleepers, 1);
    uint32_t rung = atomic_load(&own->bell);
    if (!reached(word, target) && !atomic_load(&header_of(op->comm)->abort_reason))
        syscall(SYS_futex, &own->bell, FUTEX_WAIT_BITSET, rung, &until, NULL, FUTEX_BITSET_MATCH_ANY);
    atomic_fetch_sub(&own->sleepers, 1);
}

bool fail(operation *op, enum status status, enum wait wait, uint64_t peer, uint64_t waited, uint64_t seen) {
    mirror_line *mirror = &lines_of(op->comm, op->comm->rank)->mirror;
    op->failure = (failure){status, wait, (uint32_t)peer, waited, seen};
    mirror->wait = wait, mirror->peer = (uint32_t)peer, mirror->waited = waited, mirror->seen = seen;
    mirror->status = status;
    return false;
}

bool is_aborted(operation *op, enum wait wait, uint64_t peer, uint64_t waited) {
    uint64_t reason = atomic_load_explicit(&header_of(op->comm)->abort_reason, memory_order_acquire);
    if (reason) fail(op, ABORTED, wait, peer, waited, reason);
    return reason != 0;
}

// The part of a wait that follows a first look in vain: spin, yield, sleep, until the word is there or the wait has failed.
static bool wait_slowly(operation *op, enum wait wait, const _Atomic uint64_t *word, uint64_t target, uint64_t peer) {
    mirror_line *mirror = &lines_of(op->comm, op->comm->rank)->mirror;
    uint64_t started = now_ns(), now = started;
    if (op->deadline_ns == 0) op->deadline_ns = started + op->timeout_ns;
    mirror->wait = wait;
    mirror->peer = (uint32_t)peer;
    mirror->waited = target;
    bool arrived = false;
    for (uint64_t turn = 0; !(arrived = reached(word, target)) && !is_aborted(op, wait, peer, target); turn++) {
        if (turn < op->comm->spin_turns) {
            relax();
            continue;
        }
        now = now_ns();
        if (now >= op->deadline_ns) {
            bool acknowledgement = wait == WAIT_ACKNOWLEDGEMENT || wait == WAIT_CREDIT;
            fail(op, acknowledgement ? ACK_TIMEOUT : DATA_TIMEOUT, wait, peer, target, atomic_load(word));
            break;
        }
        if (now - started < op->comm->yield_ns)
            sched_yield();
        else
            sleep_until_rung(op, word, target);
    }
    mirror->wait_ns += now_ns() - started;
    if (arrived) mirror->wait = WAIT_NONE;
    return arrived;
}

bool await(operation *op, enum wait wait, const _Atomic uint64_t *word, uint64_t target, uint64_t max_ahead,
                  uint64_t peer) {
    uint64_t seen = atomic_load_explicit(word, memory_order_acquire);
    if ((int64_t)(seen - target) < 0) {
        if (!wait_slowly(op, wait, word, target, peer)) return false;
        seen = atomic_load_explicit(word, memory_order_acquire);
    }
    if (seen - target <= max_ahead) return true;
    return fail(op, wait == WAIT_BOARD ? OVERWRITTEN : AHEAD, wait, peer, target, seen);
}

bool agree(operation *op, enum wait what, uint64_t peer, uint64_t expected, uint64_t got) {
    return expected == got || fail(op, MISMATCH, what, peer, expected, got);
}

void abort_region(unsigned char *base, uint64_t num_ranks, uint64_t reason) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&((region_header *)base)->abort_reason, &none, reason);
    for (uint64_t rank = 0; rank < num_ranks; rank++) ring((rank_lines *)(base + sizeof(region_header)) + rank);
}
