// Checksums, and rows between a pool and a staging buffer, 32 bytes at a time. Compiled once per instruction set.
//
// The checksum is the sum over words i of x + low half of x * high half of x, where x = word i ^ (i + 1) * KEY_STEP, all
// modulo 2^64: one multiplication of halves a word, which every instruction set has.
#pragma once
#include "lanes.h"
#include "reshard.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t unaligned_words __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
enum { WORDS = VECTOR_BYTES / WORD_BYTES, CHAINS = 2, LINE_BYTES = CHAINS * VECTOR_BYTES };
enum { AHEAD_BYTES = 2048 }; // measured: how far before its use a line of a contiguous read is asked for

static const uint64_t KEY_STEP = 0x9E3779B97F4A7C15u;

// Vectors go to the chains in turn, so that neither waits for its own last addition.
typedef struct {
    words key[CHAINS], total[CHAINS];
    uint64_t num_vectors;
} Sum;

INLINE Sum sum_from(uint64_t first_word) {
    Sum sum = {.num_vectors = 0};
    for (uint64_t chain = 0; chain < CHAINS; chain++)
        for (uint64_t lane = 0; lane < WORDS; lane++)
            sum.key[chain][lane] = (first_word + chain * WORDS + lane + 1) * KEY_STEP;
    return sum;
}

INLINE words halves_product(words x) {
#if defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#else
    return (x & 0xffffffffu) * (x >> 32);
#endif
}

INLINE void add_words(Sum *sum, const int chain, words vector) {
    words x = vector ^ sum->key[chain];
    sum->key[chain] += CHAINS * WORDS * KEY_STEP;
    sum->total[chain] += x + halves_product(x);
}

INLINE uint64_t sum_total(const Sum *sum) {
    uint64_t total = 0;
    for (int chain = 0; chain < CHAINS; chain++)
        for (int lane = 0; lane < WORDS; lane++) total += sum->total[chain][lane];
    return total;
}

// Past the caches: the lines written are not read first.
INLINE void stream_words(uint8_t *to, words vector) {
#if defined(__AVX__)
    _mm256_stream_si256((__m256i *)to, (__m256i)vector);
#elif defined(__x86_64__)
    _mm_stream_si128((__m128i *)to, (__m128i){(long long)vector[0], (long long)vector[1]});
    _mm_stream_si128((__m128i *)to + 1, (__m128i){(long long)vector[2], (long long)vector[3]});
#else
    *(unaligned_words *)to = vector;
#endif
}

// What is done to each vector; constant where it is inlined.
typedef struct {
    bool copied, summed, streamed;
} Work;

INLINE void take_vector(const Work work, const int chain, const uint8_t *from, uint8_t *to, Sum *sum) {
    words vector = *(const unaligned_words *)from;
    if (work.summed) add_words(sum, chain, vector);
    if (work.copied && work.streamed)
        stream_words(to, vector);
    else if (work.copied)
        *(unaligned_words *)to = vector;
}

// Whole vectors; asks meanwhile for as many bytes at `ahead`, which is read next.
INLINE void take_bytes(const Work work, const uint8_t *from, const uint8_t *ahead, uint8_t *to, int64_t num_bytes,
                       Sum *sum) {
    int64_t at = 0;
    if (sum->num_vectors % CHAINS && num_bytes) { // the piece before ended in the middle
        take_vector(work, 1, from, to, sum);
        at = VECTOR_BYTES;
    }
    for (; at + LINE_BYTES <= num_bytes; at += LINE_BYTES) {
        __builtin_prefetch(ahead + at);
        take_vector(work, 0, from + at, to + at, sum);
        take_vector(work, 1, from + at + VECTOR_BYTES, to + at + VECTOR_BYTES, sum);
    }
    if (at < num_bytes) take_vector(work, 0, from + at, to + at, sum);
    sum->num_vectors += (uint64_t)num_bytes / VECTOR_BYTES;
}

