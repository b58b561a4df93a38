// Passes over a whole row of logits. No multiplication is fused with an addition here, so that every instruction set
// computes the same bits and draws the same ids.
#pragma once
#include "lanes.h"
#include "sampling.h"

typedef int64_t wide_lanes __attribute__((vector_size(32)));
enum { STRIDE = 4 * LANES };

INLINE bool any_lane(int_lanes mask) {
    wide_lanes wide = (wide_lanes)mask;
    return (wide[0] | wide[1] | wide[2] | wide[3]) != 0;
}

static bool PATH(scan)(const float *logits, int64_t num_ids, float *top) {
    lanes most[2] = {fill(-INFINITY), fill(-INFINITY)};
    int_lanes below = ~(int_lanes){0}; // stays set where every logit is below +inf; NaN is not
    int64_t i = 0;
    for (; i + 2 * LANES <= num_ids; i += 2 * LANES)
        for (int j = 0; j < 2; j++) {
            lanes part = load(logits + i + j * LANES);
            below &= part < INFINITY;
            most[j] = max_lanes(part, most[j]);
        }
    for (; i < num_ids; i += LANES) {
        lanes part = i + LANES <= num_ids ? load(logits + i) : load_part(logits + i, num_ids - i, -INFINITY);
        below &= part < INFINITY;
        most[0] = max_lanes(part, most[0]);
    }
    *top = largest_lane(max_lanes(most[0], most[1]));
    return !any_lane(~below) && *top > -INFINITY;
}

static double PATH(weigh)(const float *logits, int64_t num_ids, float top, float temperature, float *weights,
                          double *sums) {
    double total = 0;
    for (int64_t begin = 0; begin < num_ids; begin += SUM_BLOCK) {
        const int64_t end = begin + SUM_BLOCK < num_ids ? begin + SUM_BLOCK : num_ids;
        lanes sum = fill(0.0f);
        for (int64_t i = begin; i < end; i += LANES) {
            const int64_t left = end - i;
            lanes part = left >= LANES ? load(logits + i) : load_part(logits + i, left, -INFINITY);
            lanes weight = exp_lanes((part - top) / temperature);
            sum += weight;
            if (weights == NULL) continue;
            if (left >= LANES)
                store(weights + i, weight);
            else
                store_part(weights + i, weight, left);
        }
        const float block = sum_lanes(sum);
        total += (double)block;
        if (sums) sums[begin / SUM_BLOCK] = (double)block;
    }
    return total;
}

static int64_t PATH(collect)(const float *logits, int64_t begin, int64_t end, float floor, Candidate *to, int64_t num) {
    for (int64_t i = begin; i < end; i += STRIDE) {
        const int64_t stop = i + STRIDE < end ? i + STRIDE : end;
        if (stop - i == STRIDE) {
            int_lanes found = {0};
            for (int j = 0; j < STRIDE; j += LANES) found |= load(logits + i + j) >= floor;
            if (!any_lane(found)) continue;
        }
        for (int64_t id = i; id < stop; id++) {
            to[num].key = key_of(logits[id], id);
            num += logits[id] >= floor;
        }
    }
    return num;
}

static void PATH(weigh_candidates)(Candidate *candidates, int64_t num, float top, float temperature) {
    for (int64_t i = 0; i < num; i += LANES) {
        const int64_t count = i + LANES < num ? LANES : num - i;
        lanes part = fill(-INFINITY);
        for (int64_t j = 0; j < count; j++) part[j] = logit_of(candidates[i + j].key);
        lanes weight = exp_lanes((part - top) / temperature);
        for (int64_t j = 0; j < count; j++) candidates[i + j].weight = weight[j];
    }
}

const RowPasses PATH(row_passes) = {PATH(scan), PATH(weigh), PATH(collect), PATH(weigh_candidates)};
