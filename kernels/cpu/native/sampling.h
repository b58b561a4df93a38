// What the parts of sampling share: passes over a whole row (vector code, once per instruction set), candidates and the
// selection among them (plain code, once).
#pragma once
#include <stdbool.h>
#include <stdint.h>

// One id that may be drawn. The key orders candidates: by logit, then the lower id first; no two are equal.
typedef struct {
    uint64_t key;
    float weight; // e^((logit - top) / temperature)
} Candidate;

enum { SUM_BLOCK = 512 }; // ids whose weights are summed as one, so that a draw skips them as one

typedef struct {
    // The largest logit; false where one is NaN or +inf, or none is above -inf.
    bool (*scan)(const float *logits, int64_t num_ids, float *top);
    // The sum of all weights; stores weights and sums of blocks where given.
    double (*weigh)(const float *logits, int64_t num_ids, float top, float temperature, float *weights, double *sums);
    // Appends ids of [begin, end) with logit >= floor, in order, without weights; returns the new number of candidates.
    int64_t (*collect)(const float *logits, int64_t begin, int64_t end, float floor, Candidate *to, int64_t num);
    void (*weigh_candidates)(Candidate *candidates, int64_t num, float top, float temperature);
} RowPasses;
extern const RowPasses row_passes_avx2, row_passes_portable;

static inline uint64_t key_of(float logit, int64_t id) {
    union {
        float value;
        uint32_t bits;
    } u = {logit + 0.0f}; // -0 becomes 0: equal logits have equal bits
    uint32_t ordered = u.bits ^ (u.bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)ordered << 32 | (uint32_t)~id;
}
static inline int32_t id_of(uint64_t key) { return (int32_t) ~(uint32_t)key; }
static inline float logit_of(uint64_t key) {
    uint32_t ordered = (uint32_t)(key >> 32);
    union {
        uint32_t bits;
        float value;
    } u = {ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu)};
    return u.value;
}

// Philox 4x32, ten rounds, in place.
void philox(uint32_t counter[4], const uint32_t key[2]);
// The uniform number in [0, 1) of one (seed, output position): 53 bits of Philox.
double uniform_at(uint64_t seed, int64_t position);

// The shortest prefix, in key order, with at least max_count members or max_mass weight: returns its smallest key, which
// is the smallest of all where neither is reached. `part` is scratch for num candidates; num > 0.
uint64_t prefix_end(const Candidate *all, int64_t num, Candidate *part, int64_t max_count, double max_mass);
// Keeps candidates with key >= end, in order; returns how many.
int64_t keep_prefix(Candidate *candidates, int64_t num, uint64_t end);
// The max_count largest ids of a row, in order of id; returns how many. Room for num_ids candidates in both buffers.
int64_t largest(const RowPasses *passes, const float *logits, int64_t num_ids, int64_t max_count, Candidate *to,
                Candidate *part);
