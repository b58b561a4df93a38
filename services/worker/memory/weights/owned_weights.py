"""One rank's own weights in memory of its own: which part of it is which piece, and the views that stages multiply by.

Loading streams piece by piece from the mapped files to where each piece lives; nothing is held besides but, for a piece
that is expanded, a few rows. A share is a view: rows of a piece lie side by side, columns are strided. Which pieces
there are is decided elsewhere (pieces), and so is when they are in the memory.
"""

import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.linear import dequantize
from kernels.weights import Matrix
from services.core.layout import Span
from services.models.ggml_types import GgmlType, block_bytes, block_length, row_bytes
from services.models.model_files import ModelFiles
from services.placement.pieces import Piece

EXPAND_ROWS = 64
"""Rows that are expanded at a time where only some of their columns are kept."""


class OwnedWeights:
    """Matrices and vectors by canonical name (tensor_places), for every share that lies within the pieces."""

    def __init__(self, files: ModelFiles, pieces: Sequence[Piece], sources: Mapping[str, str], memory: Tensor) -> None:
        """`memory`: uint8, where the pieces are or will be; views of it are handed out, nothing is touched.

        `sources`: of each tensor, the one whose bytes it has; its own name but for a tied head.
        """
        self._files, self._sources, self._memory = files, sources, memory
        self._held: dict[str, list[tuple[Piece, Matrix]]] = {}
        self._vectors: dict[str, Tensor] = {}
        for piece in pieces:
            part = memory[piece.offset : piece.offset + piece.num_bytes]
            self._held.setdefault(piece.shard.tensor, []).append((piece, self._seen(piece, part)))

    @property
    def num_bytes(self) -> int:
        """Of the memory."""
        return self._memory.numel()

    def _seen(self, piece: Piece, memory: Tensor) -> Matrix:
        rows, columns = len(piece.shard.rows), len(piece.shard.columns)
        ggml_type = GgmlType.F32 if piece.is_expanded else self._files.tensors[piece.shard.tensor].ggml_type
        return Matrix(memory.data_ptr(), ggml_type, rows, columns, row_bytes(ggml_type, columns), memory)

    def matrix(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Matrix:
        """A view of the part of a matrix that a share holds; the whole by default.

        Raises:
            KeyError: this rank holds no such part in either layout.
        """
        place, source = self._files.tensors[name], self._sources[name]
        rows, columns = rows or Span(0, place.rows), columns or Span(0, place.columns)
        for piece, matrix in self._held.get(source, ()):
            held = piece.shard
            if held.rows.covers(rows) and held.columns.covers(columns):
                part = matrix.rows(rows.begin - held.rows.begin, rows.end - held.rows.begin)
                if columns == held.columns:
                    return part
                return part.columns(columns.begin - held.columns.begin, columns.end - held.columns.begin)
        raise KeyError(
            f"{name}: rows [{rows.begin}, {rows.end}), columns [{columns.begin}, {columns.end}) are in no piece of "
            "this rank: pieces and stages were made from different layouts"
        )

    def vector(self, name: str) -> Tensor:
        """[columns] float32, read from the files once."""
        if name not in self._vectors:
            self._vectors[name] = file_vector(self._files, name).to(self._memory.device)
        return self._vectors[name]


def file_vector(files: ModelFiles, name: str) -> Tensor:
    """[columns] float32 in host memory: a norm, as the files have it."""
    place = files.tensors[name]
    buffer = files.buffers[place.file_index]
    stored = Matrix.from_buffer(buffer, place.offset, place.ggml_type, place.rows, place.columns)
    out = torch.empty((place.rows, place.columns), dtype=torch.float32)
    dequantize(stored, out)
    return out.view(-1)


def load_pieces(memory: Tensor, pieces: Sequence[Piece], files: ModelFiles) -> None:
    """Writes all pieces to their places in host memory, from the files."""
    for piece in pieces:
        fill(memory[piece.offset : piece.offset + piece.num_bytes], piece, files)


def fill(memory: Tensor, piece: Piece, files: ModelFiles) -> None:
    """Writes a piece's bytes, uint8 and contiguous, from the files; what is not expanded to host memory alone."""
    place = files.tensors[piece.shard.tensor]
    buffer = files.buffers[place.file_index]
    if piece.is_expanded:
        whole = Matrix.from_buffer(buffer, place.offset, place.ggml_type, place.rows, place.columns)
        _expand(whole, piece.shard.rows, piece.shard.columns, memory)
        return
    length, size = block_length(place.ggml_type), block_bytes(place.ggml_type)
    stride = row_bytes(place.ggml_type, place.columns)
    stored = np.frombuffer(buffer, np.uint8, place.rows * stride, place.offset).reshape(place.rows, stride)
    rows, columns = piece.shard.rows, piece.shard.columns
    part = stored[rows.begin : rows.end, columns.begin // length * size : -(-columns.end // length) * size]
    memory.numpy().reshape(part.shape)[:] = part


def release_mapped(files: ModelFiles) -> None:
    """Lets go of the files' pages that loading has touched: they are not this rank's memory, and come back if read."""
    for buffer in files.buffers:
        if isinstance(buffer.obj, mmap.mmap):
            buffer.obj.madvise(mmap.MADV_DONTNEED)


def _expand(whole: Matrix, rows: Span, columns: Span, memory: Tensor) -> None:
    into = memory.view(torch.float32).view(len(rows), len(columns))
    few = torch.empty((EXPAND_ROWS, whole.num_columns), dtype=torch.float32)
    for begin in range(rows.begin, rows.end, EXPAND_ROWS):
        end = min(begin + EXPAND_ROWS, rows.end)
        dequantize(whole.rows(begin, end), few[: end - begin])
        into[begin - rows.begin : end - rows.begin] = few[: end - begin, columns.begin : columns.end]
