"""The kernels of one core of the host: C over host memory, float32, on the calling thread."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Activation, AttentionShape, Planned, Rotary, StepInputs
from kernels.cpu import elementwise, experts, linear
from kernels.cpu.attention import merge_partials, paged_attention
from kernels.weights import Matrix, Weight
from services.core.ids import BLOCK_SLOTS


@dataclass(frozen=True, slots=True)
class CpuPlanned:
    """A step's attention of one shape."""

    inputs: StepInputs
    shape: AttentionShape
    places: Tensor | None
    slots: Tensor
    """[T] int32: where in this rank's planes each token's row goes, NO_SLOT for another rank's."""


class CpuBackend:
    """Implements Backend."""

    name = "cpu"
    device = torch.device("cpu")
    compute_dtype = torch.float32

    norm = staticmethod(elementwise.rms_norm)
    add = staticmethod(elementwise.add)
    soft_cap = staticmethod(elementwise.soft_cap)
    linear = staticmethod(linear.multiply)
    route = staticmethod(experts.route)
    experts = staticmethod(experts.experts)
    merge = staticmethod(merge_partials)

    def plan(self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None) -> CpuPlanned:
        """See Backend."""
        return CpuPlanned(inputs, shape, places_B, own_slots(inputs.slots, places_B))

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """See Backend; the table is in one piece."""
        assert isinstance(table, Matrix), "no flip cuts the embedding"
        linear.take_rows(table, ids_T, out_TH, scale=scale)

    def gate(self, gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
        """See Backend."""
        (elementwise.silu_mul if activation is Activation.SILU else elementwise.gelu_tanh_mul)(gate_TF, up_TF, out_TF)

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
        assert isinstance(planned, CpuPlanned), "planned by this backend"
        elementwise.rope_and_store(
            q_THD,
            k_THD,
            v_THD,
            planned.inputs.positions,
            planned.slots,
            rotary.table,
            keys,
            values,
            kv_head_begin=planned.shape.kv_head_begin,
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
        assert isinstance(planned, CpuPlanned), "planned by this backend"
        inputs, shape = planned.inputs, planned.shape
        paged_attention(
            q_THD,
            keys,
            values,
            inputs.block_tables,
            inputs.row_of_sequence,
            inputs.query_start,
            inputs.context_tokens,
            out_THD,
            kv_head_begin=shape.kv_head_begin,
            num_kv_heads=shape.num_kv_heads,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.soft_cap,
            lse_out=lse_TH,
            places=planned.places,
        )


def own_slots(slots: Tensor, places_B: Tensor | None) -> Tensor:
    """[T] int32: slots in this rank's planes, NO_SLOT for a token whose row another rank has."""
    if places_B is None:
        return slots
    place = places_B[slots // BLOCK_SLOTS]
    return torch.where(place < 0, elementwise.NO_SLOT, place * BLOCK_SLOTS + slots % BLOCK_SLOTS).to(torch.int32)
