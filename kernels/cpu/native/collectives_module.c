// What Python sees of the collectives. Addresses and sizes come from kernels/cpu/collectives.py, which owns the mapping and has
// checked the tensors; here the rest is checked, the interpreter lock released, and an outcome returned:
// None (or a count) on success, (status, wait, peer, waited, seen) on failure.
#include "native.h"

#include "collectives.h"

#include <unistd.h>

static const char CAPSULE[] = "kernels.communicator";

typedef unsigned long long word;  // what the argument parser calls K

static communicator *communicator_of(PyObject *capsule) {
    communicator *comm = PyCapsule_GetPointer(capsule, CAPSULE);
    if (comm && !comm->base) {
        PyErr_SetString(PyExc_ValueError, "the communicator is closed");
        return NULL;
    }
    return comm;
}

static bool take(atomic_flag *busy, const char *what) {
    if (!atomic_flag_test_and_set(busy)) return true;
    PyErr_Format(PyExc_RuntimeError, "%s of one communicator used by two threads at once: give each its own", what);
    return false;
}

static bool check_peer(const communicator *comm, uint64_t peer) {
    if (peer < comm->layout.num_ranks && peer != comm->rank) return true;
    PyErr_Format(PyExc_ValueError, "peer %llu: not another rank of %llu", (word)peer, (word)comm->layout.num_ranks);
    return false;
}

// Enters an operation: an earlier failure is repeated, an abort noticed before anything is waited for.
static bool enter(operation *op, communicator *comm, uint32_t code, uint64_t timeout_ns, uint32_t purpose) {
    *op = (operation){.comm = comm, .timeout_ns = timeout_ns, .operation = code, .purpose = purpose};
    mirror_line *mirror = &lines_of(comm, comm->rank)->mirror;
    mirror->operation = code;
    mirror->purpose = purpose;
    mirror->num_operations++;
    op->failure = comm->failure;
    return op->failure.status == OK && !is_aborted(op, WAIT_NONE, comm->rank, 0);
}

static PyObject *leave(operation *op, bool good) {
    op->comm->in_flight--;
    if (good) {
        lines_of(op->comm, op->comm->rank)->mirror.operation = NO_OPERATION;
        Py_RETURN_NONE;
    }
    const failure *why = &op->failure;
    op->comm->failure = *why;
    return Py_BuildValue("(IIIKK)", why->status, why->wait, why->peer, (word)why->waited, (word)why->seen);
}

// Runs `call` between entering and leaving, with the interpreter lock released and the busy flag given back.
#define RUN(code, busy, call)                                      \
    operation op;                                                  \
    bool good;                                                     \
    comm->in_flight++;                                             \
    Py_BEGIN_ALLOW_THREADS;                                        \
    good = enter(&op, comm, code, timeout_ns, purpose) && (call);  \
    Py_END_ALLOW_THREADS;                                          \
    if (busy) atomic_flag_clear((atomic_flag *)(busy));            \
    return leave(&op, good)

static PyObject *py_layout(PyObject *self, PyObject *args) {
    (void)self;
    word shape[6];
    if (!PyArg_ParseTuple(args, "KKKKKK", &shape[0], &shape[1], &shape[2], &shape[3], &shape[4], &shape[5])) return NULL;
    region_layout at = {.num_ranks = shape[0], .stage_bytes = shape[1], .num_slots = shape[2],
                        .slot_bytes = shape[3], .num_board_steps = shape[4], .max_rows = shape[5]};
    if (!fill_layout(&at)) {
        PyErr_Format(PyExc_ValueError,
                     "no region for num_ranks=%llu (1 to %d), stage_bytes=%llu and slot_bytes=%llu (multiples of %d up to 4 GiB), "
                     "num_slots=%llu and num_board_steps=%llu (2 to 65536), max_rows=%llu (1 to 1048576)",
                     shape[0], MAX_RANKS, shape[1], shape[3], LINE_BYTES, shape[2], shape[4], shape[5]);
        return NULL;
    }
    return Py_BuildValue("(KKKKKKKK)", (word)at.ranks, (word)at.channels, (word)at.board, (word)at.board_entry_bytes,
                         (word)at.stages, (word)at.slots, (word)at.slot_stride, (word)at.total_bytes);
}

static void free_communicator(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, CAPSULE)); }

static bool read_shape(communicator *comm, uint64_t mapped_bytes) {
    const region_header *header = (const region_header *)comm->base;
    comm->layout = (region_layout){.num_ranks = header->num_ranks, .stage_bytes = header->stage_bytes,
                                   .num_slots = header->num_slots, .slot_bytes = header->slot_bytes,
                                   .num_board_steps = header->num_board_steps, .max_rows = header->max_rows};
    return header->magic == REGION_MAGIC && fill_layout(&comm->layout) && comm->layout.total_bytes <= mapped_bytes;
}

