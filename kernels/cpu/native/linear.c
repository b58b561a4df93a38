// Entry points of the matrices in kernels/cpu/linear.py: they check addresses and shapes, let other threads run, and call
// the kernels of the widest instruction set there is. They keep no state; the memory must stay mapped during a call.
#include "arguments.h"
#include "weights.h"
#include <stdio.h>

const struct block_layout block_layouts[NUM_TYPE_NUMBERS] = {
    [0] = {1, 4},      [1] = {1, 2},      [30] = {1, 2},     [2] = {32, 18},    [3] = {32, 20},
    [6] = {32, 22},    [7] = {32, 24},    [8] = {32, 34},    [10] = {256, 84},  [11] = {256, 110},
    [12] = {256, 144}, [13] = {256, 176}, [14] = {256, 210},
};

static int whole_numbers(PyObject *const *args, int count, int64_t *out) {
    for (int i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(args[i]);
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int count_is(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments expected, got %zd", expected, given);
    return -1;
}

// Five arguments: type, address, bytes from row to row, rows, columns.
static int parse_matrix(PyObject *const *args, struct matrix *matrix, int64_t *type) {
    int64_t v[5];
    if (whole_numbers(args, 5, v)) return -1;
    if (v[0] < 0 || v[0] >= NUM_TYPE_NUMBERS || block_layouts[v[0]].length == 0) {
        PyErr_Format(PyExc_ValueError, "tensor type %lld has no kernel", (long long)v[0]);
        return -1;
    }
    if (v[3] < 0 || v[4] < 0 || v[4] % block_layouts[v[0]].length != 0 || (v[1] == 0 && v[3] * v[4] != 0)) {
        PyErr_Format(PyExc_ValueError, "a matrix of type %lld at address %lld cannot have %lld rows of %lld columns",
                     (long long)v[0], (long long)v[1], (long long)v[3], (long long)v[4]);
        return -1;
    }
    *type = v[0];
    *matrix = (struct matrix){(const uint8_t *)(uintptr_t)v[1], v[2], v[3], v[4]};
    return 0;
}

struct dense {
    uintptr_t address;
    int64_t num_rows, num_columns, row_stride;
};

// Three arguments: address, shape and strides (in elements) of a 2-D tensor with unit inner stride.
static int parse_dense(PyObject *const *args, const char *name, struct dense *out) {
    PyObject *shape = args[1], *strides = args[2];
    if (!PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_GET_SIZE(shape) != 2 ||
        PyTuple_GET_SIZE(strides) != 2) {
        PyErr_Format(PyExc_ValueError, "%s must have 2 dimensions, got shape %R", name, shape);
        return -1;
    }
    int64_t address, sizes[2], steps[2];
    if (whole_numbers(args, 1, &address) || whole_numbers(&PyTuple_GET_ITEM(shape, 0), 2, sizes) ||
        whole_numbers(&PyTuple_GET_ITEM(strides, 0), 2, steps))
        return -1;
    if (steps[1] != 1 && sizes[1] > 1) {
        PyErr_Format(PyExc_ValueError, "%s must have inner stride 1, got strides %R: copy it with contiguous()", name,
                     strides);
        return -1;
    }
    if (address == 0 && sizes[0] * sizes[1] != 0) {
        PyErr_Format(PyExc_ValueError, "%s of shape %R has no memory", name, shape);
        return -1;
    }
    *out = (struct dense){(uintptr_t)address, sizes[0], sizes[1], steps[0]};
    return 0;
}

static int shape_is(const struct dense *dense, const char *name, int64_t num_rows, int64_t num_columns) {
    if (dense->num_rows == num_rows && dense->num_columns == num_columns) return 0;
    PyErr_Format(PyExc_ValueError, "%s must be [%lld, %lld], got [%lld, %lld]", name, (long long)num_rows,
                 (long long)num_columns, (long long)dense->num_rows, (long long)dense->num_columns);
    return -1;
}

static void add_bias(const struct product *p, const float *bias, int64_t num_rows) {
    for (int64_t t = 0; t < p->num_tokens; t++)
        for (int64_t n = 0; n < num_rows; n++) p->out[t * p->out_stride + n] += bias[n];
}

static PyObject *linear_multiply(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("linear_multiply", items, count, 5);
    const struct product_operands *o = struct_at(&a, 1, sizeof(*o));
    const float *bias = address_at(&a, 2);
    const bool accumulate = int_at(&a, 3) != 0;
    const int64_t max_lanes = int_at(&a, 4);
    struct weight weight;
    if (a.failed || parse_weight(items[0], &weight)) return NULL;
    if (o->num_columns != weight.num_columns || o->num_rows != weight.num_rows)
        return PyErr_Format(PyExc_ValueError,
                            "x must be [T, %lld] and out [T, %lld], got x [%lld, %lld] and out [%lld, %lld]",
                            (long long)weight.num_columns, (long long)weight.num_rows, (long long)o->num_tokens,
                            (long long)o->num_columns, (long long)o->num_tokens, (long long)o->num_rows);
    const struct product p = {
        .x = (const float *)o->x, .out = (float *)o->out, .x_stride = o->x_stride, .out_stride = o->out_stride,
        .num_tokens = o->num_tokens, .accumulate = accumulate,
    };
    Py_BEGIN_ALLOW_THREADS;
    multiply_weight(widest_kernels(max_lanes), &weight, &p);
    if (bias) add_bias(&p, bias, weight.num_rows);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *linear_dequantize(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    struct matrix matrix;
    struct dense out;
    int64_t type, max_lanes;
    if (count_is(count, 9) || parse_matrix(args, &matrix, &type) || parse_dense(args + 5, "out", &out) ||
        whole_numbers(args + 8, 1, &max_lanes) || shape_is(&out, "out", matrix.num_rows, matrix.num_columns))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    const struct kernels *kernels = widest_kernels(max_lanes);
    for (int64_t n = 0; n < matrix.num_rows; n++)
        kernels->unpack[type](matrix.weights + n * matrix.row_bytes, matrix.num_columns, 2 * matrix.row_bytes,
                              (float *)out.address + n * out.row_stride);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

struct ids {
    uintptr_t address;
    int64_t stride, size_bytes;
};

static int64_t id_at(const struct ids *ids, int64_t i) {
    uintptr_t address = ids->address + (uintptr_t)(i * ids->stride * ids->size_bytes);
    return ids->size_bytes == 8 ? *(const int64_t *)address : *(const int32_t *)address;
}

// All ids are looked at before any row is read; the caller keeps them unchanged until the call is over.
static int ids_are_inside(const struct ids *ids, int64_t num_ids, int64_t num_rows) {
    for (int64_t i = 0; i < num_ids; i++) {
        int64_t id = id_at(ids, i);
        if (id < 0 || id >= num_rows) {
            PyErr_Format(PyExc_IndexError, "id %lld at position %lld is outside the table's rows [0, %lld)",
                         (long long)id, (long long)i, (long long)num_rows);
            return -1;
        }
    }
    return 0;
}

static PyObject *linear_take_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    struct matrix matrix;
    struct dense out;
    int64_t type, v[4], max_lanes;
    const double scale = count == 14 ? PyFloat_AsDouble(args[13]) : 1.0;
    if (count_is(count, 14) || parse_matrix(args, &matrix, &type) || whole_numbers(args + 5, 4, v) ||
        parse_dense(args + 9, "out", &out) || whole_numbers(args + 12, 1, &max_lanes) ||
        shape_is(&out, "out", v[1], matrix.num_columns))
        return NULL;
    struct ids ids = {(uintptr_t)v[0], v[2], v[3]};
    if (ids_are_inside(&ids, v[1], matrix.num_rows)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    const struct kernels *kernels = widest_kernels(max_lanes);
    for (int64_t i = 0; i < v[1]; i++) {
        float *row = (float *)out.address + i * out.row_stride;
        kernels->unpack[type](matrix.weights + id_at(&ids, i) * matrix.row_bytes, matrix.num_columns, 0, row);
        for (int64_t k = 0; scale != 1.0 && k < matrix.num_columns; k++) row[k] *= (float)scale;
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *buffer_address(PyObject *self, PyObject *object) {
    (void)self;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE)) return NULL;
    PyObject *answer = Py_BuildValue("(Ln)", (long long)(intptr_t)view.buf, view.len);
    PyBuffer_Release(&view);
    return answer;
}

static PyMethodDef methods[] = {
    {"linear_multiply", (PyCFunction)(void (*)(void))linear_multiply, METH_FASTCALL,
     "linear_multiply(piece_table, operands, bias, accumulate, max_lanes)"},
    {"linear_dequantize", (PyCFunction)(void (*)(void))linear_dequantize, METH_FASTCALL,
     "linear_dequantize(type, address, row_bytes, rows, columns, out, out_shape, out_strides, max_lanes)"},
    {"linear_take_rows", (PyCFunction)(void (*)(void))linear_take_rows, METH_FASTCALL,
     "linear_take_rows(type, address, row_bytes, rows, columns, ids, num_ids, ids_stride, id_bytes, out, out_shape, "
     "out_strides, max_lanes)"},
    {"buffer_address", buffer_address, METH_O, "buffer_address(buffer) -> (address, bytes) of contiguous memory."},
    {NULL, NULL, 0, NULL},
};

int add_linear(PyObject *module) { return PyModule_AddFunctions(module, methods); }
