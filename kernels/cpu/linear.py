"""Products of stored weights (kernels.weights) with float32 rows, on one core of the host.

Products are exact to float32 rounding: weights become what ggml says they are, x is never quantised, sums are float32.
Nothing allocates, starts threads or keeps state; other Python threads run during every call.

Shapes: T rows of x (tokens), K input features (columns of the matrix), N output features (rows of the matrix).
"""

import torch
from torch import Tensor

import kernels._native as _native
from kernels.cpu import paths
from kernels.reference import products
from kernels.weights import Matrix, Weight

# Vectors of 16 floats are the widest there are (AVX-512); 8 stands for AVX2 and 4 for portable code.
WIDEST_LANES = 16


def multiply(
    x_TK: Tensor,
    weight: Weight,
    out_TN: Tensor,
    *,
    bias_N: Tensor | None = None,
    accumulate: bool = False,
    max_lanes: int = WIDEST_LANES,
) -> None:
    """out = x @ W^T (+ bias), or out += x @ W^T (+ bias); x and out have unit inner stride and must not overlap.

    `max_lanes` bounds the vectors used, for tests and benches. Raises ValueError if types, shapes or strides misfit.
    """
    if x_TK.dtype is not torch.float32 or out_TN.dtype is not torch.float32:
        raise ValueError(f"x and out must be float32, got {x_TK.dtype} and {out_TN.dtype}")
    if paths.takes_torch(x_TK):
        products.multiply(x_TK, weight, out_TN, bias_N=bias_N, accumulate=accumulate)
        return
    _native.linear_multiply(
        weight.piece_table,
        x_TK.data_ptr(),
        x_TK.shape,
        x_TK.stride(),
        out_TN.data_ptr(),
        out_TN.shape,
        out_TN.stride(),
        0 if bias_N is None else _bias_address(bias_N, weight),
        accumulate,
        max_lanes,
    )


def _bias_address(bias_N: Tensor, weight: Weight) -> int:
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
    if paths.takes_torch(out_TK):
        products.take_rows(matrix, ids_T, out_TK, scale=scale)
        return
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
