#include "native.h"

static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

int add_linear(PyObject *module) { return PyModule_AddFunctions(module, methods); }
