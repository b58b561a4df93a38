"""The kernels in plain torch, on any device and in any compute type: the oracle of the other backends.

Correct before fast: sums are float32 or wider and rounded once, weights are made float32 for each call, and what comes
from tables is checked, for which it waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import AttentionShape, Planned, Rotary, StepInputs
from kernels.reference import attention, experts, products, rows
from kernels.weights import Matrix, Weight
from services.core.ids import BLOCK_SLOTS


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
    soft_cap = staticmethod(rows.soft_cap)
    linear = staticmethod(products.multiply)
    route = staticmethod(experts.route)
    experts = staticmethod(experts.experts)
    merge = staticmethod(attention.merge_partials)

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.device, self.compute_dtype = device, compute_dtype

    def plan(self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None) -> ReferencePlanned:
        """See Backend."""
        tables = attention.Tables(
            inputs.block_tables, inputs.row_of_sequence, inputs.query_start, inputs.context_tokens, places_B
        )
        masking = attention.Masking(shape.scale, shape.window, shape.soft_cap)
        return ReferencePlanned(inputs, shape, tables, masking, _own_slots(inputs.slots, places_B))

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """See Backend; the table is in one piece."""
        assert isinstance(table, Matrix), "no flip cuts the embedding"
        products.take_rows(table, ids_T, out_TH, scale=scale)

    def add(self, x_TH: Tensor, y_TH: Tensor) -> None:
        """See Backend."""
        x_TH += y_TH

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
        begin = planned.shape.kv_head_begin
        heads = slice(begin, begin + planned.shape.num_kv_heads)
        attention.paged_attention(q_THD, (keys, values), heads, planned.tables, planned.masking, out_THD, lse_TH)


def _own_slots(slots: Tensor, places_B: Tensor | None) -> Tensor:
    if places_B is None:
        return slots
    place = places_B[slots // BLOCK_SLOTS]
    return torch.where(place < 0, rows.NO_SLOT, place * BLOCK_SLOTS + slots % BLOCK_SLOTS).to(torch.int32)
