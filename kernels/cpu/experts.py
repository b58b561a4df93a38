"""A mixture of experts on one core: routing, and the feed-forwards of the experts that this rank has.

Tokens are grouped by expert, so that an expert's weights are read once for all of its tokens; 64 tokens of one expert
are in work at once, which bounds the room a call takes. A token's experts are added in the order of their ids.

Shapes: T tokens, K experts a token, E experts, H features. Bounds, against float64: weights 1e-6 relative; the sum of
experts 1e-5 of the sum over them of |weight| times the norms of a feed-forward's products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels._native as _native
from kernels.backend import Activation
from kernels.cpu.elementwise import GATES
from kernels.weights import Weight


def route(logits_TE: Tensor, num_used: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Each token's `num_used` most probable experts, the lower id first of equal ones: int32 and float32 `[T, K]`.

    Weights are softmax over all experts, divided by their sum over the used ones with `normalise`; all NaN where a
    logit is. Raises ValueError where num_used is out of range.
    """
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= num_used <= num_experts or logits_TE.stride(1) != 1 or logits_TE.dtype != torch.float32:
        raise ValueError(
            f"float32 logits with inner stride 1 and 1 to {num_experts} experts a token expected, got "
            f"{logits_TE.dtype} strides {logits_TE.stride()} and {num_used} experts a token"
        )
    ids_TK = torch.empty((num_tokens, num_used), dtype=torch.int32)
    weights_TK = torch.empty((num_tokens, num_used))
    _native.route(
        logits_TE.data_ptr(),
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        num_tokens,
        num_experts,
        num_used,
        logits_TE.stride(0),
        normalise,
    )
    return ids_TK, weights_TK


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The weights of experts [first, first + len(gate)), tuples or lists of one weight each."""

    first: int
    gate: Sequence[Weight]
    up: Sequence[Weight]
    down: Sequence[Weight]


def run(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    local: LocalExperts,
    activation: Activation,
    out_TH: Tensor,
    *,
    accumulate: bool,
    lanes: int,
) -> None:
    """See Backend.experts; `out` must not overlap `x`, `lanes` bounds the vectors of products.

    Raises ValueError for shapes that do not fit and ids below 0, before anything is written.
    """
    num_tokens, num_used = ids_TK.shape
    if (
        ids_TK.dtype != torch.int32
        or not x_TH.dtype == weights_TK.dtype == out_TH.dtype == torch.float32
        or not (ids_TK.is_contiguous() and weights_TK.is_contiguous())
        or weights_TK.shape != ids_TK.shape
        or x_TH.shape != out_TH.shape
        or x_TH.shape[0] != num_tokens
        or not x_TH.stride(1) == out_TH.stride(1) == 1
    ):
        raise ValueError(
            f"experts cannot take x {tuple(x_TH.shape)} {x_TH.stride()}, out {tuple(out_TH.shape)} {out_TH.stride()}, "
            f"ids {ids_TK.dtype} {tuple(ids_TK.shape)}, weights {tuple(weights_TK.shape)}: float32 rows of one shape, "
            "and int32 ids with a weight each, expected"
        )
    _native.experts(
        x_TH.data_ptr(),
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        out_TH.data_ptr(),
        num_tokens,
        num_used,
        local.first,
        x_TH.shape[1],
        x_TH.stride(0),
        out_TH.stride(0),
        GATES[activation],
        accumulate,
        local.gate,
        local.up,
        local.down,
        lanes,
    )
