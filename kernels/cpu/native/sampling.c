// Entry points of sampling: draws and log-probabilities. Passes over rows are in sampling_body.h, the selection among
// candidates in sampling_select.c, penalties in penalties.c.
#include "sampling.h"
#include "arguments.h"
#include "penalties.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const float MIN_TEMPERATURE = 1e-5f; // below it a draw is the largest logit
enum { MAX_TOP = 256 };                     // largest num_top of top_logprobs; the API allows 20

typedef struct {
    const float *logits;
    int64_t row_stride, num_rows, num_ids;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const uint64_t *seed;
    const int64_t *position;
    int32_t *out_ids;
    bool *out_finite;
} Draws;

// Two lists of candidates, or the weights of a row and the sums of its blocks.
typedef struct {
    Candidate *list, *part;
} Room;

static int32_t first_equal(const float *logits, int64_t num_ids, float top) {
    int64_t id = 0;
    while (id < num_ids && logits[id] != top) id++;
    return (int32_t)id;
}

// Without filters: skips whole blocks, then walks one.
static int32_t draw_from_all(const RowPasses *passes, const Draws *d, int64_t row, float top, Room room,
                             double uniform) {
    const float *logits = d->logits + row * d->row_stride;
    float *weights = (float *)room.list;
    double *sums = (double *)room.part, passed = 0;
    const double goal = uniform * passes->weigh(logits, d->num_ids, top, d->temperature[row], weights, sums);
    int64_t block = 0, last = (d->num_ids - 1) / SUM_BLOCK, found = 0;
    while (block < last && passed + sums[block] <= goal) passed += sums[block++];
    int64_t end = (block + 1) * SUM_BLOCK < d->num_ids ? (block + 1) * SUM_BLOCK : d->num_ids;
    for (int64_t id = block * SUM_BLOCK; id < end; id++) {
        passed += (double)weights[id];
        if (weights[id] > 0.0f) found = id; // where rounding leaves the goal past the end, the last that can be drawn
        if (passed > goal) break;
    }
    return weights[found] > 0.0f ? (int32_t)found : first_equal(logits, d->num_ids, top);
}

static int32_t draw_from_list(const Candidate *list, int64_t num, double uniform) {
    double total = 0, passed = 0;
    for (int64_t i = 0; i < num; i++) total += (double)list[i].weight;
    int64_t found = 0;
    for (int64_t i = 0; i < num; i++) {
        passed += (double)list[i].weight;
        if (list[i].weight > 0.0f) found = i;
        if (passed > uniform * total) break;
    }
    return id_of(list[found].key);
}

// Without top_k: every id whose weight is at least `least`, and perhaps a few below.
static int64_t collect_above(const RowPasses *passes, const Draws *d, int64_t row, float top, double least, Room room) {
    double below = least > 0 ? (double)d->temperature[row] * log(least) : -(double)INFINITY;
    float floor = (float)((double)top + below - 1e-5 * (fabs((double)top) - below) - 1e-6);
    if (!(floor > -FLT_MAX)) floor = -FLT_MAX;
    return passes->collect(d->logits + row * d->row_stride, 0, d->num_ids, floor, room.list, 0);
}

// The candidates that top_k, top_p and min_p leave, weighed, in order of id.
static int64_t filter(const RowPasses *passes, const Draws *d, int64_t row, float top, Room room) {
    const float *logits = d->logits + row * d->row_stride, temperature = d->temperature[row];
    const double top_p = (double)d->top_p[row];
    const float min_p = d->min_p[row];
    double total = 0;
    int64_t num;
    if (d->top_k[row] > 0 && d->top_k[row] < d->num_ids) {
        num = largest(passes, logits, d->num_ids, d->top_k[row], room.list, room.part);
        passes->weigh_candidates(room.list, num, top, temperature);
        for (int64_t i = 0; i < num; i++) total += (double)room.list[i].weight;
    } else {
        // What weighs less than (1 - top_p) of the total shared by all ids is outside the nucleus, even all together.
        if (top_p < 1) total = passes->weigh(logits, d->num_ids, top, temperature, NULL, NULL);
        double least = top_p < 1 ? (1 - top_p) * total / (double)d->num_ids : 0;
        num = collect_above(passes, d, row, top, least > (double)min_p ? least : (double)min_p, room);
        passes->weigh_candidates(room.list, num, top, temperature);
    }
    if (top_p < 1) num = keep_prefix(room.list, num, prefix_end(room.list, num, room.part, INT64_MAX, top_p * total));
    int64_t kept = 0;
    for (int64_t i = 0; i < num; i++) {
        room.list[kept] = room.list[i];
        kept += room.list[i].weight >= min_p;
    }
    return kept;
}

