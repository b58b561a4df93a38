// What the C kernels share: how each file registers its functions, and which instruction sets the machine has.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

// Each file adds its own functions to the module; 0 or -1 with a Python error set.
int add_linear(PyObject *module);
int add_experts(PyObject *module);
int add_attention(PyObject *module);
int add_elementwise(PyObject *module);
int add_sampling(PyObject *module);
int add_collectives(PyObject *module);
int add_reshard(PyObject *module);

// True where AVX2, FMA and F16C may be used. FLIPMESH has no environment switches, so a test that wants the portable path
// calls force_portable(True) from Python.
bool use_avx2(void);
