// Arguments of METH_FASTCALL entries by index: addresses and sizes as Python integers; shapes are the Python side's to
// check.
#pragma once
#include "native.h"

typedef struct {
    PyObject *const *items;
    bool failed; // a Python error is set
} Arguments;

static inline Arguments take_arguments(const char *name, PyObject *const *items, Py_ssize_t count,
                                       Py_ssize_t expected) {
    if (count == expected) return (Arguments){items, false};
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, count);
    return (Arguments){items, true};
}

static inline int64_t int_at(Arguments *arguments, int index) {
    if (arguments->failed) return 0;
    int64_t value = PyLong_AsLongLong(arguments->items[index]);
    if (value == -1 && PyErr_Occurred()) arguments->failed = true;
    return value;
}

static inline void *address_at(Arguments *arguments, int index) {
    if (arguments->failed) return NULL;
    void *address = PyLong_AsVoidPtr(arguments->items[index]);
    if (address == NULL && PyErr_Occurred()) arguments->failed = true;
    return address;
}

// A struct that Python keeps as a bytes object; it lives as long as the argument.
static inline const void *struct_at(Arguments *arguments, int index, size_t num_bytes) {
    if (arguments->failed) return NULL;
    PyObject *object = arguments->items[index];
    if (PyBytes_Check(object) && (size_t)PyBytes_GET_SIZE(object) == num_bytes) return PyBytes_AS_STRING(object);
    PyErr_Format(PyExc_TypeError, "argument %d: a bytes object of %zu bytes expected", index, num_bytes);
    arguments->failed = true;
    return NULL;
}

static inline float float_at(Arguments *arguments, int index) {
    if (arguments->failed) return 0;
    double value = PyFloat_AsDouble(arguments->items[index]);
    if (value == -1.0 && PyErr_Occurred()) arguments->failed = true;
    return (float)value;
}

// A refusal found with the GIL released, raised when it is held again.
typedef struct {
    char text[200]; // empty: none
} Refusal;

#define REFUSE(refusal, ...) snprintf((refusal)->text, sizeof(refusal)->text, __VA_ARGS__)

static inline PyObject *none_or_raise(const Refusal *refusal) {
    if (refusal->text[0] == 0) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, refusal->text);
    return NULL;
}