static void draw_row(const RowPasses *passes, const Draws *d, int64_t row, Room room) {
    const float *logits = d->logits + row * d->row_stride;
    float top;
    d->out_finite[row] = passes->scan(logits, d->num_ids, &top);
    d->out_ids[row] = 0;
    if (!d->out_finite[row]) return;
    if (d->temperature[row] < MIN_TEMPERATURE) {
        d->out_ids[row] = first_equal(logits, d->num_ids, top);
        return;
    }
    const double uniform = uniform_at(d->seed[row], d->position[row]);
    const bool all_ids = d->top_k[row] == 0 || d->top_k[row] >= d->num_ids;
    if (all_ids && d->top_p[row] == 1.0f && d->min_p[row] == 0.0f)
        d->out_ids[row] = draw_from_all(passes, d, row, top, room, uniform);
    else
        d->out_ids[row] = draw_from_list(room.list, filter(passes, d, row, top, room), uniform);
}

static void check_draws(const Draws *d, Refusal *refusal) {
    for (int64_t i = 0; i < d->num_rows; i++)
        if (!(d->temperature[i] >= 0 && d->temperature[i] < INFINITY && d->top_k[i] >= 0 && d->top_p[i] > 0 &&
              d->top_p[i] <= 1 && d->min_p[i] >= 0 && d->min_p[i] <= 1))
            REFUSE(refusal,
                   "row %ld: temperature %g, top_k %d, top_p %g, min_p %g; >= 0, >= 0, (0, 1] and [0, 1] expected", i,
                   (double)d->temperature[i], d->top_k[i], (double)d->top_p[i], (double)d->min_p[i]);
}

static bool any_random(const Draws *d) {
    for (int64_t i = 0; i < d->num_rows; i++)
        if (d->temperature[i] >= MIN_TEMPERATURE) return true;
    return false;
}

// Room for one row, shared by all rows of a call: 32 bytes an id, and one candidate more for the sums of short rows.
static Room take_room(int64_t num_ids) {
    Candidate *all = malloc((size_t)(2 * num_ids + 2) * sizeof(Candidate));
    return (Room){all, all == NULL ? NULL : all + num_ids + 1};
}

static PyObject *sample(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("sample", items, count, 12);
    Draws draws = {
        .logits = address_at(&a, 0), .row_stride = int_at(&a, 1), .num_rows = int_at(&a, 2), .num_ids = int_at(&a, 3),
        .temperature = address_at(&a, 4), .top_k = address_at(&a, 5), .top_p = address_at(&a, 6),
        .min_p = address_at(&a, 7), .seed = address_at(&a, 8), .position = address_at(&a, 9),
        .out_ids = address_at(&a, 10), .out_finite = address_at(&a, 11),
    };
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    Room room = {NULL, NULL};
    bool exhausted = false;
    const RowPasses *passes = use_avx2() ? &row_passes_avx2 : &row_passes_portable;
    Py_BEGIN_ALLOW_THREADS;
    check_draws(&draws, &refusal);
    if (refusal.text[0] == 0 && any_random(&draws)) {
        room = take_room(draws.num_ids);
        exhausted = room.list == NULL;
    }
    for (int64_t row = 0; row < draws.num_rows && refusal.text[0] == 0 && !exhausted; row++)
        draw_row(passes, &draws, row, room);
    free(room.list);
    Py_END_ALLOW_THREADS;
    return exhausted ? PyErr_NoMemory() : none_or_raise(&refusal);
}

