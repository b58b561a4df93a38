// Penalties and biases: few ids of a row at a time.
#pragma once
#include "native.h"

extern PyMethodDef penalty_methods[];
