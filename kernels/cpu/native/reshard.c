// Checksums, and the rows of a pool packed into a staging buffer or scattered from one: entry points and their checks.
// The loops are in reshard_body.h.
#include "arguments.h"
#include "reshard.h"
#include <stdio.h>

static PyObject *sum_bytes(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("sum_bytes", items, count, 3);
    const uint8_t *from = address_at(&a, 0);
    int64_t num_bytes = int_at(&a, 1), first_word = int_at(&a, 2);
    if (a.failed) return NULL;
    uint64_t sum;
    Py_BEGIN_ALLOW_THREADS;
    sum = (use_avx2() ? sum_bytes_avx2 : sum_bytes_portable)(from, num_bytes, (uint64_t)first_word);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(sum);
}

// Runs ascend and are disjoint, so that no row is moved twice; all is checked before anything is written.
static void check_runs(const Move *m, int64_t staging_bytes, Refusal *refusal) {
    int64_t free_from = 0, num_slots = 0, limit = m->num_blocks * POOL_BLOCK_SLOTS / m->run_slots;
    for (int64_t r = 0; r < m->num_runs && refusal->text[0] == 0; r++) {
        const int64_t begin = m->runs[2 * r], length = m->runs[2 * r + 1];
        if (length < 0 || begin < free_from || begin + length > limit)
            REFUSE(refusal, "run %ld: [%ld, %ld + %ld) outside [%ld, %ld), what is left of the pool after the run before",
                   r, begin, begin, length, free_from, limit);
        free_from = begin + length;
        num_slots += length * m->run_slots;
    }
    int64_t num_bytes = m->num_planes * num_slots * m->num_heads * m->row_bytes;
    if (refusal->text[0] == 0 && num_bytes != staging_bytes)
        REFUSE(refusal, "a staging buffer of %ld bytes expected for %ld slots of %ld planes, got %ld bytes", num_bytes,
               num_slots, m->num_planes, staging_bytes);
}

static bool may_stream(const Move *m, int64_t num_bytes) {
    uintptr_t low_bits = m->pack ? (uintptr_t)m->staging : 0;
    for (int64_t p = 0; !m->pack && p < m->num_planes; p++) low_bits |= (uintptr_t)m->planes[p];
    return num_bytes >= STREAM_BYTES && low_bits % VECTOR_BYTES == 0;
}

static PyObject *move_rows(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("move_rows", items, count, 15);
    Move move = {
        .planes = address_at(&a, 0), .num_planes = int_at(&a, 1), .num_blocks = int_at(&a, 2),
        .num_pool_heads = int_at(&a, 3), .row_bytes = int_at(&a, 4), .head_begin = int_at(&a, 5),
        .num_heads = int_at(&a, 6), .runs = address_at(&a, 7), .num_runs = int_at(&a, 8), .run_slots = int_at(&a, 9),
        .staging = address_at(&a, 10), .pack = int_at(&a, 12) != 0, .summed = int_at(&a, 13) != 0,
        .first_word = (uint64_t)int_at(&a, 14),
    };
    int64_t staging_bytes = int_at(&a, 11);
    if (a.failed) return NULL;
    if (move.num_planes * move.num_heads == 0) move.num_runs = 0;
    Refusal refusal = {{0}};
    uint64_t sum = 0;
    Py_BEGIN_ALLOW_THREADS;
    check_runs(&move, staging_bytes, &refusal);
    move.streamed = may_stream(&move, staging_bytes);
    if (refusal.text[0] == 0) sum = (use_avx2() ? move_rows_avx2 : move_rows_portable)(&move);
    Py_END_ALLOW_THREADS;
    if (refusal.text[0]) return none_or_raise(&refusal);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyMethodDef methods[] = {
    {"sum_bytes", (PyCFunction)(void (*)(void))sum_bytes, METH_FASTCALL, "See kernels/cpu/checksum.py."},
    {"move_rows", (PyCFunction)(void (*)(void))move_rows, METH_FASTCALL, "See kernels/cpu/reshard.py."},
    {NULL, NULL, 0, NULL},
};

int add_reshard(PyObject *module) { return PyModule_AddFunctions(module, methods); }
