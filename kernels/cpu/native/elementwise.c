// Entry points of the elementwise kernels: arguments, and the checks of what comes from tables. The arithmetic is in
// elementwise_body.h.
#include "elementwise.h"
#include "arguments.h"
#include "attention.h"
#include <stdio.h>

#define ON_PATH(name) (use_avx2() ? name##_avx2 : name##_portable)

static PyObject *norm_heads(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("norm", items, count, 3);
    const NormOperands *o = struct_at(&a, 0, sizeof(*o));
    const float *weight = address_at(&a, 1);
    const float eps = float_at(&a, 2);
    if (a.failed) return NULL;
    const Norm norm = {
        .x = (const float *)o->x, .weight = weight, .out = (float *)o->out, .num_tokens = o->num_tokens,
        .num_heads = o->num_heads, .width = o->width, .x_stride = o->x_stride, .x_head_stride = o->x_head_stride,
        .out_stride = o->out_stride, .out_head_stride = o->out_head_stride, .eps = eps,
    };
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
    Arguments a = take_arguments("combine", items, count, 2);
    const PairOperands *o = struct_at(&a, 0, sizeof(*o));
    const Gate gate = (Gate)int_at(&a, 1);
    if (a.failed) return NULL;
    const Pairwise pairwise = {
        .x = (const float *)o->x, .y = (const float *)o->y, .out = (float *)o->out, .num_rows = o->num_rows,
        .width = o->width, .x_stride = o->x_stride, .y_stride = o->y_stride, .out_stride = o->out_stride, .gate = gate,
    };
    Py_BEGIN_ALLOW_THREADS;
    ON_PATH(combine_rows)(&pairwise);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *rope_and_store(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("rope_and_store", items, count, 6);
    const Plan *plan = struct_at(&a, 0, sizeof(Plan));
    const RopeOperands *operands = struct_at(&a, 1, sizeof(RopeOperands));
    float *k_pool = address_at(&a, 2), *v_pool = address_at(&a, 3);
    const int64_t num_blocks = int_at(&a, 4), num_pool_heads = int_at(&a, 5);
    if (a.failed) return NULL;
    const Batch *b = &plan->batch;
    const Rope rope = {
        .q = (float *)operands->q, .k = (float *)operands->k, .v = (const float *)operands->v,
        .positions = plan->positions, .slots = plan->slots, .cos_sin = (const float *)operands->cos_sin,
        .k_pool = k_pool, .v_pool = v_pool, .num_tokens = b->num_tokens, .num_q_heads = b->num_q_heads,
        .num_kv_heads = operands->num_kv_heads, .head_dim = b->head_dim, .rotary_dim = operands->rotary_dim,
        .q_stride = operands->q_stride, .k_stride = operands->k_stride, .v_stride = operands->v_stride,
        .num_pool_heads = num_pool_heads, .kv_head_begin = b->kv_head_begin, .interleaved = operands->interleaved != 0,
    };
    Refusal refusal = {{0}};
    if (plan->most_position >= operands->max_positions)
        REFUSE(&refusal, "position %ld of the step is outside the rotary table's %ld", plan->most_position,
               operands->max_positions);
    else if (plan->most_slot >= num_blocks * BLOCK_SLOTS)
        REFUSE(&refusal, "slot %ld of the step is outside the pool's %ld", plan->most_slot, num_blocks * BLOCK_SLOTS);
    else if (b->kv_head_begin + operands->num_kv_heads > num_pool_heads)
        REFUSE(&refusal, "KV heads [%ld, %ld) outside the pool's %ld", b->kv_head_begin,
               b->kv_head_begin + operands->num_kv_heads, num_pool_heads);
    if (refusal.text[0]) return none_or_raise(&refusal);
    Py_BEGIN_ALLOW_THREADS;
    ON_PATH(rope_rows)(&rope);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"norm", (PyCFunction)(void (*)(void))norm_heads, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"soft_cap", (PyCFunction)(void (*)(void))soft_cap, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"combine", (PyCFunction)(void (*)(void))combine, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {"rope_and_store", (PyCFunction)(void (*)(void))rope_and_store, METH_FASTCALL, "See kernels/cpu/elementwise.py."},
    {NULL, NULL, 0, NULL},
};

int add_elementwise(PyObject *module) { return PyModule_AddFunctions(module, methods); }