static PyObject *log_softmax_at(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("log_softmax_at", items, count, 7);
    const float *logits = address_at(&a, 0);
    const int64_t row_stride = int_at(&a, 1), num_rows = int_at(&a, 2), num_ids = int_at(&a, 3);
    const int32_t *ids = address_at(&a, 4);
    const int64_t ids_per_row = int_at(&a, 5);
    float *out = address_at(&a, 6);
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    const RowPasses *passes = use_avx2() ? &row_passes_avx2 : &row_passes_portable;
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t i = 0; i < num_rows * ids_per_row; i++)
        if (ids[i] < 0 || ids[i] >= num_ids)
            REFUSE(&refusal, "row %ld: id %d outside the vocabulary's %ld", i / ids_per_row, ids[i], num_ids);
    for (int64_t row = 0; row < num_rows && refusal.text[0] == 0; row++, logits += row_stride) {
        float top;
        bool finite = passes->scan(logits, num_ids, &top);
        double norm = finite ? (double)top + log(passes->weigh(logits, num_ids, top, 1.0f, NULL, NULL)) : (double)NAN;
        for (int64_t i = 0; i < ids_per_row; i++)
            out[row * ids_per_row + i] = (float)((double)logits[ids[row * ids_per_row + i]] - norm);
    }
    Py_END_ALLOW_THREADS;
    return none_or_raise(&refusal);
}

static int descending(const void *a, const void *b) {
    uint64_t x = ((const Candidate *)a)->key, y = ((const Candidate *)b)->key;
    return (x < y) - (x > y);
}

static void top_of_row(const RowPasses *passes, const float *logits, int64_t num_ids, int64_t num_top, Room room,
                       int32_t *ids, float *logprobs) {
    float top;
    bool finite = passes->scan(logits, num_ids, &top);
    int64_t num = finite ? largest(passes, logits, num_ids, num_top, room.list, room.part) : 0;
    double norm = finite ? (double)top + log(passes->weigh(logits, num_ids, top, 1.0f, NULL, NULL)) : (double)NAN;
    qsort(room.list, (size_t)num, sizeof(Candidate), descending);
    for (int64_t i = 0; i < num_top; i++) {
        ids[i] = i < num ? id_of(room.list[i].key) : 0;
        logprobs[i] = i < num ? (float)((double)logit_of(room.list[i].key) - norm) : finite ? -INFINITY : NAN;
    }
}

static PyObject *top_logprobs(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("top_logprobs", items, count, 7);
    const float *logits = address_at(&a, 0);
    const int64_t row_stride = int_at(&a, 1), num_rows = int_at(&a, 2);
    const int64_t num_ids = int_at(&a, 3), num_top = int_at(&a, 4);
    int32_t *ids = address_at(&a, 5);
    float *logprobs = address_at(&a, 6);
    if (a.failed) return NULL;
    if (num_top < 0 || num_top > MAX_TOP || num_top > num_ids)
        return PyErr_Format(PyExc_ValueError, "num_top %lld outside 0 to %lld", (long long)num_top,
                            (long long)(num_ids < MAX_TOP ? num_ids : MAX_TOP));
    const RowPasses *passes = use_avx2() ? &row_passes_avx2 : &row_passes_portable;
    Room room = {NULL, NULL};
    Py_BEGIN_ALLOW_THREADS;
    room = take_room(num_ids);
    for (int64_t row = 0; row < num_rows && room.list != NULL; row++)
        top_of_row(passes, logits + row * row_stride, num_ids, num_top, room, ids + row * num_top,
                   logprobs + row * num_top);
    free(room.list);
    Py_END_ALLOW_THREADS;
    if (room.list == NULL) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

// For known-answer tests: the four words of one block.
static PyObject *philox_block(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("philox_block", items, count, 6);
    uint32_t counter[4], key[2];
    for (int i = 0; i < 4; i++) counter[i] = (uint32_t)int_at(&a, i);
    for (int i = 0; i < 2; i++) key[i] = (uint32_t)int_at(&a, 4 + i);
    if (a.failed) return NULL;
    philox(counter, key);
    return Py_BuildValue("(IIII)", counter[0], counter[1], counter[2], counter[3]);
}

static PyMethodDef methods[] = {
    {"sample", (PyCFunction)(void (*)(void))sample, METH_FASTCALL, "See kernels/cpu/sampling.py."},
    {"log_softmax_at", (PyCFunction)(void (*)(void))log_softmax_at, METH_FASTCALL, "See kernels/cpu/sampling.py."},
    {"top_logprobs", (PyCFunction)(void (*)(void))top_logprobs, METH_FASTCALL, "See kernels/cpu/sampling.py."},
    {"philox_block", (PyCFunction)(void (*)(void))philox_block, METH_FASTCALL,
     "philox_block(c0, c1, c2, c3, k0, k1) -> the four words of Philox 4x32-10."},
    {NULL, NULL, 0, NULL},
};

int add_sampling(PyObject *module) {
    return PyModule_AddFunctions(module, methods) || PyModule_AddFunctions(module, penalty_methods) ? -1 : 0;
}
