"""Products with a weight that lies in one piece or in several."""

from torch import Tensor

from kernels.cpu import linear
from kernels.weights import Weight


def multiply(x_TK: Tensor, weight: Weight, out_TN: Tensor, *, accumulate: bool = False) -> None:
    """out = x @ W^T, or out += x @ W^T; see kernels.cpu.linear.multiply."""
    linear.multiply(x_TK, weight, out_TN, accumulate=accumulate)
