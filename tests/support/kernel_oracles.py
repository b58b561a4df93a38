"""What the kernels between products shall compute, in float64 and by the plainest formula."""

import torch
from torch import Tensor

from kernels.backend import Activation
from services.core.ids import BLOCK_SLOTS


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dimension."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up."""
    gate = gate.double()
    if activation is Activation.SILU:
        return torch.nn.functional.silu(gate) * up.double()
    # As x * sigmoid(2u): torch's own 1 + tanh(u) loses all digits of results near 0.
    return gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up.double()


def turned(x_THD: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool) -> Tensor:
    """The rotation of one tensor."""
    rotary_dim = cos_sin.shape[1]
    cosine, sine = cos_sin[positions.long()].double()[:, None].chunk(2, dim=-1)
    head = x_THD[..., :rotary_dim].double()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    both = (a * cosine - b * sine, b * cosine + a * sine)
    rotated = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((rotated, x_THD[..., rotary_dim:].double()), -1)


def store(rows_THD: Tensor, slots: Tensor, pool: Tensor, kv_head_begin: int) -> None:
    """Writes rows into the slots of one pool, by indexing."""
    slots = slots.long()
    pool[slots // BLOCK_SLOTS, kv_head_begin : kv_head_begin + rows_THD.shape[1], slots % BLOCK_SLOTS] = rows_THD
