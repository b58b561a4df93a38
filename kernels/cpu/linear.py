"""Products of stored weights (kernels.weights) with float32 rows, on one core of the host.

Products are exact to float32 rounding: weights become what ggml says they are, x is never quantised, sums are float32.
Nothing allocates, starts threads or keeps state; other Python threads run during every call.

Shapes: T rows of x (tokens), K input features (columns of the matrix), N output features (rows of the matrix).
"""

import struct

import torch
from torch import Tensor

import kernels._native as _native
from kernels.weights import Matrix, Weight

# Vectors of 16 floats are the widest there are (AVX-512); 8 stands for AVX2 and 4 for portable code.
WIDEST_LANES = 16
_OPERANDS = struct.Struct("2Q5q")


def product_operands(x_TK: Tensor, out_TN: Tensor) -> bytes:
    """C's product_operands; ValueError where types, shapes or strides misfit. x and out must not overlap."""
    for name, tensor in (("x", x_TK), ("out", out_TN)):
        if tensor.dim() != 2 or tensor.dtype is not torch.float32 or not tensor.device.type == "cpu":
            raise ValueError(
                f"{name} must have 2 dimensions and be float32 on the CPU, got {tensor.dtype} {list(tensor.shape)} on "
                f"{tensor.device}"
            )
        if tensor.stride(1) != 1 and tensor.shape[1] > 1:
            raise ValueError(f"{name} must have inner stride 1, got {tensor.stride()}: copy it with contiguous()")
    if x_TK.shape[0] != out_TN.shape[0]:
        raise ValueError(f"out must have x's {x_TK.shape[0]} rows, got {out_TN.shape[0]}")
    shape = (*x_TK.shape, out_TN.shape[1])
    return _OPERANDS.pack(x_TK.data_ptr(), out_TN.data_ptr(), *shape, x_TK.stride(0), out_TN.stride(0))


def bias_address(bias_N: Tensor, weight: Weight) -> int:
    """ValueError for all but a contiguous float32 bias of the weight's rows."""
    if bias_N.dtype is not torch.float32 or not bias_N.is_contiguous() or bias_N.shape != (weight.num_rows,):
        raise ValueError(
            f"a contiguous float32 bias of {weight.num_rows} expected, got {bias_N.dtype} {list(bias_N.shape)} strides "
            f"{bias_N.stride()}"
        )
    return bias_N.data_ptr()


def dequantize(matrix: Matrix, out_NK: Tensor, *, max_lanes: int = WIDEST_LANES) -> None:
    """Writes the weights as float32, bit for bit what ggml's reference makes of them; raises ValueError on a misfit."""
    if out_NK.dtype is not torch.float32:
        raise ValueError(f"out must be float32, got {out_NK.dtype}")
    _native.linear_dequantize(
        matrix.ggml_type,
        matrix.address,
        matrix.row_stride_bytes,
        matrix.num_rows,
        matrix.num_columns,
        out_NK.data_ptr(),
        out_NK.shape,
        out_NK.stride(),
        max_lanes,
    )


def take_rows(
    matrix: Matrix, ids_T: Tensor, out_TK: Tensor, *, scale: float = 1.0, max_lanes: int = WIDEST_LANES
) -> None:
    """out[t] = scale * row ids[t] of the matrix (the embedding look-up); ids are int32 or int64.

    Raises IndexError, before anything is read or written, if an id is outside the rows, and ValueError on a misfit.
    """
    if ids_T.dtype not in (torch.int32, torch.int64) or ids_T.dim() != 1 or out_TK.dtype is not torch.float32:
        raise ValueError(
            f"ids must be int32 or int64 in one dimension and out float32, got {ids_T.dtype} of shape "
            f"{list(ids_T.shape)} and {out_TK.dtype}"
        )
    _native.linear_take_rows(
        matrix.ggml_type,
        matrix.address,
        matrix.row_stride_bytes,
        matrix.num_rows,
        matrix.num_columns,
        ids_T.data_ptr(),
        ids_T.shape[0],
        ids_T.stride(0),
        ids_T.element_size(),
        out_TK.data_ptr(),
        out_TK.shape,
        out_TK.stride(),
        max_lanes,
        scale,
    )
