// The module object and the choice of instruction set at run time; every kernel lives in a file of its own.
#include "native.h"

static bool portable_forced = false;

bool use_avx2(void) {
    return !portable_forced && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static PyObject *force_portable(PyObject *self, PyObject *flag) {
    (void)self;
    int truth = PyObject_IsTrue(flag);
    if (truth < 0) return NULL;
    portable_forced = truth;
    Py_RETURN_NONE;
}

static PyObject *has_avx2(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(use_avx2());
}

static PyMethodDef methods[] = {
    {"force_portable", force_portable, METH_O, "force_portable(flag): take the portable path even where AVX2 is there."},
    {"has_avx2", has_avx2, METH_NOARGS, "has_avx2() -> bool: whether the AVX2 paths are taken."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (add_linear(module) || add_experts(module) || add_attention(module) || add_elementwise(module) || add_sampling(module) ||
        add_collectives(module) || add_reshard(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
