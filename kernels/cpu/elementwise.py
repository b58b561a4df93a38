"""Norms, gated activations, additions and rotary positions: what runs between the matrix products of a layer.

Each kernel is one pass over rows that fit the first-level cache; none allocates, and none but `rope_and_store` writes a
pool. Inputs and outputs are float32 with inner stride 1; rows may be apart (parts of a fused product are taken as they
are), and an output may be an input of the same row.

Shapes: T tokens, H hidden width, F feed-forward width, Hq and Hkv local query and KV heads, D head dimension, B blocks,
P KV heads of the pool. Bounds, against float64: norms 1e-6 relative, SiLU 1e-6 relative (0 below -88), GELU 5e-7 of
|gate * up| (its tail multiplies the rounding of its cubic), rotations 1e-6 of the pair's length.
"""

import torch
from torch import Tensor

import kernels._native as _native
from kernels.cpu import paths
from kernels.reference import rows as torch_rows

_SILU, _GELU_TANH, _ADD = range(3)
NO_SLOT = torch_rows.NO_SLOT
"""Of a token whose row another rank has."""
_TORCH_GATES = (torch_rows.silu_mul, torch_rows.gelu_tanh_mul)


def _rows(x: Tensor, like: Tensor) -> int:
    """The row stride of a `[rows, width]` tensor, refused where its shape differs or its columns are apart."""
    row_stride, column_stride = x.stride()
    if x.shape != like.shape or column_stride != 1:
        raise ValueError(f"rows of {tuple(like.shape)} with inner stride 1 expected, got {tuple(x.shape)} {x.stride()}")
    return row_stride


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, over each row of [T, H] or each head of [T, heads, D].

    Raises ValueError where shapes differ.
    """
    if x.shape != out.shape or weight.shape != x.shape[-1:] or x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(
            f"a norm of {list(weight.shape)} weights over the last dimension of x and out, with inner stride 1, "
            f"expected; got x {tuple(x.shape)} {x.stride()} and out {tuple(out.shape)} {out.stride()}"
        )
    if paths.takes_torch(x):
        torch_rows.rms_norm(x, weight, eps, out)
        return
    if x.dim() == 2:
        num_tokens, width = x.shape
        rows = (num_tokens, 1, width, x.stride(0), 0, out.stride(0), 0)
    else:
        rows = (*x.shape, *x.stride()[:2], *out.stride()[:2])
    _native.norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows, eps)


def soft_cap(x: Tensor, cap: float, out: Tensor) -> None:
    """out = cap * tanh(x / cap); `out` may be `x`. ValueError where shapes differ or the cap is not above 0."""
    if not cap > 0:
        raise ValueError(f"a soft cap of {cap}: above 0 expected")
    if paths.takes_torch(x):
        torch_rows.soft_cap(x, cap, out)
        return
    num_rows, width = x.shape
    _native.soft_cap(x.data_ptr(), out.data_ptr(), num_rows, width, _rows(x, out), _rows(out, x), cap)


def _combine(x: Tensor, y: Tensor, out: Tensor, operation: int) -> None:
    num_rows, width = x.shape
    strides = (_rows(x, out), _rows(y, x), _rows(out, x))
    if paths.takes_torch(x):
        if operation == _ADD:
            out.copy_(x + y)
        else:
            _TORCH_GATES[operation](x, y, out)
        return
    _native.combine(x.data_ptr(), y.data_ptr(), out.data_ptr(), num_rows, width, *strides, operation)


def silu_mul(gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor) -> None:
    """out = gate * sigmoid(gate) * up. ValueError where shapes differ."""
    _combine(gate_TF, up_TF, out_TF, _SILU)


def gelu_tanh_mul(gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor) -> None:
    """out = gelu(gate) * up with GELU's tanh form. ValueError where shapes differ."""
    _combine(gate_TF, up_TF, out_TF, _GELU_TANH)


