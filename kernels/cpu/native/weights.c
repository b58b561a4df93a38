// Weights in pieces: read from their table, and multiplied piece by piece.
#include "weights.h"

enum { SIZE_WORDS = 2, PIECE_WORDS = sizeof(struct piece) / sizeof(int64_t) };

const struct kernels *widest_kernels(int64_t max_lanes) {
#if defined(__x86_64__)
    if (max_lanes >= 16 && use_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512_kernels;
    if (max_lanes >= 8 && use_avx2()) return &avx2_kernels;
#endif
    (void)max_lanes;
    return &portable_kernels;
}

static bool is_inside(const struct piece *piece, const struct weight *weight) {
    return piece->type >= 0 && piece->type < NUM_TYPE_NUMBERS && block_layouts[piece->type].length != 0 &&
           piece->num_rows >= 0 && piece->num_columns >= 0 &&
           piece->num_columns % block_layouts[piece->type].length == 0 && piece->first_row >= 0 &&
           piece->first_column >= 0 && piece->first_row <= weight->num_rows - piece->num_rows &&
           piece->first_column <= weight->num_columns - piece->num_columns &&
           (piece->address != 0 || piece->num_rows * piece->num_columns == 0);
}

int parse_weight(PyObject *table, struct weight *weight) {
    if (!PyBytes_Check(table) || PyBytes_GET_SIZE(table) % (Py_ssize_t)sizeof(int64_t) ||
        PyBytes_GET_SIZE(table) < (Py_ssize_t)(SIZE_WORDS * sizeof(int64_t))) {
        PyErr_SetString(PyExc_TypeError, "a weight's table of pieces expected: see kernels/weights.py");
        return -1;
    }
    const int64_t *words = (const int64_t *)PyBytes_AS_STRING(table);
    weight->num_rows = words[0];
    weight->num_columns = words[1];
    weight->num_pieces = (PyBytes_GET_SIZE(table) / (Py_ssize_t)sizeof(int64_t) - SIZE_WORDS) / PIECE_WORDS;
    weight->pieces = (const struct piece *)(words + SIZE_WORDS);
    for (int64_t i = 0; i < weight->num_pieces; i++)
        if (!is_inside(weight->pieces + i, weight)) {
            PyErr_Format(PyExc_ValueError, "piece %lld, of type %lld at address %lld, is not one of a weight of %lld rows of %lld columns",
                         (long long)i, (long long)weight->pieces[i].type, (long long)weight->pieces[i].address,
                         (long long)weight->num_rows, (long long)weight->num_columns);
            return -1;
        }
    return 0;
}

static void zero(const struct product *p, int64_t num_rows) {
    for (int64_t t = 0; t < p->num_tokens; t++) memset(p->out + t * p->out_stride, 0, (size_t)num_rows * sizeof(float));
}

void multiply_weight(const struct kernels *kernels, const struct weight *weight, const struct product *product) {
    if (weight->num_columns == 0 && !product->accumulate) zero(product, weight->num_rows);
    if (product->num_tokens == 0) return;
    for (int64_t i = 0; i < weight->num_pieces; i++) {
        const struct piece *piece = weight->pieces + i;
        if (piece->num_rows == 0 || piece->num_columns == 0) continue;
        struct product part = *product;
        part.matrix = (struct matrix){(const uint8_t *)(uintptr_t)piece->address, piece->row_bytes, piece->num_rows,
                                      piece->num_columns};
        part.x += piece->first_column;
        part.out += piece->first_row;
        part.accumulate = product->accumulate || piece->first_column > 0;
        kernels->multiply[piece->type](&part);
    }
}
