"""The kernels of a CUDA device, in bf16 and fp16; see Backend. Weights are plain numbers of the same format.

Nothing waits for the device but `plan`, which reads a step's contexts. What flashinfer has no kernel for is computed by
the reference backend on the same device: parts of a cache that is cut by tokens, and experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer.activation import gelu_tanh_and_mul, silu_and_mul
from flashinfer.norm import rmsnorm
from flashinfer.page import append_paged_kv_cache
from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace
from torch import Tensor
from torch.nn import functional

from kernels.backend import Activation, AttentionShape, Planned, Rotary, StepInputs
from kernels.cuda.plans import KV_LAYOUT, Planner, pages_of
from kernels.reference.backend import ReferenceBackend, ReferencePlanned
from kernels.weights import Matrix, Weight, pieces_of
from services.core.ids import BLOCK_SLOTS
from services.models.ggml_types import GgmlType

_FORMATS = {torch.float16: GgmlType.F16, torch.bfloat16: GgmlType.BF16}


@dataclass(frozen=True, slots=True)
class CudaPlanned:
    """A step's attention of one shape, where all rows are here."""

    shape: AttentionShape
    wrapper: Any
    positions: Tensor
    """[T] int32."""
    blocks: Tensor
    """[T] int32: blocks that keys and values go to."""
    slots: Tensor
    """[T] int32: places within those blocks."""
    tokens: Tensor
    """[T + 1] int32, rising from 0."""


