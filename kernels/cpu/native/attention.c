// Attention of a ragged batch over the paged pool of keys and values, read where they lie: the plan of a step with its
// checks, and a layer's walk over sequences, KV heads and tiles of rows. The arithmetic is in attention_body.h.
#include "arguments.h"
#include "attention.h"
#include "elementwise.h"
#include <stdio.h>

static void attend_batch(const Batch *b) {
    void (*attend_rows)(const RowTile *, Scratch *) = use_avx2() ? attend_rows_avx2 : attend_rows_portable;
    Scratch scratch;
    for (int64_t i = 0; i < b->num_sequences; i++) {
        int64_t num_queries = b->query_start[i + 1] - b->query_start[i], num_rows = num_queries * group_of(b);
        RowTile tile = {.batch = b, .table = b->block_tables + b->row_of_sequence[i] * b->table_stride};
        tile.first_token = b->query_start[i];
        tile.first_position = b->context_tokens[i] - num_queries;
        for (tile.kv_head = 0; tile.kv_head < b->num_kv_heads; tile.kv_head++)
            for (tile.first_row = 0; tile.first_row < num_rows; tile.first_row += TILE_ROWS) {
                int64_t left = num_rows - tile.first_row;
                tile.num_rows = left < TILE_ROWS ? left : TILE_ROWS;
                attend_rows(&tile, &scratch);
            }
    }
}

// Everything that layers will read from the tables is looked at here, once a step.
static void check_sequence(Plan *plan, int64_t i, Refusal *refusal) {
    const Batch *b = &plan->batch;
    const int64_t row = b->row_of_sequence[i], context = b->context_tokens[i];
    const int64_t begin = b->query_start[i], end = b->query_start[i + 1];
    if (row < 0 || row >= b->num_table_rows) {
        REFUSE(refusal, "sequence %ld: table row %ld outside the %ld running requests", i, row, b->num_table_rows);
    } else if (begin > end || begin < 0 || end > b->num_tokens) {
        REFUSE(refusal, "sequence %ld: queries [%ld, %ld) outside the %ld of the batch", i, begin, end, b->num_tokens);
    } else if (context < end - begin || context > b->table_stride * BLOCK_SLOTS) {
        REFUSE(refusal, "sequence %ld: context of %ld tokens, but %ld queries and a table for %ld tokens", i, context,
               end - begin, b->table_stride * BLOCK_SLOTS);
    } else {
        int64_t oldest = context - (end - begin) + 1 - b->window, num_ids = b->places ? b->num_places : INT32_MAX;
        const int32_t *table = b->block_tables + row * b->table_stride;
        for (int64_t j = b->window && oldest > 0 ? oldest / BLOCK_SLOTS : 0; j * BLOCK_SLOTS < context; j++) {
            if (table[j] < 0 || table[j] >= num_ids) {
                REFUSE(refusal, "sequence %ld: block %d at place %ld of table row %ld outside the %ld of the %s", i,
                       table[j], j, row, num_ids, b->places ? "table of places" : "pool");
                return;
            }
            const int64_t block = b->places ? b->places[table[j]] : table[j];
            if (block > plan->most_block) plan->most_block = block;
        }
    }
}

static void check_plan(Plan *plan, Refusal *refusal) {
    const Batch *b = &plan->batch;
    if (b->query_start[0] != 0 || b->query_start[b->num_sequences] != b->num_tokens)
        REFUSE(refusal, "query_start runs from %d to %d, but the step has %ld tokens", b->query_start[0],
               b->query_start[b->num_sequences], b->num_tokens);
    for (int64_t i = 0; i < b->num_sequences && refusal->text[0] == 0; i++) check_sequence(plan, i, refusal);
    for (int64_t t = 0; t < b->num_tokens && refusal->text[0] == 0; t++) {
        if (plan->positions[t] < 0 || plan->slots[t] < NO_SLOT)
            REFUSE(refusal, "token %ld of the batch: position %d and slot %d, of which one is below what there is", t,
                   plan->positions[t], plan->slots[t]);
        if (plan->positions[t] > plan->most_position) plan->most_position = plan->positions[t];
        if (plan->slots[t] > plan->most_slot) plan->most_slot = plan->slots[t];
    }
}

