#include "native.h"

static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

int add_attention(PyObject *module) { return PyModule_AddFunctions(module, methods); }
