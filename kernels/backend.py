"""What a rank computes with: one interface, an implementation for each kind of device, planned once a step.

A model is written against `Backend` and never asks where a tensor lies. `plan` turns a step's inputs into what
attention needs, once for each `AttentionShape` that the model has; the other calls run once a layer. Every call
enqueues: it may return before a device has done it, and nothing in it waits for a device. Tensors keep their addresses
between steps, so that a device may capture a step and replay it.

Implementations: `cpu` (C kernels over host memory), `reference` (plain torch on any device: the oracle of the others).

Shapes: T tokens, S rows (sequences), N sampled rows, R places of the request table, B blocks of a table, H features,
F columns of a feed-forward, Hq and Hkv this share's heads, D head dimension, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, device, dtype

from kernels.weights import Weight as Weight
from services.core.ids import BLOCK_SLOTS

NOT_HERE = -1
"""The place of a block whose rows another rank has."""
NO_SLOT = -1
"""Of a token whose row another rank has: it is turned and not stored."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step's kernels need to know of its rows; int32 unless said, on the backend's device."""

    num_tokens: int
    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T] where each token's key and value go: block id * 16 + place in the block."""
    block_tables: Tensor
    """[R, B] of the request table."""
    row_of_sequence: Tensor
    """[S] into block_tables."""
    query_start: Tensor
    """[S + 1]"""
    context_tokens: Tensor
    """[S] tokens visible to each row's last token."""
    sampled_tokens: Tensor
    """[N] indexes into T of the tokens whose logits are wanted; int64."""

    @property
    def num_sampled(self) -> int:
        """N."""
        return self.sampled_tokens.numel()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One kind of attention that a model's layers have: what a plan is made for, beside the step."""

    num_heads: int
    """Query heads of this share."""
    num_kv_heads: int
    kv_head_begin: int
    """Place in the pool's planes of this share's first KV head."""
    head_dim: int
    scale: float
    """Of the scores, before the soft cap."""
    window: int | None = None
    """Sliding attention: a token sees itself and the window - 1 before it. None: all before it."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""


def own_slots(slots_T: Tensor, places_B: Tensor | None) -> Tensor:
    """[T] int32: the slots as places in this rank's planes, NO_SLOT for another rank's rows."""
    if places_B is None:
        return slots_T
    place = places_B[slots_T // BLOCK_SLOTS]
    return torch.where(place == NOT_HERE, NO_SLOT, place * BLOCK_SLOTS + slots_T % BLOCK_SLOTS).to(torch.int32)


class Activation(Enum):
    """Of a gated feed-forward's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Planned(Protocol):
    """One step's attention of one shape, ready to run in every layer; made by a backend, opaque to the model."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions turn heads."""

    table: Tensor
    """[positions, rotary dim] cosines then sines, float32."""
    is_interleaved: bool


class Backend(Protocol):
    """The kernels of one device. Nothing here allocates what lives longer than a step."""

    @property
    def name(self) -> str:
        """`cpu`, `cuda` or `reference`."""

    @property
    def device(self) -> device:
        """Where all tensors lie."""

    @property
    def compute_dtype(self) -> dtype:
        """Of activations and of the KV cache; sums and softmax are float32 or wider."""

    def plan(self, inputs: StepInputs, shape: AttentionShape, places_B: Tensor | None = None) -> Planned:
        """Makes one step's attention of one shape ready; `places_B`: where in a plane each block lies, -1: not here."""

    def embed(self, table: Weight, ids_T: Tensor, out_TH: Tensor, scale: float = 1.0) -> None:
        """out = scale * the table's rows of these ids."""

    def norm(self, x_TH: Tensor, weight_H: Tensor, epsilon: float, out_TH: Tensor) -> None:
        """Root-mean-square norm of each row; `out` may be `x`. Also of [T, heads, D] views, head by head."""

    def linear(
        self, x_TH: Tensor, weight: Weight, out_TN: Tensor, *, bias_N: Tensor | None = None, accumulate: bool = False
    ) -> None:
        """out = x @ W^T (+ bias), or out += with `accumulate`."""

    def gate(self, gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
        """out = activation(gate) * up; `out` may be `gate`."""

    def add(self, x_TH: Tensor, y_TH: Tensor) -> None:
        """x += y."""

    def soft_cap(self, x_TH: Tensor, cap: float, out_TH: Tensor) -> None:
        """out = cap * tanh(x / cap); `out` may be `x`."""

    def route(self, logits_TE: Tensor, num_used: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Each token's most probable experts, int32 ids and weights [T, K]; the lower id first of equal ones.

        Weights are softmax over all experts, divided by their sum over the used ones with `normalise`.
        """

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
        """out = sum over a token's local experts of weight * down(activation(gate(x)) * up(x)), or out +=.

        The weights are those of experts [first_expert, first_expert + len(gate)), each a tuple or a list made once; a
        token's other experts are other ranks', which add theirs by the sum over ranks.
        """

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
        """Turns queries and keys in place by position and writes keys and values to this layer's planes."""

    def attend(
        self,
        planned: Planned,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor | None = None,
    ) -> None:
        """Causal attention over this layer's planes; `lse_TH` takes each query's log-sum-exp where parts are merged."""

    def merge(self, parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
        """Joins partial attention results of several ranks by their log-sum-exp (N ranks)."""
