"""Products with float32 weights. Stored blocks are not multiplied here: a rank on such a device expands them at load.

Shapes: T rows of x (tokens), K columns of the matrix, N rows of it.
"""

import torch
from torch import Tensor

TF32_OFF = "highest"


def multiply(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor, *, accumulate: bool) -> None:
    """out = x @ W^T, or out += x @ W^T. Raises ValueError where shapes or devices differ."""
    expected = (x_TK.shape[0], weight_NK.shape[0])
    if x_TK.shape[1:] != weight_NK.shape[1:] or out_TN.shape != expected:
        raise ValueError(
            f"x [T, K] and out [T, N] for weights {list(weight_NK.shape)} expected, got {list(x_TK.shape)} and "
            f"{list(out_TN.shape)}"
        )
    if not x_TK.device == weight_NK.device == out_TN.device:
        raise ValueError(f"x on {x_TK.device}, weights on {weight_NK.device} and out on {out_TN.device}: one expected")
    if torch.get_float32_matmul_precision() != TF32_OFF:
        raise ValueError("float32 products may be rounded to TF32 here: set torch's precision to highest")
    if accumulate:
        out_TN.addmm_(x_TK, weight_NK.T)
    else:
        out_TN.copy_(x_TK @ weight_NK.T)


def take_rows(weight_NK: Tensor, ids_T: Tensor, out_TK: Tensor) -> None:
    """out[t] = row ids[t]. Raises IndexError, before anything is written, for an id outside the rows."""
    if out_TK.shape != (ids_T.numel(), weight_NK.shape[1]):
        raise ValueError(f"out must be {[ids_T.numel(), weight_NK.shape[1]]}, got {list(out_TK.shape)}")
    num_rows = weight_NK.shape[0]
    for place in ((ids_T < 0) | (ids_T >= num_rows)).nonzero().flatten()[:1].tolist():
        raise IndexError(f"id {int(ids_T[place])} at position {place} is not in [0, {num_rows})")
    out_TK.copy_(weight_NK.index_select(0, ids_T.long()))
