"""Attention over the paged pool of keys and values, for a ragged batch of prompts' chunks and decode rows.

A plan reads a step's tables once and checks them; a layer hands over its tensors. The pool and the request table are
read where they lie, never gathered, copied or allocated; which blocks a request owns is not decided here.

Shapes: T tokens of the batch, S sequences, Hq query heads and Hkv KV heads of this share, D head dimension, B blocks of
the pool, P KV heads of the pool, N parts. Slots past a sequence's context are never read as values. Query i of n of a
sequence stands at position context - n + i and sees positions up to its own, and only the last `window` of them
(itself included) where the shape says so; a soft cap c bends scores to c * tanh(score / c).

Where the cache is cut by tokens, each rank attends over the blocks it has (`places`), writes its part and the natural
log of the sum of e^score, and `merge` joins the parts of all ranks; a query that sees no block here gets zeros and
-inf.

Bound: float32 sums, e^x within 2e-7 relative; against float64, the error of a row of `out` is under
2e-6 + 1e-7 * scale * max |q| * max |k| of its largest value (norms of heads; a score carries its products' rounding,
and the error of a score is the relative error of its weight); merged from parts, twice that and 1e-7 * max |lse|.
Floor: a decode step reads every visible key and value once, at 8 * D bytes a token and KV head; a chunk takes 4 * D
flops a (query head, visible key). One thread: ranks are the parallelism.
"""

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels._native as _native
from kernels.backend import AttentionShape, Rotary, StepInputs, own_slots
from kernels.checks import check_attended, check_inputs, check_parts, check_planes, check_rotation, check_shape

_ATTEND = struct.Struct("3Q3q")
_ROPE = struct.Struct("4Q7q")


@dataclass(slots=True, eq=False)
class CpuPlanned:
    """A step's attention of one shape: the tables checked, and what layers have in common as C reads it."""

    inputs: StepInputs
    shape: AttentionShape
    places: Tensor | None
    slots: Tensor
    """[T] int32: where in this rank's planes each token's row goes, NO_SLOT for another rank's."""
    native: bytes
    """C's Plan; its addresses are those of the tensors above."""
    planes: tuple[Tensor, Tensor] | None = None
    """The last layer's, as they were checked; with their addresses and counts below."""
    plane_arguments: tuple[int, int, int, int] = (0, 0, 0, 0)
    operands: dict[tuple[int, ...], tuple[bytes, tuple[object, ...]]] = field(default_factory=dict)
    """By the ids of the tensors, which are kept so that an id stays theirs."""


def plan(inputs: StepInputs, shape: AttentionShape, places: Tensor | None) -> CpuPlanned:
    """Raises ValueError for tables, contexts, positions or slots that do not fit, before any layer has run."""
    check_shape(shape)
    check_inputs(inputs, places)
    slots = own_slots(inputs.slots, places)
    native = _native.plan_attention(
        inputs.block_tables.data_ptr(),
        inputs.row_of_sequence.data_ptr(),
        inputs.query_start.data_ptr(),
        inputs.context_tokens.data_ptr(),
        0 if places is None else places.data_ptr(),
        0 if places is None else places.numel(),
        inputs.positions.data_ptr(),
        slots.data_ptr(),
        inputs.row_of_sequence.numel(),
        inputs.num_tokens,
        *inputs.block_tables.shape,
        shape.num_heads,
        shape.num_kv_heads,
        shape.kv_head_begin,
        shape.head_dim,
        shape.window or 0,
        shape.scale,
        shape.soft_cap or 0.0,
    )
    return CpuPlanned(inputs, shape, places, slots, native)


def take_planes(planned: CpuPlanned, keys: Tensor, values: Tensor) -> None:
    """Checks one layer's planes and keeps them for its other call."""
    check_planes(planned.shape, keys, values, torch.float32)
    planned.plane_arguments = (keys.data_ptr(), values.data_ptr(), keys.shape[0], keys.shape[1])
    planned.planes = (keys, values)


def rope_operands(planned: CpuPlanned, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rotary: Rotary) -> bytes:
    """C's RopeOperands; ValueError where the tensors do not fit the plan."""
    check_rotation(planned.inputs, planned.shape, (q_THD, k_THD, v_THD), rotary, torch.float32)
    table = rotary.table
    return _ROPE.pack(
        q_THD.data_ptr(),
        k_THD.data_ptr(),
        v_THD.data_ptr(),
        table.data_ptr(),
        q_THD.stride(0),
        k_THD.stride(0),
        v_THD.stride(0),
        k_THD.shape[1],
        table.shape[1],
        table.shape[0],
        rotary.is_interleaved,
    )


def attend_operands(planned: CpuPlanned, q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor | None) -> bytes:
    """C's AttendOperands; ValueError where the tensors do not fit the plan."""
    is_part = planned.places is not None
    check_attended(planned.inputs, planned.shape, (q_THD, out_THD), lse_TH, is_part=is_part, dtype=torch.float32)
    lse, lse_stride = (0, 0) if lse_TH is None else (lse_TH.data_ptr(), lse_TH.stride(0))
    return _ATTEND.pack(q_THD.data_ptr(), out_THD.data_ptr(), lse, q_THD.stride(0), out_THD.stride(0), lse_stride)


def merge_partials(parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
    """Writes the attention over all keys from its parts over some each: `sum(part * e^lse) / sum(e^lse)`.

    `parts` float32 `[N, T, Hq, D]` and `lse` float32 `[N, T, Hq]` as `attend` writes them, part and token strides
    free; `out` float32 `[T, Hq, D]`, token stride free, apart from the parts. NaN where no part saw a key, since every
    token sees itself: somebody's blocks are missing. Raises ValueError for shapes that do not fit.
    """
    check_parts(parts_NTHD, lse_NTH, out_THD)
    if parts_NTHD.dtype != torch.float32:
        raise ValueError(f"parts of float32 expected, got {parts_NTHD.dtype}")
    num_parts, num_tokens, num_heads, head_dim = parts_NTHD.shape
    _native.merge_partials(
        parts_NTHD.data_ptr(),
        lse_NTH.data_ptr(),
        out_THD.data_ptr(),
        num_parts,
        num_tokens,
        num_heads,
        head_dim,
        *parts_NTHD.stride()[:2],
        *lse_NTH.stride()[:2],
        out_THD.stride(0),
    )
