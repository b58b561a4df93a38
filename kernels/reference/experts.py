"""A mixture of experts, expert by expert; see kernels.cpu.experts for shapes and order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import Activation
from kernels.reference import rows
from kernels.reference.products import multiply
from kernels.weights import Weight


def route(logits_TE: Tensor, num_used: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights `[T, K]` of the logits' type. Raises ValueError where num_used is out of range."""
    num_experts = logits_TE.shape[1]
    if not 1 <= num_used <= num_experts:
        raise ValueError(f"1 to {num_experts} experts a token expected, got {num_used}")
    weights_TE = logits_TE.double().softmax(-1)
    # A stable sort: of equal ones the lower id is first, which topk does not promise.
    ids_TK = torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices[:, :num_used]
    weights_TK = weights_TE.gather(1, ids_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK.to(torch.int32), weights_TK.to(logits_TE.dtype)


def experts(
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
    """out = weighted sum of a token's local experts, or out += that; the sum is float32 and rounded once."""
    if not len(gate) == len(up) == len(down):
        raise ValueError(f"{len(gate)} gates, {len(up)} ups and {len(down)} downs: one of each expert expected")
    if bool((ids_TK < 0).any()):
        raise ValueError("an expert below 0: ids are 0 or more")
    sum_TH = out_TH.float() if accumulate else torch.zeros_like(out_TH, dtype=torch.float32)
    for local, matrices in enumerate(zip(gate, up, down, strict=True)):
        tokens, places = (ids_TK == first_expert + local).nonzero().unbind(1)
        if len(tokens):
            result = _feed_forward(x_TH[tokens], *matrices, activation)
            sum_TH.index_add_(0, tokens, result * weights_TK[tokens, places].float()[:, None])
    out_TH.copy_(sum_TH)


def _feed_forward(x_TH: Tensor, gate: Weight, up: Weight, down: Weight, activation: Activation) -> Tensor:
    """[T, H] float32; the hidden features are rounded to x's type, as a backend's buffers would."""
    gated_TF, up_TF = (x_TH.new_empty((len(x_TH), weight.num_rows)) for weight in (gate, up))
    multiply(x_TH, gate, gated_TF)
    multiply(x_TH, up, up_TF)
    rows.gate(gated_TF, up_TF, gated_TF, activation)
    out_TH = x_TH.new_empty((len(x_TH), down.num_rows), dtype=torch.float32)
    multiply(gated_TF, down, out_TH)
    return out_TH
