"""The kernels of one core of the host: C over host memory, float32, on the calling thread.

A model calls the same kernels on the same activations in every layer, so that what C must know of them is checked and
packed the first time a step uses them (`plan` begins a step) and looked up after that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels._native as _native
from kernels.backend import Activation, AttentionShape, Planned, Rotary, StepInputs
from kernels.cpu import attention, elementwise, experts, linear
from kernels.cpu.attention import CpuPlanned
from kernels.cpu.linear import WIDEST_LANES
from kernels.weights import Matrix, Weight

Operands = dict[tuple[int, ...], tuple[bytes, tuple[Tensor, ...]]]
"""What C reads of tensors, by their ids; the tensors are kept, so that an id stays theirs."""


class CpuBackend:
    """Implements Backend. Use from one thread."""

    name = "cpu"
    device = torch.device("cpu")
    compute_dtype = torch.float32

    soft_cap = staticmethod(elementwise.soft_cap)
    route = staticmethod(experts.route)
    merge = staticmethod(attention.merge_partials)

    def __init__(self, max_lanes: int = WIDEST_LANES) -> None:
        """`max_lanes` bounds the vectors of products, for tests and benches."""
        self._max_lanes = max_lanes
        self._products: Operands = {}
        self._norms: Operands = {}
        self._pairs: Operands = {}

    def plan(self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None) -> CpuPlanned:
        """See Backend."""
        for operands in (self._products, self._norms, self._pairs):
            operands.clear()
        return attention.plan(inputs, shape, places_B)

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """See Backend; the table is in one piece."""
        assert isinstance(table, Matrix), "no flip cuts the embedding"
        linear.take_rows(table, ids_T, out_TH, scale=scale, max_lanes=self._max_lanes)

    def linear(
        self, x_TH: Tensor, weight: Weight, out_TN: Tensor, *, bias_N: Tensor | None = None, accumulate: bool = False
    ) -> None:
        """See Backend."""
        known = self._products.get((id(x_TH), id(out_TN)))
        if known is None:
            known = linear.product_operands(x_TH, out_TN), (x_TH, out_TN)
            _keep(self._products, known)
        bias = 0 if bias_N is None else linear.bias_address(bias_N, weight)
        _native.linear_multiply(weight.piece_table, known[0], bias, accumulate, self._max_lanes)

    def norm(self, x_TH: Tensor, weight_H: Tensor, epsilon: float, out_TH: Tensor) -> None:
        """See Backend."""
        known = self._norms.get((id(x_TH), id(out_TH)))
        if known is None:
            known = elementwise.norm_operands(x_TH, out_TH), (x_TH, out_TH)
            _keep(self._norms, known)
        _native.norm(known[0], elementwise.norm_weights(weight_H, x_TH), epsilon)

    def gate(self, gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
        """See Backend."""
        self._combine(gate_TF, up_TF, out_TF, elementwise.GATES[activation])

    def add(self, x_TH: Tensor, y_TH: Tensor) -> None:
        """See Backend."""
        self._combine(x_TH, y_TH, x_TH, elementwise.ADD)

    def _combine(self, x: Tensor, y: Tensor, out: Tensor, operation: int) -> None:
        known = self._pairs.get((id(x), id(y), id(out)))
        if known is None:
            known = elementwise.pair_operands(x, y, out), (x, y, out)
            _keep(self._pairs, known)
        _native.combine(known[0], operation)

    def experts(
        self,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        first_expert: int,
        gate: Sequence[Weight],
        up: Sequence[Weight],
        down: Sequence[Weight],
        activation: Activation,
        out_TH: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        """See Backend."""
        local = experts.LocalExperts(first_expert, gate, up, down)
        experts.run(x_TH, ids_TK, weights_TK, local, activation, out_TH, accumulate=accumulate, lanes=self._max_lanes)

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
        attention.take_planes(planned, keys, values)
        known = planned.operands.get((id(q_THD), id(k_THD), id(v_THD), id(rotary)))
        if known is None:
            known = attention.rope_operands(planned, q_THD, k_THD, v_THD, rotary), (q_THD, k_THD, v_THD, rotary)
            planned.operands[tuple(map(id, known[1]))] = known
        _native.rope_and_store(planned.native, known[0], *planned.plane_arguments)

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
        planes = planned.planes
        if planes is None or planes[0] is not keys or planes[1] is not values:
            attention.take_planes(planned, keys, values)
        known = planned.operands.get((id(q_THD), id(out_THD), id(lse_TH)))
        if known is None:
            known = attention.attend_operands(planned, q_THD, out_THD, lse_TH), (q_THD, out_THD, lse_TH)
            planned.operands[tuple(map(id, known[1]))] = known
        _native.attend(planned.native, known[0], *planned.plane_arguments)


MAX_KNOWN = 64
"""Of tensors that are used together, without a plan between; a step of a model has less than ten."""


def _keep(operands: Operands, known: tuple[bytes, tuple[Tensor, ...]]) -> None:
    if len(operands) >= MAX_KNOWN:
        operands.clear()
    operands[tuple(map(id, known[1]))] = known