static PyObject *py_attach(PyObject *self, PyObject *args) {
    (void)self;
    word address, mapped_bytes, rank, spin_turns, yield_ns, one_shot_bytes;
    if (!PyArg_ParseTuple(args, "KKKKKK", &address, &mapped_bytes, &rank, &spin_turns, &yield_ns, &one_shot_bytes)) return NULL;
    communicator *comm = PyMem_Calloc(1, sizeof(communicator));
    if (!comm) return PyErr_NoMemory();
    comm->base = (unsigned char *)(uintptr_t)address;
    comm->rank = rank, comm->spin_turns = spin_turns, comm->yield_ns = yield_ns, comm->one_shot_bytes = one_shot_bytes;
    if (mapped_bytes < sizeof(region_header) || !read_shape(comm, mapped_bytes) || rank >= comm->layout.num_ranks) {
        PyErr_Format(PyExc_ValueError, "rank %llu cannot attach: no such rank, or %llu bytes that hold no region", rank, mapped_bytes);
        PyMem_Free(comm);
        return NULL;
    }
    rank_lines *own = lines_of(comm, rank);
    if (own->mirror.pid) {
        PyErr_Format(PyExc_RuntimeError, "rank %llu was attached by process %u already: a generation starts with a zeroed region",
                     rank, own->mirror.pid);
        PyMem_Free(comm);
        return NULL;
    }
    own->mirror.pid = (uint32_t)getpid();
    comm->round = atomic_load(&own->acknowledged);
    return PyCapsule_New(comm, CAPSULE, free_communicator);
}

static PyObject *py_close(PyObject *self, PyObject *capsule) {
    (void)self;
    communicator *comm = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!comm) return NULL;
    if (comm->in_flight) return PyErr_Format(PyExc_RuntimeError, "%u operations in flight: abort before closing", comm->in_flight);
    comm->base = NULL;
    Py_RETURN_NONE;
}

static PyObject *py_abort(PyObject *self, PyObject *args) {
    (void)self;
    word address, reason;
    if (!PyArg_ParseTuple(args, "KK", &address, &reason)) return NULL;
    const region_header *header = (const region_header *)(uintptr_t)address;
    if (header->magic != REGION_MAGIC || header->num_ranks > MAX_RANKS || reason == 0) {
        PyErr_SetString(PyExc_ValueError, "abort wants a region with a header and a reason other than zero");
        return NULL;
    }
    abort_region((unsigned char *)(uintptr_t)address, header->num_ranks, reason);
    Py_RETURN_NONE;
}

static PyObject *py_all_reduce(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word x, count, timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKI", &capsule, &x, &count, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !take(&comm->collective_busy, "the collectives")) return NULL;
    RUN(ALL_REDUCE, &comm->collective_busy, all_reduce(&op, (float *)(uintptr_t)x, count));
}

static bool parse_row_bytes(PyObject *sizes, uint64_t num_ranks, uint64_t *row_bytes) {
    if (!PyTuple_Check(sizes) || (uint64_t)PyTuple_GET_SIZE(sizes) != num_ranks) {
        PyErr_Format(PyExc_ValueError, "row_bytes wants a tuple of %llu sizes, one per rank", (word)num_ranks);
        return false;
    }
    for (uint64_t rank = 0; rank < num_ranks; rank++) {
        row_bytes[rank] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sizes, rank));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