def add(x_TH: Tensor, y_TH: Tensor) -> None:
    """x += y in place. ValueError where shapes differ."""
    _combine(x_TH, y_TH, x_TH, _ADD)


def rope_and_store(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    kv_head_begin: int,
    interleaved: bool,
) -> None:
    """Rotates q `[T, Hq, D]` and k `[T, Hkv, D]` in place, then writes k and v into the pools' slots.

    `positions` and `slots` are int32 `[T]`; `cos_sin` is `rope_table`'s, whose width is the rotated part of a head;
    `interleaved` pairs (2i, 2i + 1), else (i, i + half). Pools are `[B, P, 16, D]`, contiguous: token t goes to block
    slots[t] // 16, heads from `kv_head_begin` on, and nowhere where its slot is `NO_SLOT`. Two tokens must not share a
    slot. Raises ValueError for shapes that do not fit and for a position or slot out of range, before anything is
    written.
    """
    num_tokens, num_q_heads, head_dim = q_THD.shape
    num_kv_heads = k_THD.shape[1]
    num_blocks, num_pool_heads, _, pool_dim = k_pool.shape
    max_positions, rotary_dim = cos_sin.shape
    q_strides, k_strides, v_strides = q_THD.stride(), k_THD.stride(), v_THD.stride()
    if (
        k_THD.shape != v_THD.shape
        or k_THD.shape[0] != num_tokens
        or positions.numel() != num_tokens
        or slots.numel() != num_tokens
        or not positions.dtype == slots.dtype == torch.int32
        or pool_dim != head_dim
        or not (k_pool.is_contiguous() and v_pool.is_contiguous())
        or rotary_dim > head_dim
        or not 0 <= kv_head_begin <= num_pool_heads - num_kv_heads
        or not q_strides[1:] == k_strides[1:] == v_strides[1:] == (head_dim, 1)
    ):
        raise ValueError(
            f"rope cannot take q {tuple(q_THD.shape)} {q_strides}, k {tuple(k_THD.shape)} {k_strides}, v "
            f"{tuple(v_THD.shape)} {v_strides}, table {tuple(cos_sin.shape)}, pool {tuple(k_pool.shape)} from head "
            f"{kv_head_begin}, positions {positions.dtype}: see rope_and_store for what fits"
        )
    if paths.takes_torch(q_THD):
        qkv, pools = (q_THD, k_THD, v_THD), (k_pool, v_pool)
        torch_rows.rope_and_store(qkv, positions, slots, cos_sin, pools, kv_head_begin, interleaved=interleaved)
        return
    _native.rope_and_store(
        q_THD.data_ptr(),
        k_THD.data_ptr(),
        v_THD.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        cos_sin.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        max_positions,
        q_strides[0],
        k_strides[0],
        v_strides[0],
        num_blocks,
        num_pool_heads,
        kv_head_begin,
        interleaved,
    )


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dimension in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU times up in float64."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def gelu_tanh_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """GELU (tanh form) times up in float64."""
    gate = gate.double()
    # As x * sigmoid(2u): torch's own 1 + tanh(u) loses all digits of results near 0.
    return gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up.double()


def rope_reference(x_THD: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool) -> Tensor:
    """The rotation of one tensor in float64, returned."""
    rotary_dim = cos_sin.shape[1]
    cosine, sine = cos_sin[positions.long()].double()[:, None].chunk(2, dim=-1)
    head = x_THD[..., :rotary_dim].double()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    turned = (a * cosine - b * sine, b * cosine + a * sine)
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rotated, x_THD[..., rotary_dim:].double()), -1)


def store_reference(rows_THD: Tensor, slots: Tensor, pool: Tensor, kv_head_begin: int) -> None:
    """Writes rows into the slots of one pool, by indexing."""
    slots = slots.long()
    pool[slots // 16, kv_head_begin : kv_head_begin + rows_THD.shape[1], slots % 16] = rows_THD
