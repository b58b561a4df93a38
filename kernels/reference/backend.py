"""The kernels in plain torch, on any device and in any compute type: the oracle of the other backends.

Correct before fast: sums are float32 or wider and rounded once, weights are made float32 for each call, and what comes
from tables is checked, for which it waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import AttentionShape, Planned, Rotary, StepInputs, own_slots
from kernels.checks import check_attended, check_inputs, check_parts, check_planes, check_rotation, check_shape
from kernels.reference import attention, experts, products, rows
from kernels.weights import Matrix, Weight


@dataclass(frozen=True, slots=True)
class ReferencePlanned:
    """A step's attention of one shape."""

    inputs: StepInputs
    shape: AttentionShape
    tables: attention.Tables
    masking: attention.Masking
    slots: Tensor


class ReferenceBackend:
    """Implements Backend."""

    name = "reference"

    norm = staticmethod(rows.rms_norm)
    gate = staticmethod(rows.gate)
    add = staticmethod(rows.add)
    soft_cap = staticmethod(rows.soft_cap)
    linear = staticmethod(products.multiply)
    route = staticmethod(experts.route)
    experts = staticmethod(experts.experts)

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.device, self.compute_dtype = device, compute_dtype

    def plan(self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None) -> ReferencePlanned:
        """See Backend."""
        check_shape(shape)
        check_inputs(inputs, places_B)
        tables = attention.Tables(
            inputs.block_tables, inputs.row_of_sequence, inputs.query_start, inputs.context_tokens, places_B
        )
        masking = attention.Masking(shape.scale, shape.window, shape.soft_cap)
        return ReferencePlanned(inputs, shape, tables, masking, own_slots(inputs.slots, places_B))

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """See Backend; the table is in one piece."""
        assert isinstance(table, Matrix), "no flip cuts the embedding"
        products.take_rows(table, ids_T, out_TH, scale=scale)

    def merge(self, parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
        """See Backend."""
        check_parts(parts_NTHD, lse_NTH, out_THD)
        attention.merge_partials(parts_NTHD, lse_NTH, out_THD)

    def rope_and_store(
        self,
        planned: Planned,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """See Backend."""
        assert isinstance(planned, ReferencePlanned), "planned by this backend"
        check_planes(planned.shape, keys, values, self.compute_dtype)
        check_rotation(planned.inputs, planned.shape, (q_THD, k_THD, v_THD), rotary, self.compute_dtype)
        rows.rope_and_store(
            (q_THD, k_THD, v_THD),
            planned.inputs.positions,
            planned.slots,
            rotary.table,
            (keys, values),
            planned.shape.kv_head_begin,
            interleaved=rotary.is_interleaved,
        )

    def attend(
        self,
        planned: Planned,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor | None = None,
    ) -> None:
        """See Backend."""
        assert isinstance(planned, ReferencePlanned), "planned by this backend"
        inputs, shape, is_part = planned.inputs, planned.shape, planned.tables.places is not None
        check_planes(shape, keys, values, self.compute_dtype)
        check_attended(inputs, shape, (q_THD, out_THD), lse_TH, is_part=is_part, dtype=self.compute_dtype)
        begin = shape.kv_head_begin
        heads = slice(begin, begin + shape.num_kv_heads)
        attention.paged_attention(q_THD, (keys, values), heads, planned.tables, planned.masking, out_THD, lse_TH)
