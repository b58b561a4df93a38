"""Weights as they lie in memory, float32 to 2-bit blocks: views that own no bytes, whole or in pieces.

A flip moves pieces of a matrix, so that a weight need not be contiguous. A view keeps its memory's owner alive and is
cut by rows or columns without copying; the memory is a host's or a device's. Never multiplies: a backend does.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import kernels._native as _native
from services.models.ggml_types import GgmlType, block_bytes, block_length, row_bytes

_SIZE = struct.Struct("2q")
_PIECE = struct.Struct("7q")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A view of `num_rows` x `num_columns` weights of one type at `address`; `owner` keeps the memory mapped.

    A linear layer's weight: rows are its output features, columns its input features, columns whole blocks.
    """

    address: int
    ggml_type: GgmlType
    num_rows: int
    num_columns: int
    row_stride_bytes: int
    owner: object
    piece_table: bytes = field(init=False, repr=False, compare=False)
    """What C reads of a weight: rows, columns; then type, address, bytes a row, rows, columns, first row and column of
    each piece; int64."""

    def __post_init__(self) -> None:
        """Refuses negative counts, rows that are not whole blocks, and rows that overlap."""
        least = row_bytes(self.ggml_type, self.num_columns)
        if self.num_rows < 0 or (self.num_rows > 1 and self.row_stride_bytes < least):
            raise ValueError(
                f"{self.num_rows} rows of {least} bytes ({self.ggml_type.name}, {self.num_columns} columns) cannot lie "
                f"{self.row_stride_bytes} bytes apart"
            )
        table = _SIZE.pack(self.num_rows, self.num_columns) + _piece(self, 0, 0)
        object.__setattr__(self, "piece_table", table)

    @staticmethod
    def from_buffer(
        buffer: memoryview, offset_bytes: int, ggml_type: GgmlType, num_rows: int, num_columns: int
    ) -> Matrix:
        """The packed matrix at `offset_bytes` of a contiguous buffer, which may be read-only and stays exported.

        Raises ValueError if the matrix does not lie within the buffer.
        """
        address, num_bytes = _native.buffer_address(buffer)
        stride = row_bytes(ggml_type, num_columns)
        end = offset_bytes + num_rows * stride
        if offset_bytes < 0 or end > num_bytes:
            raise ValueError(
                f"a {ggml_type.name} matrix of {num_rows} x {num_columns} needs bytes [{offset_bytes}, {end}), "
                f"but the buffer has {num_bytes}: the file is cut short or its header is wrong"
            )
        return Matrix(address + offset_bytes, ggml_type, num_rows, num_columns, stride, buffer)

    @staticmethod
    def from_tensor(weight_NK: Tensor) -> Matrix:
        """A tensor of plain numbers with unit inner stride, wherever it lies; raises ValueError for any other."""
        ggml_type = _PLAIN.get(weight_NK.dtype)
        is_apart = weight_NK.dim() != 2 or (weight_NK.stride(1) != 1 and weight_NK.shape[1] > 1)
        if ggml_type is None or is_apart:
            raise ValueError(
                f"a matrix of float32, float16 or bfloat16 with inner stride 1 is needed, got {weight_NK.dtype} of "
                f"shape {list(weight_NK.shape)} with strides {list(weight_NK.stride())}"
            )
        num_rows, num_columns = weight_NK.shape
        stride_bytes = weight_NK.stride(0) * weight_NK.element_size()
        return Matrix(weight_NK.data_ptr(), ggml_type, num_rows, num_columns, stride_bytes, weight_NK)

    def stored_rows(self) -> Tensor:
        """uint8 [num_rows, bytes of a row] over the same memory, where it lies; not to be written."""
        shape, stride = (self.num_rows, row_bytes(self.ggml_type, self.num_columns)), (self.row_stride_bytes, 1)
        if isinstance(self.owner, Tensor):
            storage = self.owner.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=self.owner.device)
            return whole.set_(storage, self.address - storage.data_ptr(), shape, stride)
        if not (num_bytes := (self.num_rows - 1) * self.row_stride_bytes + shape[1] if self.num_rows else 0):
            return torch.empty(shape, dtype=torch.uint8)
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided(shape, stride)

    def rows(self, begin: int, end: int) -> Matrix:
        """Rows [begin, end) of the same memory; raises ValueError outside the matrix."""
        _check_range("rows", begin, end, self.num_rows)
        return replace(self, address=self.address + begin * self.row_stride_bytes, num_rows=end - begin)

    def columns(self, begin: int, end: int) -> Matrix:
        """Columns [begin, end) of the same memory; raises ValueError outside the matrix or within a block."""
        _check_range("columns", begin, end, self.num_columns)
        length = block_length(self.ggml_type)
        if begin % length or end % length:
            raise ValueError(
                f"columns [{begin}, {end}) cut a {self.ggml_type.name} block: both ends must be multiples of its "
                f"length, {length}"
            )
        address = self.address + begin // length * block_bytes(self.ggml_type)
        return replace(self, address=address, num_columns=end - begin)


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """A piece, and where in the whole it begins."""

    first_row: int
    first_column: int
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class PiecedMatrix:
    """Pieces that cover [num_rows, num_columns] once, each row's in the order of its columns.

    Columns are added up piece by piece, so that sums are rounded otherwise than those of the whole.
    """

    num_rows: int
    num_columns: int
    pieces: tuple[PlacedMatrix, ...]
    piece_table: bytes = field(init=False, repr=False, compare=False)
    """See Matrix."""

    def __post_init__(self) -> None:
        """Refuses pieces that cannot be a cover."""
        covered = sum(piece.matrix.num_rows * piece.matrix.num_columns for piece in self.pieces)
        if covered != self.num_rows * self.num_columns:
            raise ValueError(
                f"pieces of {covered} weights cannot cover {self.num_rows} x {self.num_columns}: they are not all "
                "there, or overlap"
            )
        pieces = [_piece(piece.matrix, piece.first_row, piece.first_column) for piece in self.pieces]
        object.__setattr__(self, "piece_table", b"".join((_SIZE.pack(self.num_rows, self.num_columns), *pieces)))


Weight = Matrix | PiecedMatrix
"""[num_rows, num_columns]; rows are output features, columns input features."""

_PLAIN = {torch.float32: GgmlType.F32, torch.float16: GgmlType.F16, torch.bfloat16: GgmlType.BF16}


def pieces_of(weight: Weight) -> tuple[PlacedMatrix, ...]:
    """A weight's pieces: itself, where it is whole."""
    return (PlacedMatrix(0, 0, weight),) if isinstance(weight, Matrix) else weight.pieces


def _piece(matrix: Matrix, first_row: int, first_column: int) -> bytes:
    size = (matrix.row_stride_bytes, matrix.num_rows, matrix.num_columns)
    return _PIECE.pack(matrix.ggml_type, matrix.address, *size, first_row, first_column)


def _check_range(what: str, begin: int, end: int, count: int) -> None:
    if not 0 <= begin <= end <= count:
        raise ValueError(f"{what} [{begin}, {end}) are not within the matrix's {what} [0, {count})")
