// Penalties on the ids a request has had, and sparse additions to logits: both touch few ids of a row.
#include "penalties.h"
#include "arguments.h"
#include <stdio.h>
#include <stdlib.h>

static bool refuse_id(const int32_t *ids, int64_t num, int64_t num_ids, Refusal *refusal) {
    for (int64_t i = 0; i < num; i++)
        if (ids[i] < 0 || ids[i] >= num_ids) {
            REFUSE(refusal, "id %d at place %ld outside the vocabulary's %ld", ids[i], i, num_ids);
            return true;
        }
    return false;
}

// The first time an id comes it takes the repetition and presence penalties, each time the frequency penalty.
static void penalize_row(float *logits, const int32_t *ids, int64_t num, uint64_t *seen, float presence,
                         float frequency, float repetition) {
    for (int64_t i = 0; i < num; i++) {
        const int32_t id = ids[i];
        const uint64_t bit = 1ull << (id % 64);
        if (!(seen[id / 64] & bit)) {
            seen[id / 64] |= bit;
            logits[id] = logits[id] > 0.0f ? logits[id] / repetition : logits[id] * repetition;
            logits[id] -= presence;
        }
        logits[id] -= frequency;
    }
}

static PyObject *penalize(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("penalize", items, count, 7);
    float *logits = address_at(&a, 0);
    const int64_t num_ids = int_at(&a, 1);
    const int32_t *ids = address_at(&a, 2);
    const int64_t num = int_at(&a, 3);
    const float presence = float_at(&a, 4), frequency = float_at(&a, 5), repetition = float_at(&a, 6);
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    bool exhausted = false;
    Py_BEGIN_ALLOW_THREADS;
    if (!refuse_id(ids, num, num_ids, &refusal)) {
        uint64_t *seen = calloc((size_t)(num_ids / 64 + 1), sizeof(uint64_t));
        exhausted = seen == NULL;
        if (!exhausted) penalize_row(logits, ids, num, seen, presence, frequency, repetition);
        free(seen);
    }
    Py_END_ALLOW_THREADS;
    return exhausted ? PyErr_NoMemory() : none_or_raise(&refusal);
}

static PyObject *add_sparse(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("add_sparse", items, count, 8);
    float *logits = address_at(&a, 0);
    const int64_t row_stride = int_at(&a, 1), num_rows = int_at(&a, 2), num_ids = int_at(&a, 3);
    const int32_t *rows = address_at(&a, 4), *ids = address_at(&a, 5);
    const float *values = address_at(&a, 6);
    const int64_t num = int_at(&a, 7);
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    if (!refuse_id(ids, num, num_ids, &refusal))
        for (int64_t i = 0; i < num && refusal.text[0] == 0; i++)
            if (rows[i] < 0 || rows[i] >= num_rows)
                REFUSE(&refusal, "row %d at place %ld outside the batch's %ld", rows[i], i, num_rows);
    for (int64_t i = 0; i < num && refusal.text[0] == 0; i++) logits[rows[i] * row_stride + ids[i]] += values[i];
    return none_or_raise(&refusal);
}

PyMethodDef penalty_methods[] = {
    {"penalize", (PyCFunction)(void (*)(void))penalize, METH_FASTCALL, "See kernels/cpu/sampling.py."},
    {"add_sparse", (PyCFunction)(void (*)(void))add_sparse, METH_FASTCALL, "See kernels/cpu/sampling.py."},
    {NULL, NULL, 0, NULL},
};