class CudaBackend:
    """Implements Backend."""

    name = "cuda"

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        """Raises ValueError for a number format that flashinfer does not compute in."""
        if compute_dtype not in _FORMATS:
            raise ValueError(f"kernels of a CUDA device compute in float16 or bfloat16, not in {compute_dtype}")
        self.device, self.compute_dtype = device, compute_dtype
        self._reference = ReferenceBackend(device, compute_dtype)
        self._planner = Planner(device, compute_dtype)
        self._weights: dict[tuple[int, int, int, int], Tensor] = {}
        """Views of stored matrices, which keep their addresses for life: a view costs more than a small product."""
        self._vectors: dict[int, Tensor] = {}
        """Norms and biases in the compute format, by address."""
        self.route, self.experts, self.merge = self._reference.route, self._reference.experts, self._reference.merge

    def plan(
        self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None
    ) -> CudaPlanned | ReferencePlanned:
        """See Backend."""
        if places_B is not None:
            return self._reference.plan(inputs, shape, places_B)
        wrapper = self._planner.plan(pages_of(inputs), shape)
        blocks, slots = inputs.slots // BLOCK_SLOTS, inputs.slots % BLOCK_SLOTS
        tokens = torch.arange(inputs.num_tokens + 1, dtype=torch.int32, device=self.device)
        return CudaPlanned(shape, wrapper, inputs.positions, blocks, slots, tokens)

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """See Backend; the table is in one piece."""
        assert isinstance(table, Matrix), "no flip cuts the embedding"
        torch.index_select(self._matrix(table), 0, ids_T, out=out_TH)
        if scale != 1.0:
            out_TH.mul_(scale)

    def norm(self, x_TH: Tensor, weight_H: Tensor, epsilon: float, out_TH: Tensor) -> None:
        """See Backend."""
        rmsnorm(x_TH, self._vector(weight_H), epsilon, out=out_TH)

    def linear(
        self, x_TH: Tensor, weight: Weight, out_TN: Tensor, *, bias_N: Tensor | None = None, accumulate: bool = False
    ) -> None:
        """See Backend."""
        for piece in pieces_of(weight):
            rows, columns = piece.matrix.num_rows, piece.matrix.num_columns
            x = x_TH if columns == weight.num_columns else x_TH[:, piece.first_column : piece.first_column + columns]
            out = out_TN if rows == weight.num_rows else out_TN[:, piece.first_row : piece.first_row + rows]
            if accumulate or piece.first_column:
                out.addmm_(x, self._matrix(piece.matrix).T)
            else:
                torch.mm(x, self._matrix(piece.matrix).T, out=out)
        if bias_N is not None:
            out_TN += self._vector(bias_N)

    def gate(self, gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
        """See Backend."""
        if (both_T2F := _side_by_side(gate_TF, up_TF)) is not None and out_TF.data_ptr() != gate_TF.data_ptr():
            (silu_and_mul if activation is Activation.SILU else gelu_tanh_and_mul)(both_T2F, out=out_TF)
        elif activation is Activation.SILU:
            torch.mul(functional.silu(gate_TF), up_TF, out=out_TF)
        else:
            torch.mul(functional.gelu(gate_TF, approximate="tanh"), up_TF, out=out_TF)

    def add(self, x_TH: Tensor, y_TH: Tensor) -> None:
        """See Backend."""
        x_TH += y_TH

    def soft_cap(self, x_TH: Tensor, cap: float, out_TH: Tensor) -> None:
        """See Backend."""
        torch.mul(torch.tanh(x_TH.float() / cap), cap, out=out_TH)

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
        if isinstance(planned, ReferencePlanned):
            self._reference.rope_and_store(planned, q_THD, k_THD, v_THD, rotary, keys, values)
            return
        assert isinstance(planned, CudaPlanned), "planned by this backend"
        apply_rope_with_cos_sin_cache_inplace(
            planned.positions,
            q_THD.flatten(1),
            k_THD.flatten(1),
            q_THD.shape[2],
            rotary.table,
            is_neox=not rotary.is_interleaved,
        )
        heads = slice(planned.shape.kv_head_begin, planned.shape.kv_head_begin + k_THD.shape[1])
        # Each token stands for a sequence of one block, whose place in it is the token's slot.
        append_paged_kv_cache(
            k_THD,
            v_THD,
            planned.tokens[:-1],
            planned.slots,
            (keys[:, heads], values[:, heads]),
            planned.blocks,
            planned.tokens,
            planned.slots,
            KV_LAYOUT,
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
        if isinstance(planned, ReferencePlanned):
            self._reference.attend(planned, q_THD, keys, values, out_THD, lse_TH)
            return
        assert isinstance(planned, CudaPlanned), "planned by this backend"
        begin = planned.shape.kv_head_begin
        heads = slice(begin, begin + planned.shape.num_kv_heads)
        cache = (keys[:, heads], values[:, heads])
        if lse_TH is None:
            planned.wrapper.run(q_THD, cache, out=out_THD)
            return
        _, lse = planned.wrapper.run(q_THD, cache, out=out_THD, return_lse=True)
        # flashinfer's is to the base 2.
        torch.mul(lse, math.log(2.0), out=lse_TH)

    def _matrix(self, matrix: Matrix) -> Tensor:
        """[num_rows, num_columns] over the stored numbers."""
        key = (matrix.address, matrix.num_rows, matrix.num_columns, matrix.row_stride_bytes)
        if (found := self._weights.get(key)) is None:
            if matrix.ggml_type is not _FORMATS[self.compute_dtype]:
                raise ValueError(
                    f"weights of type {matrix.ggml_type.name} for products in {self.compute_dtype}: expand them to "
                    f"{_FORMATS[self.compute_dtype].name} when they are loaded"
                )
            found = self._weights[key] = matrix.stored_rows().view(self.compute_dtype)
        return found

    def _vector(self, values: Tensor) -> Tensor:
        if values.dtype is self.compute_dtype:
            return values
        if (found := self._vectors.get(values.data_ptr())) is None:
            found = self._vectors[values.data_ptr()] = values.to(self.compute_dtype)
        return found


def _side_by_side(left_TF: Tensor, right_TF: Tensor) -> Tensor | None:
    """[T, 2 F] over both, where they are the halves of one contiguous buffer."""
    num_tokens, width = left_TF.shape
    is_apart = left_TF.stride() != (2 * width, 1) or right_TF.stride() != (2 * width, 1)
    if is_apart or right_TF.data_ptr() - left_TF.data_ptr() != width * left_TF.element_size():
        return None
    return left_TF.as_strided((num_tokens, 2 * width), (2 * width, 1))
