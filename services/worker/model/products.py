"""Products with a weight that lies in one piece or in several: where a flip moves pieces, a layer is not contiguous.

A weight in pieces is multiplied piece by piece, rows into their part of the output, columns added up in the order of
the columns: so its sums are rounded otherwise than those of the whole. Never allocates.

Shapes: T rows of x (tokens), K columns of the matrix, N rows of it.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu import linear
from kernels.cpu.linear import Matrix


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """A piece, and where in the whole it begins."""

    first_row: int
    first_column: int
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class PiecedMatrix:
    """Pieces that cover [num_rows, num_columns] once, each row's in the order of its columns."""

    num_rows: int
    num_columns: int
    pieces: tuple[PlacedMatrix, ...]

    def __post_init__(self) -> None:
        """Refuses pieces that cannot be a cover."""
        covered = sum(piece.matrix.num_rows * piece.matrix.num_columns for piece in self.pieces)
        if covered != self.num_rows * self.num_columns:
            raise ValueError(
                f"pieces of {covered} weights cannot cover {self.num_rows} x {self.num_columns}: they are not all "
                "there, or overlap"
            )


Weight = Matrix | PiecedMatrix


def multiply(x_TK: Tensor, weight: Weight, out_TN: Tensor, *, accumulate: bool = False) -> None:
    """out = x @ W^T, or out += x @ W^T; see kernels.cpu.linear.multiply."""
    if isinstance(weight, Matrix):
        linear.multiply(x_TK, weight, out_TN, accumulate=accumulate)
        return
    for piece in weight.pieces:
        rows, columns = piece.matrix.num_rows, piece.matrix.num_columns
        linear.multiply(
            x_TK[:, piece.first_column : piece.first_column + columns],
            piece.matrix,
            out_TN[:, piece.first_row : piece.first_row + rows],
            accumulate=accumulate or piece.first_column > 0,
        )