static PyObject *plan_attention(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("plan_attention", items, count, 19);
    Plan plan = {
        .batch = {
            .block_tables = address_at(&a, 0), .row_of_sequence = address_at(&a, 1), .query_start = address_at(&a, 2),
            .context_tokens = address_at(&a, 3), .places = address_at(&a, 4), .num_places = int_at(&a, 5),
            .num_sequences = int_at(&a, 8), .num_tokens = int_at(&a, 9), .num_table_rows = int_at(&a, 10),
            .table_stride = int_at(&a, 11), .num_q_heads = int_at(&a, 12), .num_kv_heads = int_at(&a, 13),
            .kv_head_begin = int_at(&a, 14), .head_dim = int_at(&a, 15), .window = int_at(&a, 16),
            .scale = float_at(&a, 17), .softcap = float_at(&a, 18),
        },
        .positions = address_at(&a, 6), .slots = address_at(&a, 7),
        .most_block = -1, .most_slot = -1, .most_position = -1,
    };
    if (a.failed) return NULL;
    Refusal refusal = {{0}};
    check_plan(&plan, &refusal);
    if (refusal.text[0]) return none_or_raise(&refusal);
    return PyBytes_FromStringAndSize((const char *)&plan, sizeof(plan));
}

static PyObject *attend(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("attend", items, count, 6);
    const Plan *plan = struct_at(&a, 0, sizeof(Plan));
    const AttendOperands *operands = struct_at(&a, 1, sizeof(AttendOperands));
    const float *k_pool = address_at(&a, 2), *v_pool = address_at(&a, 3);
    const int64_t num_blocks = int_at(&a, 4), num_pool_heads = int_at(&a, 5);
    if (a.failed) return NULL;
    Batch batch = plan->batch;
    batch.q = (const float *)operands->q;
    batch.out = (float *)operands->out;
    batch.lse = (float *)operands->lse;
    batch.q_stride = operands->q_stride;
    batch.out_stride = operands->out_stride;
    batch.lse_stride = operands->lse_stride;
    batch.k_pool = k_pool;
    batch.v_pool = v_pool;
    batch.num_blocks = num_blocks;
    batch.num_pool_heads = num_pool_heads;
    Refusal refusal = {{0}};
    if (plan->most_block >= num_blocks)
        REFUSE(&refusal, "block %ld of the step's tables is outside the pool's %ld blocks", plan->most_block, num_blocks);
    if (refusal.text[0]) return none_or_raise(&refusal);
    Py_BEGIN_ALLOW_THREADS;
    attend_batch(&batch);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *merge_partials(PyObject *self, PyObject *const *items, Py_ssize_t count) {
    (void)self;
    Arguments a = take_arguments("merge_partials", items, count, 12);
    Merge merge = {
        .parts = address_at(&a, 0), .lse = address_at(&a, 1), .out = address_at(&a, 2), .num_parts = int_at(&a, 3),
        .num_tokens = int_at(&a, 4), .num_heads = int_at(&a, 5), .head_dim = int_at(&a, 6),
        .part_stride = int_at(&a, 7), .token_stride = int_at(&a, 8), .lse_part_stride = int_at(&a, 9),
        .lse_token_stride = int_at(&a, 10), .out_stride = int_at(&a, 11),
    };
    if (a.failed) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    (use_avx2() ? merge_parts_avx2 : merge_parts_portable)(&merge);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// The core's own peak, for the bench to measure against: returns the flops done.
static PyObject *fma_rounds(PyObject *self, PyObject *rounds) {
    (void)self;
    int64_t num = PyLong_AsLongLong(rounds);
    if (num == -1 && PyErr_Occurred()) return NULL;
    float out;
    int64_t flops;
    Py_BEGIN_ALLOW_THREADS;
    flops = (use_avx2() ? spin_fma_avx2 : spin_fma_portable)(num, &out);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(flops);
}

static PyMethodDef methods[] = {
    {"plan_attention", (PyCFunction)(void (*)(void))plan_attention, METH_FASTCALL, "See kernels/cpu/attention.py."},
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, "See kernels/cpu/attention.py."},
    {"merge_partials", (PyCFunction)(void (*)(void))merge_partials, METH_FASTCALL, "See kernels/cpu/attention.py."},
    {"fma_rounds", fma_rounds, METH_O, "fma_rounds(n) -> flops: n rounds of twelve independent vector FMAs."},
    {NULL, NULL, 0, NULL},
};

int add_attention(PyObject *module) { return PyModule_AddFunctions(module, methods); }
