"""Norms, gated activations, additions and soft caps: what runs between the matrix products of a layer.

Each kernel is one pass over rows that fit the first-level cache; none allocates. Inputs and outputs are float32 with
inner stride 1; rows may be apart (parts of a fused product are taken as they are), and an output may be an input of the
same row.

Bounds, against float64: norms 1e-6 relative, SiLU 1e-6 relative (0 below -88), GELU 5e-7 of |gate * up| (its tail
multiplies the rounding of its cubic), soft caps 1e-6 relative, rotations 1e-6 of the pair's length.
"""

import struct

import torch
from torch import Tensor

import kernels._native as _native
from kernels.backend import Activation

GATES = {Activation.SILU: 0, Activation.GELU_TANH: 1}
ADD = 2
_NORM = struct.Struct("2Q7q")
_PAIR = struct.Struct("3Q5q")


def _check_rows(x: Tensor, like: Tensor) -> None:
    if x.shape != like.shape or x.stride(-1) != 1 or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(
            f"float32 rows {tuple(like.shape)} on the CPU with inner stride 1 expected, got {x.dtype} "
            f"{tuple(x.shape)} {x.stride()} on {x.device}"
        )


def norm_operands(x: Tensor, out: Tensor) -> bytes:
    """C's NormOperands of [T, H] rows or of the heads of [T, heads, D]; ValueError where shapes differ."""
    _check_rows(x, out)
    _check_rows(out, x)
    if x.dim() == 2:
        num_tokens, width = x.shape
        rows = (num_tokens, 1, width, x.stride(0), 0, out.stride(0), 0)
    else:
        rows = (*x.shape, *x.stride()[:2], *out.stride()[:2])
    return _NORM.pack(x.data_ptr(), out.data_ptr(), *rows)


def norm_weights(weight: Tensor, x: Tensor) -> int:
    """The address of a norm's weights; ValueError where there are others than x is wide."""
    if weight.shape != x.shape[-1:] or weight.dtype != torch.float32:
        raise ValueError(
            f"{x.shape[-1]} float32 weights expected for the last dimension of {tuple(x.shape)}, got {weight.dtype} "
            f"{list(weight.shape)} weights"
        )
    return weight.data_ptr()


def pair_operands(x: Tensor, y: Tensor, out: Tensor) -> bytes:
    """C's PairOperands; ValueError where shapes differ."""
    for tensor in (x, y, out):
        _check_rows(tensor, x)
    num_rows, width = x.shape
    return _PAIR.pack(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), num_rows, width, x.stride(0), y.stride(0), out.stride(0)
    )


def soft_cap(x_TH: Tensor, cap: float, out_TH: Tensor) -> None:
    """out = cap * tanh(x / cap); `out` may be `x`. ValueError where shapes differ or the cap is not above 0."""
    if not cap > 0:
        raise ValueError(f"a soft cap of {cap}: above 0 expected")
    _check_rows(x_TH, out_TH)
    _check_rows(out_TH, x_TH)
    num_rows, width = x_TH.shape
    _native.soft_cap(x_TH.data_ptr(), out_TH.data_ptr(), num_rows, width, x_TH.stride(0), out_TH.stride(0), cap)
