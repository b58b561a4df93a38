"""Products and look-ups with stored weights, made float32 for each call: float32 sums, rounded once at the end.

Shapes: T rows of x (tokens), K columns of the matrix, N rows of it.
"""

import torch
from torch import Tensor

from kernels.reference.dequantise import dequantised, dequantised_rows
from kernels.weights import Matrix, Weight

TF32_OFF = "highest"


def multiply(
    x_TK: Tensor, weight: Weight, out_TN: Tensor, *, bias_N: Tensor | None = None, accumulate: bool = False
) -> None:
    """out = x @ W^T (+ bias), or out += that. Raises ValueError where shapes or devices differ."""
    expected = (x_TK.shape[0], weight.num_rows)
    if x_TK.shape[1:] != (weight.num_columns,) or out_TN.shape != expected:
        raise ValueError(
            f"x must be [T, {weight.num_columns}] and out [T, {weight.num_rows}], got x {list(x_TK.shape)} and out "
            f"{list(out_TN.shape)}"
        )
    if bias_N is not None and (bias_N.shape != (weight.num_rows,) or bias_N.dtype == torch.float64):
        raise ValueError(f"a bias of {weight.num_rows} expected, got {bias_N.dtype} {list(bias_N.shape)}")
    weight_NK = dequantised(weight)
    if not x_TK.device == weight_NK.device == out_TN.device:
        raise ValueError(f"x on {x_TK.device}, weights on {weight_NK.device} and out on {out_TN.device}: one expected")
    if torch.get_float32_matmul_precision() != TF32_OFF:
        raise ValueError("float32 products may be rounded to TF32 here: set torch's precision to highest")
    product_TN = x_TK.float() @ weight_NK.T
    if bias_N is not None:
        product_TN += bias_N.float()
    out_TN.copy_(product_TN + out_TN.float() if accumulate else product_TN)


def take_rows(matrix: Matrix, ids_T: Tensor, out_TK: Tensor, *, scale: float = 1.0) -> None:
    """out[t] = scale * row ids[t]. Raises IndexError, before anything is written, for an id outside the rows."""
    if out_TK.shape != (ids_T.numel(), matrix.num_columns):
        raise ValueError(f"out must be {[ids_T.numel(), matrix.num_columns]}, got {list(out_TK.shape)}")
    for place in ((ids_T < 0) | (ids_T >= matrix.num_rows)).nonzero().flatten()[:1].tolist():
        raise IndexError(f"id {int(ids_T[place])} at position {place} is not in [0, {matrix.num_rows})")
    out_TK.copy_(dequantised_rows(matrix, ids_T) * scale)