static PyObject *py_all_gather(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *sizes;
    word source, rows, out, timeout_ns;
    unsigned purpose;
    uint64_t row_bytes[MAX_RANKS];
    if (!PyArg_ParseTuple(args, "OKKOKKI", &capsule, &source, &rows, &sizes, &out, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !parse_row_bytes(sizes, comm->layout.num_ranks, row_bytes)) return NULL;
    if (!take(&comm->collective_busy, "the collectives")) return NULL;
    RUN(ALL_GATHER, &comm->collective_busy,
        all_gather(&op, (const unsigned char *)(uintptr_t)source, rows, row_bytes, (unsigned char *)(uintptr_t)out));
}

static PyObject *py_all_to_all(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *sizes;
    word source, out, timeout_ns;
    unsigned purpose;
    uint64_t bytes[MAX_RANKS];
    if (!PyArg_ParseTuple(args, "OKOKKI", &capsule, &source, &sizes, &out, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !parse_row_bytes(sizes, comm->layout.num_ranks, bytes)) return NULL;
    if (!take(&comm->collective_busy, "the collectives")) return NULL;
    RUN(ALL_TO_ALL, &comm->collective_busy,
        all_to_all(&op, (const unsigned char *)(uintptr_t)source, bytes, (unsigned char *)(uintptr_t)out));
}

static PyObject *py_broadcast(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word bytes, count, root, timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKKI", &capsule, &bytes, &count, &root, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || (root != comm->rank && !check_peer(comm, root)) || !take(&comm->collective_busy, "the collectives")) return NULL;
    RUN(BROADCAST, &comm->collective_busy, broadcast(&op, (unsigned char *)(uintptr_t)bytes, count, root));
}

static PyObject *py_barrier(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKI", &capsule, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !take(&comm->collective_busy, "the collectives")) return NULL;
    RUN(BARRIER, &comm->collective_busy, barrier(&op));
}

static PyObject *py_send(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word bytes, count, peer, tag, timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKKKI", &capsule, &bytes, &count, &peer, &tag, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !check_peer(comm, peer) || !take(&comm->send_busy[peer], "a channel's sending end")) return NULL;
    RUN(SEND, &comm->send_busy[peer], send_message(&op, (const unsigned char *)(uintptr_t)bytes, count, peer, tag));
}

static PyObject *py_recv(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word bytes, count, peer, tag, timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKKKI", &capsule, &bytes, &count, &peer, &tag, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm || !check_peer(comm, peer) || !take(&comm->recv_busy[peer], "a channel's receiving end")) return NULL;
    RUN(RECV, &comm->recv_busy[peer], recv_message(&op, (unsigned char *)(uintptr_t)bytes, count, peer, tag));
}

static PyObject *py_publish(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word sequence, ids, num_ids, timeout_ns = 0;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKI", &capsule, &sequence, &ids, &num_ids, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm) return NULL;
    if (num_ids > comm->layout.max_rows)
        return PyErr_Format(PyExc_ValueError, "%llu ids for a board of %llu rows", num_ids, (word)comm->layout.max_rows);
    if (!take(&comm->publish_busy, "the token board's writing end")) return NULL;
    RUN(PUBLISH, &comm->publish_busy, publish_tokens(&op, sequence, (const int32_t *)(uintptr_t)ids, num_ids));
}

static PyObject *py_read(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    word sequence, out, capacity, timeout_ns;
    unsigned purpose;
    if (!PyArg_ParseTuple(args, "OKKKKI", &capsule, &sequence, &out, &capacity, &timeout_ns, &purpose)) return NULL;
    communicator *comm = communicator_of(capsule);
    if (!comm) return NULL;
    operation op;
    uint64_t num_ids = 0;
    bool good;
    comm->in_flight++;
    Py_BEGIN_ALLOW_THREADS;
    good = enter(&op, comm, READ, timeout_ns, purpose) &&
           read_tokens(&op, sequence, (int32_t *)(uintptr_t)out, capacity, &num_ids);
    Py_END_ALLOW_THREADS;
    PyObject *outcome = leave(&op, good);
    if (!good || !outcome) return outcome;
    Py_DECREF(outcome);
    return PyLong_FromUnsignedLongLong(num_ids);
}

static PyMethodDef methods[] = {
    {"collectives_layout", py_layout, METH_VARARGS, "(num_ranks, stage_bytes, num_slots, slot_bytes, num_board_steps, max_rows) -> offsets"},
    {"collectives_attach", py_attach, METH_VARARGS, "(address, mapped_bytes, rank, spin_turns, yield_ns, one_shot_bytes) -> communicator"},
    {"collectives_close", py_close, METH_O, "(communicator): every later call raises"},
    {"collectives_abort", py_abort, METH_VARARGS, "(address, reason): releases every wait in the region"},
    {"collectives_all_reduce", py_all_reduce, METH_VARARGS, "(communicator, floats, count, timeout_ns, purpose)"},
    {"collectives_all_gather", py_all_gather, METH_VARARGS, "(communicator, source, rows, row_bytes, out or 0, timeout_ns, purpose)"},
    {"collectives_all_to_all", py_all_to_all, METH_VARARGS, "(communicator, source, bytes by rank, out, timeout_ns, purpose)"},
    {"collectives_broadcast", py_broadcast, METH_VARARGS, "(communicator, bytes, count, root, timeout_ns, purpose)"},
    {"collectives_barrier", py_barrier, METH_VARARGS, "(communicator, timeout_ns, purpose)"},
    {"collectives_send", py_send, METH_VARARGS, "(communicator, bytes, count, peer, tag, timeout_ns, purpose)"},
    {"collectives_recv", py_recv, METH_VARARGS, "(communicator, bytes, count, peer, tag, timeout_ns, purpose)"},
    {"collectives_publish", py_publish, METH_VARARGS, "(communicator, sequence, ids, num_ids, purpose)"},
    {"collectives_read", py_read, METH_VARARGS, "(communicator, sequence, out, capacity, timeout_ns, purpose) -> num_ids"},
    {NULL, NULL, 0, NULL},
};

int add_collectives(PyObject *module) { return PyModule_AddFunctions(module, methods); }
