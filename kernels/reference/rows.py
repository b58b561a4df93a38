"""Norms, gated activations and rotary positions; see kernels.cpu.elementwise for shapes and bounds.

Sums of a norm and the cubic of GELU are taken in float64, as their bounds ask.
"""

import torch
from torch import Tensor

from kernels.backend import NO_SLOT, Activation
from services.core.ids import BLOCK_SLOTS


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Over the last dimension; `out` may be `x`. ValueError where shapes differ."""
    _check_same(x, out)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"{x.shape[-1]} weights expected for x {tuple(x.shape)}, got {list(weight.shape)} weights")
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * scale * weight.double())


def soft_cap(x: Tensor, cap: float, out: Tensor) -> None:
    """out = cap * tanh(x / cap)."""
    if not cap > 0:
        raise ValueError(f"a soft cap of {cap}: above 0 expected")
    _check_same(x, out)
    out.copy_(cap * torch.tanh(x.double() / cap))


def add(x_TH: Tensor, y_TH: Tensor) -> None:
    """x += y."""
    _check_same(x_TH, y_TH)
    x_TH += y_TH


def _check_same(x: Tensor, other: Tensor) -> None:
    if other.shape != x.shape or other.device != x.device:
        raise ValueError(f"{tuple(x.shape)} on {x.device} expected, got {tuple(other.shape)} on {other.device}")


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = gate * sigmoid(gate) * up."""
    wide = gate.double()
    # 0 where e^-gate is beyond float32, as in C: the product would be a subnormal number or nothing.
    out.copy_(torch.where(wide < -88.0, 0.0, wide * torch.sigmoid(wide)) * up.double())


def gelu_tanh_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = gelu(gate) * up, in the form that keeps its digits near 0."""
    wide = gate.double()
    out.copy_(wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)) * up.double())


def gate(gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
    """out = activation(gate) * up."""
    _check_same(gate_TF, up_TF)
    _check_same(gate_TF, out_TF)
    (silu_mul if activation is Activation.SILU else gelu_tanh_mul)(gate_TF, up_TF, out_TF)


def rope_and_store(
    qkv_THD: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    pools: tuple[Tensor, Tensor],
    kv_head_begin: int,
    *,
    interleaved: bool,
) -> None:
    """Turns q and k in place, then writes k and v; ValueError for a place out of range, before anything is written."""
    q_THD, k_THD, v_THD = qkv_THD
    end, num_pool_heads = kv_head_begin + k_THD.shape[1], pools[0].shape[1]
    if end > num_pool_heads:
        raise ValueError(f"KV heads [{kv_head_begin}, {end}) outside the pool's {num_pool_heads}")
    _check_places("position", positions, 0, len(cos_sin), "rotary table")
    _check_places("slot", slots, NO_SLOT, len(pools[0]) * BLOCK_SLOTS, "pool")
    _rotate(q_THD, positions, cos_sin, interleaved=interleaved)
    _rotate(k_THD, positions, cos_sin, interleaved=interleaved)
    is_stored = slots != NO_SLOT
    own_slots = slots[is_stored].long()
    for rows_THD, pool in zip((k_THD, v_THD), pools, strict=True):
        _store(rows_THD[is_stored], own_slots, pool, kv_head_begin)


def _rotate(x_THD: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool) -> None:
    rotary_dim = cos_sin.shape[1]
    cosine, sine = cos_sin.index_select(0, positions.long())[:, None].chunk(2, dim=-1)
    head = x_THD[..., :rotary_dim]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    turned_a, turned_b = a * cosine - b * sine, b * cosine + a * sine
    a.copy_(turned_a)
    b.copy_(turned_b)


def _check_places(what: str, values_T: Tensor, least: int, limit: int, where: str) -> None:
    for token in ((values_T < least) | (values_T >= limit)).nonzero().flatten()[:1].tolist():
        raise ValueError(f"token {token} of the batch: {what} {int(values_T[token])} outside the {where}'s {limit}")


def _store(rows_THD: Tensor, slots_T: Tensor, pool: Tensor, kv_head_begin: int) -> None:
    heads = torch.arange(kv_head_begin, kv_head_begin + rows_THD.shape[1], device=pool.device)
    pool.index_put_(((slots_T // BLOCK_SLOTS)[:, None], heads[None], (slots_T % BLOCK_SLOTS)[:, None]), rows_THD)