uint64_t PATH(sum_bytes)(const uint8_t *from, int64_t num_bytes, uint64_t first_word) {
    Sum sum = sum_from(first_word);
    const int64_t whole = num_bytes / VECTOR_BYTES * VECTOR_BYTES;
    take_bytes((Work){.summed = true}, from, from + AHEAD_BYTES, NULL, whole, &sum);
    uint64_t total = sum_total(&sum);
    for (int64_t at = whole; at < num_bytes; at += WORD_BYTES) {
        uint64_t word = 0;
        int64_t left = num_bytes - at;
        memcpy(&word, from + at, (size_t)(left < WORD_BYTES ? left : WORD_BYTES));
        word ^= (first_word + (uint64_t)(at / WORD_BYTES) + 1) * KEY_STEP;
        total += word + (word & 0xffffffffu) * (word >> 32);
    }
    return total;
}

// Contiguous bytes of the pool, and where the walk over planes, runs and pieces stands after them.
typedef struct {
    uint8_t *pool; // NULL: nothing is left
    int64_t num_bytes;
    int64_t plane, run, slot, head;
} Piece;

// Whole blocks with their heads are one piece; parts of blocks go head by head.
INLINE Piece next_piece(const Move *m, Piece at) {
    const int64_t head_bytes = POOL_BLOCK_SLOTS * m->row_bytes;
    at.pool = NULL;
    for (; at.plane < m->num_planes; at.plane++, at.run = 0)
        for (; at.run < m->num_runs; at.run++, at.slot = 0) {
            const int64_t begin = m->runs[2 * at.run] * m->run_slots + at.slot, block = begin / POOL_BLOCK_SLOTS;
            const int64_t left = m->runs[2 * at.run + 1] * m->run_slots - at.slot, first = begin % POOL_BLOCK_SLOTS;
            if (left == 0) continue;
            const int64_t head = block * m->num_pool_heads + m->head_begin + at.head;
            at.pool = m->planes[at.plane] + head * head_bytes + first * m->row_bytes;
            if (first == 0 && left >= POOL_BLOCK_SLOTS) {
                int64_t num_blocks = m->num_heads == m->num_pool_heads ? left / POOL_BLOCK_SLOTS : 1;
                at.num_bytes = num_blocks * m->num_heads * head_bytes;
                at.slot += num_blocks * POOL_BLOCK_SLOTS;
                return at;
            }
            int64_t room = POOL_BLOCK_SLOTS - first, num_slots = left < room ? left : room;
            at.num_bytes = num_slots * m->row_bytes;
            if (++at.head == m->num_heads) at.head = 0, at.slot += num_slots;
            return at;
        }
    return at;
}

INLINE uint64_t move_pieces(const Move *m, const bool pack, const bool summed, const bool streamed) {
    const Work work = {.copied = true, .summed = summed, .streamed = streamed};
    Sum sum = sum_from(m->first_word);
    uint8_t *staging = m->staging;
    Piece now = next_piece(m, (Piece){.plane = 0}), later = now;
    for (int64_t between = 0; pack && later.pool && between < AHEAD_BYTES; between += later.num_bytes)
        later = next_piece(m, later);
    for (; now.pool; now = next_piece(m, now)) {
        // A long piece is followed by itself.
        const uint8_t *ahead = later.pool && now.num_bytes <= 4 * AHEAD_BYTES ? later.pool : now.pool + AHEAD_BYTES;
        if (pack)
            take_bytes(work, now.pool, ahead, staging, now.num_bytes, &sum);
        else
            take_bytes(work, staging, staging + AHEAD_BYTES, now.pool, now.num_bytes, &sum);
        staging += now.num_bytes;
        if (pack && later.pool) later = next_piece(m, later);
    }
#if defined(__x86_64__)
    if (streamed) _mm_sfence();
#endif
    return sum_total(&sum);
}

uint64_t PATH(move_rows)(const Move *m) {
    if (m->pack && m->summed) return m->streamed ? move_pieces(m, true, true, true) : move_pieces(m, true, true, false);
    if (m->pack) return m->streamed ? move_pieces(m, true, false, true) : move_pieces(m, true, false, false);
    if (m->summed) return m->streamed ? move_pieces(m, false, true, true) : move_pieces(m, false, true, false);
    return m->streamed ? move_pieces(m, false, false, true) : move_pieces(m, false, false, false);
}
