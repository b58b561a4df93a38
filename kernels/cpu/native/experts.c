// A mixture of experts: which experts a token uses and with what weight, and the gated feed-forwards of those that this
// rank has. Tokens are grouped by expert (a counting sort), so that an expert's weights are read once for all of them.
#include "arguments.h"
#include "elementwise.h"
#include "weights.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GATE, UP, DOWN, MATRICES };
enum { EXPERT_ROWS = 64 }; // tokens of one expert in work at once: bounds the room a call takes

// ---- routing ----

typedef struct {
    const float *logits;
    int32_t *ids;
    float *weights;
    int64_t num_tokens, num_experts, num_used, stride;
    bool normalised;
} Route;

// The num_used largest, in order, the lower id first of equal ones.
static void take_largest(const Route *r, const float *logits, int32_t *ids) {
    int64_t taken = 0;
    for (int64_t e = 0; e < r->num_experts; e++) {
        int64_t at = taken < r->num_used ? taken++ : r->num_used - 1;
        if (at == r->num_used - 1 && e >= r->num_used && !(logits[e] > logits[ids[at]])) continue;
        for (; at > 0 && logits[e] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = (int32_t)e;
    }
}

static void route_token(const Route *r, const float *logits, int32_t *ids, float *weights) {
    take_largest(r, logits, ids);
    double all = 0, used = 0;
    const double top = (double)logits[ids[0]];
    for (int64_t e = 0; e < r->num_experts; e++) all += exp((double)logits[e] - top); // NaN where any logit is
    for (int64_t k = 0; k < r->num_used; k++) used += exp((double)logits[ids[k]] - top);
    const double sum = r->normalised ? used + 0.0 * all : all;
    for (int64_t k = 0; k < r->num_used; k++) weights[k] = (float)(exp((double)logits[ids[k]] - top) / sum);
}

static PyObject *route(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("route", items, count, 8);
    const Route r = {
        .logits = address_at(&a, 0), .ids = address_at(&a, 1), .weights = address_at(&a, 2),
        .num_tokens = int_at(&a, 3), .num_experts = int_at(&a, 4), .num_used = int_at(&a, 5), .stride = int_at(&a, 6),
        .normalised = int_at(&a, 7) != 0,
    };
    if (a.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    for (int64_t t = 0; t < r.num_tokens; t++)
        route_token(&r, r.logits + t * r.stride, r.ids + t * r.num_used, r.weights + t * r.num_used);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// ---- experts ----

typedef struct {
    const float *x;
    const int32_t *ids; // [num_tokens][num_used]
    const float *weights;
    float *out;
    int64_t num_tokens, num_used, first_expert, num_local, hidden, width, x_stride, out_stride;
    Gate gate;
    bool accumulate;
    const struct kernels *kernels;
} Experts;

// What belongs to the experts that have tokens; `begin` has num_local + 1 places of `order`.
typedef struct {
    int64_t *begin, *order; // order: places in ids, expert by expert, tokens ascending
    struct weight (*weight)[MATRICES];
    PyObject *(*table)[MATRICES];
    float *x, *gate, *up, *down;
    int64_t num_rows;
} Room;

static bool is_local(const Experts *e, int32_t id) {
    return id >= e->first_expert && id < e->first_expert + e->num_local;
}

// The counting sort. False with a Python error set for an id below 0.
static bool sort_tokens(const Experts *e, Room *room) {
    const int64_t num = e->num_tokens * e->num_used;
    for (int64_t i = 0; i < num; i++) {
        if (e->ids[i] < 0) {
            PyErr_Format(PyExc_ValueError, "expert %d of token %lld: ids are 0 or more", e->ids[i],
                         (long long)(i / e->num_used));
            return false;
        }
        if (is_local(e, e->ids[i])) room->begin[e->ids[i] - e->first_expert + 1]++;
    }
    for (int64_t local = 0; local < e->num_local; local++) {
        const int64_t rows = room->begin[local + 1];
        if (rows > room->num_rows) room->num_rows = rows < EXPERT_ROWS ? rows : EXPERT_ROWS;
        room->begin[local + 1] += room->begin[local];
    }
    for (int64_t i = num - 1; i >= 0; i--) // backwards, each expert's places filled from their end
        if (is_local(e, e->ids[i])) room->order[--room->begin[e->ids[i] - e->first_expert + 1]] = i;
    memmove(room->begin, room->begin + 1, (size_t)e->num_local * sizeof(int64_t)); // begins again, shifted by one
    int64_t used = 0;
    for (int64_t i = 0; i < num; i++) used += is_local(e, e->ids[i]);
    room->begin[e->num_local] = used;
    return true;
}

static bool has_shape(const struct weight *weight, int64_t local, int64_t num_rows, int64_t num_columns) {
    if (weight->num_rows == num_rows && weight->num_columns == num_columns) return true;
    PyErr_Format(PyExc_ValueError, "local expert %lld: weights of [%lld, %lld] expected, got [%lld, %lld]",
                 (long long)local, (long long)num_rows, (long long)num_columns, (long long)weight->num_rows,
                 (long long)weight->num_columns);
    return false;
}

// The tables of the experts that have tokens, and of no other. False with a Python error set.
static bool read_weights(Experts *e, PyObject *const *sequences, Room *room) {
    for (int64_t local = 0; local < e->num_local; local++) {
        if (room->begin[local] == room->begin[local + 1]) continue;
        for (int i = 0; i < MATRICES; i++) {
            PyObject *weight = PySequence_Fast_GET_ITEM(sequences[i], local);
            PyObject *table = room->table[local][i] = PyObject_GetAttrString(weight, "piece_table");
            if (table == NULL || parse_weight(table, &room->weight[local][i])) return false;
        }
        if (e->width == 0) e->width = room->weight[local][GATE].num_rows;
        for (int i = 0; i < MATRICES; i++)
            if (!has_shape(&room->weight[local][i], local, i == DOWN ? e->hidden : e->width,
                           i == DOWN ? e->width : e->hidden))
                return false;
    }
    return true;
}

static void run_rows(const Experts *e, const Room *room, int64_t local, const int64_t *order, int64_t num_rows) {
    const struct weight *weight = room->weight[local];
    for (int64_t r = 0; r < num_rows; r++)
        memcpy(room->x + r * e->hidden, e->x + order[r] / e->num_used * e->x_stride, (size_t)e->hidden * sizeof(float));
    struct product p = {.x = room->x, .x_stride = e->hidden, .out_stride = e->width, .num_tokens = num_rows};
    p.out = room->gate;
    multiply_weight(e->kernels, &weight[GATE], &p);
    p.out = room->up;
    multiply_weight(e->kernels, &weight[UP], &p);
    const Pairwise pair = {
        .x = room->gate, .y = room->up, .out = room->gate, .num_rows = num_rows, .width = e->width,
        .x_stride = e->width, .y_stride = e->width, .out_stride = e->width, .gate = e->gate,
    };
    (use_avx2() ? combine_rows_avx2 : combine_rows_portable)(&pair);
    p = (struct product){.x = room->gate, .x_stride = e->width, .out = room->down, .out_stride = e->hidden,
                         .num_tokens = num_rows};
    multiply_weight(e->kernels, &weight[DOWN], &p);
    for (int64_t r = 0; r < num_rows; r++) {
        float *restrict out = e->out + order[r] / e->num_used * e->out_stride;
        const float *restrict from = room->down + r * e->hidden, factor = e->weights[order[r]];
        for (int64_t i = 0; i < e->hidden; i++) out[i] += factor * from[i];
    }
}

// Experts in order: a token's sum does not depend on the order in which its experts were named.
static void run_experts(const Experts *e, const Room *room) {
    for (int64_t t = 0; t < e->num_tokens && !e->accumulate; t++)
        memset(e->out + t * e->out_stride, 0, (size_t)e->hidden * sizeof(float));
    for (int64_t local = 0; local < e->num_local; local++)
        for (int64_t at = room->begin[local]; at < room->begin[local + 1]; at += EXPERT_ROWS) {
            const int64_t left = room->begin[local + 1] - at;
            run_rows(e, room, local, room->order + at, left < EXPERT_ROWS ? left : EXPERT_ROWS);
        }
}

static bool make_room(const Experts *e, Room *room) {
    const size_t num = (size_t)(e->num_tokens * e->num_used), local = (size_t)e->num_local;
    room->begin = calloc(local + 1, sizeof(int64_t));
    room->order = malloc((num + 1) * sizeof(int64_t));
    room->weight = malloc((local + 1) * sizeof(*room->weight));
    room->table = calloc(local + 1, sizeof(*room->table));
    return room->begin && room->order && room->weight && room->table;
}

static bool make_row_room(const Experts *e, Room *room) {
    room->x = malloc(((size_t)room->num_rows * (size_t)(2 * e->hidden + 2 * e->width) + 1) * sizeof(float));
    if (room->x == NULL) return false;
    room->down = room->x + room->num_rows * e->hidden;
    room->gate = room->down + room->num_rows * e->hidden;
    room->up = room->gate + room->num_rows * e->width;
    return true;
}

static void free_room(const Experts *e, Room *room) {
    for (int64_t local = 0; room->table && local < e->num_local; local++)
        for (int i = 0; i < MATRICES; i++) Py_XDECREF(room->table[local][i]);
    free(room->begin);
    free(room->order);
    free(room->weight);
    free(room->table);
    free(room->x);
}

static PyObject *experts(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("experts", items, count, 16);
    Experts e = {
        .x = address_at(&a, 0), .ids = address_at(&a, 1), .weights = address_at(&a, 2), .out = address_at(&a, 3),
        .num_tokens = int_at(&a, 4), .num_used = int_at(&a, 5), .first_expert = int_at(&a, 6), .hidden = int_at(&a, 7),
        .x_stride = int_at(&a, 8), .out_stride = int_at(&a, 9), .gate = (Gate)int_at(&a, 10),
        .accumulate = int_at(&a, 11) != 0, .kernels = widest_kernels(int_at(&a, 15)),
    };
    if (a.failed) return NULL;
    for (int i = 0; i < MATRICES; i++)
        if (!PyTuple_Check(items[12 + i]) && !PyList_Check(items[12 + i]))
            return PyErr_Format(PyExc_TypeError, "weights of experts: a tuple or a list expected, got %R", items[12 + i]);
    e.num_local = PySequence_Fast_GET_SIZE(items[12]);
    if (PySequence_Fast_GET_SIZE(items[13]) != e.num_local || PySequence_Fast_GET_SIZE(items[14]) != e.num_local)
        return PyErr_Format(PyExc_ValueError, "%zd gates, %zd ups and %zd downs: one of each expert expected",
                            e.num_local, PySequence_Fast_GET_SIZE(items[13]), PySequence_Fast_GET_SIZE(items[14]));
    Room room = {0};
    const bool fits = make_room(&e, &room);
    const bool ready = fits && sort_tokens(&e, &room) && read_weights(&e, items + 12, &room);
    const bool runs = ready && make_row_room(&e, &room);
    if (runs) {
        Py_BEGIN_ALLOW_THREADS;
        run_experts(&e, &room);
        Py_END_ALLOW_THREADS;
    }
    free_room(&e, &room);
    if (runs) Py_RETURN_NONE;
    return fits && !ready ? NULL : PyErr_NoMemory();
}

static PyMethodDef methods[] = {
    {"route", (PyCFunction)(void (*)(void))route, METH_FASTCALL, "See kernels/cpu/experts.py."},
    {"experts", (PyCFunction)(void (*)(void))experts, METH_FASTCALL, "See kernels/cpu/experts.py."},
    {NULL, NULL, 0, NULL},
};

int add_experts(PyObject *module) { return PyModule_AddFunctions(module, methods); }
