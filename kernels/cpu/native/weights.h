// A weight as kernels/weights.py describes it to C: its size, then its pieces; and the product with one.
#pragma once
#include "native.h"
#include "quant.h"

struct piece {
    int64_t type, address, row_bytes, num_rows, num_columns, first_row, first_column;
};

// x and out of a product; a bytes object in Python, made by kernels/cpu/linear.py.
struct product_operands {
    uint64_t x, out;
    int64_t num_tokens, num_columns, num_rows, x_stride, out_stride;
};

// Views into a bytes object, which must outlive it.
struct weight {
    int64_t num_rows, num_columns, num_pieces;
    const struct piece *pieces;
};

// The kernels of the widest vectors there are, of at most so many floats.
const struct kernels *widest_kernels(int64_t max_lanes);

// 0, or -1 with a Python error set.
int parse_weight(PyObject *table, struct weight *weight);

// `product` says all but the matrix: out (+)= x @ weight^T. Without the GIL.
void multiply_weight(const struct kernels *kernels, const struct weight *weight, const struct product *product);
