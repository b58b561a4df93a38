// Plain parts of sampling: the counter-based random numbers, and the selection of a prefix among candidates without
// sorting them, by digits of the key: at most eight passes, whatever the logits.
#include "sampling.h"
#include <float.h>
#include <string.h>

enum { DIGIT_BITS = 8, NUM_DIGITS = 1 << DIGIT_BITS, KEY_BITS = 64 };
enum { CHUNK = 4096, SPARE = 64 }; // ids between two selections of the largest, and candidates too few to select among

void philox(uint32_t counter[4], const uint32_t key[2]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        uint64_t a = 0xd2511f53ull * counter[0], b = 0xcd9e8d57ull * counter[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ counter[1] ^ k0, (uint32_t)b,
                            (uint32_t)(a >> 32) ^ counter[3] ^ k1, (uint32_t)a};
        memcpy(counter, next, sizeof(next));
    }
}

double uniform_at(uint64_t seed, int64_t position) {
    uint32_t words[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    philox(words, key);
    return (double)(((uint64_t)words[0] << 32 | words[1]) >> 11) * 0x1p-53;
}

uint64_t prefix_end(const Candidate *all, int64_t num, Candidate *part, int64_t max_count, double max_mass) {
    int64_t count = 0;
    double mass = 0;
    memcpy(part, all, (size_t)num * sizeof(Candidate));
    for (int shift = KEY_BITS - DIGIT_BITS; num > 1 && shift >= 0; shift -= DIGIT_BITS) {
        int64_t counts[NUM_DIGITS] = {0}, kept = 0;
        double masses[NUM_DIGITS] = {0};
        for (int64_t i = 0; i < num; i++) {
            int64_t digit = part[i].key >> shift & (NUM_DIGITS - 1);
            counts[digit]++;
            masses[digit] += (double)part[i].weight;
        }
        int64_t digit = NUM_DIGITS - 1, lowest = 0;
        for (; digit >= 0; digit--) {
            if (counts[digit] == 0) continue;
            if (count + counts[digit] >= max_count || mass + masses[digit] >= max_mass) break;
            count += counts[digit];
            mass += masses[digit];
            lowest = digit;
        }
        // Rounding can leave the parts of a digit short of its sum: then its last part ends the prefix.
        const bool reached = digit >= 0;
        if (!reached) digit = lowest, max_count = INT64_MAX, max_mass = DBL_MAX;
        for (int64_t i = 0; i < num; i++) {
            part[kept] = part[i];
            kept += (int64_t)(part[i].key >> shift & (NUM_DIGITS - 1)) == digit;
        }
        num = kept;
    }
    return part[0].key;
}

int64_t keep_prefix(Candidate *candidates, int64_t num, uint64_t end) {
    int64_t kept = 0;
    for (int64_t i = 0; i < num; i++) {
        candidates[kept] = candidates[i];
        kept += candidates[i].key >= end;
    }
    return kept;
}

int64_t largest(const RowPasses *passes, const float *logits, int64_t num_ids, int64_t max_count, Candidate *to,
                Candidate *part) {
    float floor = -FLT_MAX;
    int64_t num = 0;
    for (int64_t begin = 0; begin < num_ids; begin += CHUNK) {
        const int64_t end = begin + CHUNK < num_ids ? begin + CHUNK : num_ids;
        num = passes->collect(logits, begin, end, floor, to, num);
        if (num <= max_count || (num < 2 * max_count + SPARE && end < num_ids)) continue;
        for (int64_t i = 0; i < num; i++) to[i].weight = 0.0f;
        const uint64_t last = prefix_end(to, num, part, max_count, DBL_MAX);
        num = keep_prefix(to, num, last);
        floor = logit_of(last);
    }
    return num;
}
