// Entry points of the elementwise kernels: arguments, and the checks of what comes from tables. The arithmetic is in
// elementwise_body.h.
#include "elementwise.h"
#include "arguments.h"
#include "attention.h"
#include <stdio.h>

#define ON_PATH(name) (use_avx2() ? name##_avx2 : name##_portable)

static PyObject *norm_heads(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("norm", items, count, 11);
    Norm norm = {
        .x = address_at(&a, 0), .weight = address_at(&a, 1), .out = address_at(&a, 2), .num_tokens = int_at(&a, 3),
        .num_heads = int_at(&a, 4), .width = int_at(&a, 5), .x_stride = int_at(&a, 6), .x_head_stride = int_at(&a, 7),
        .out_stride = int_at(&a, 8), .out_head_stride = int_at(&a, 9), .eps = float_at(&a, 10),
    };
    if (a.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ON_PATH(norm_rows)(&norm);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *soft_cap(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("soft_cap", items, count, 7);
    Cap cap = {
        .x = address_at(&a, 0), .out = address_at(&a, 1), .num_rows = int_at(&a, 2), .width = int_at(&a, 3),
        .x_stride = int_at(&a, 4), .out_stride = int_at(&a, 5), .cap = float_at(&a, 6),
    };
    if (a.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ON_PATH(cap_rows)(&cap);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *combine(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("combine", items, count, 9);
    Pairwise pairwise = {
        .x = address_at(&a, 0), .y = address_at(&a, 1), .out = address_at(&a, 2), .num_rows = int_at(&a, 3),
        .width = int_at(&a, 4), .x_stride = int_at(&a, 5), .y_stride = int_at(&a, 6), .out_stride = int_at(&a, 7),
        .gate = (Gate)int_at(&a, 8),
    };
    if (a.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    ON_PATH(combine_rows)(&pairwise);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static void check_rope(const Rope *r, Refusal *refusal) {
    const int64_t num_slots = r->num_blocks * BLOCK_SLOTS;
    for (int64_t t = 0; t < r->num_tokens; t++)
        if (r->positions[t] < 0 || r->positions[t] >= r->max_positions)
            REFUSE(refusal, "token %ld of the batch: position %d outside the rotary table's %ld", t, r->positions[t],
                   r->max_positions);
        else if (r->slots[t] < NO_SLOT || r->slots[t] >= num_slots)
            REFUSE(refusal, "token %ld of the batch: slot %d outside the pool's %ld", t, r->slots[t], num_slots);
}

static PyObject *rope_and_store(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("rope_and_store", items, count, 21);
    Rope rope = {
        .q = address_at(&a, 0), .k = address_at(&a, 1), .v = address_at(&a, 2), .positions = address_at(&a, 3),
        .slots = address_at(&a, 4), .cos_sin = address_at(&a, 5), .k_pool = address_at(&a, 6),
        .v_pool = address_at(&a, 7), .num_tokens = int_at(&a, 8), .num_q_heads = int_at(&a, 9),
        .num_kv_heads = int_at(&a, 10), .head_dim = int_at(&a, 11), .rotary_dim = int_at(&a, 12),
        .max_positions = int_at(&a, 13), .q_stride = int_at(&a, 14), .k_stride = int_at(&a, 15),
        .v_stride = int_at(&a, 16), .num_blocks = int_at(&a, 17), .num_pool_heads = int_at(&a, 18),
        .kv_head_begin = int_at(&a, 19), .interleaved = int_at(&a, 20) != 0,
    };
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    Py_BEGIN_ALLOW_THREADS;
    check_rope(&rope, &refusal);
    if (refusal.text[0] == 0) ON_PATH(rope_rows)(&rope);
    Py_END_ALLOW_THREADS;
    return none_or_raise(&refusal);
}

static PyMethodDef methods[] = {
    {"norm", (PyCFunction)(void (*)(void))norm_heads, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"soft_cap", (PyCFunction)(void (*)(void))soft_cap, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"combine", (PyCFunction)(void (*)(void))combine, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"rope_and_store", (PyCFunction)(void (*)(void))rope_and_store, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {NULL, NULL, 0, NULL},
};

int add_elementwise(PyObject *module) { return PyModule_AddFunctions(module, methods); }
