"""One rank's own copy of the weights that its two shares need: filled from the files once, then never written.

Loading streams piece by piece from the mapped files to where each piece lives; nothing is held besides but, for a piece
that is expanded, a few rows. A share is a view: rows of a piece lie side by side, columns are strided. Which pieces
there are is decided elsewhere (pieces).
"""

import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.linear import Matrix, dequantize
from services.core.layout import Span
from services.formats.ggml_types import GgmlType, block_bytes, block_length, row_bytes
from services.mesh.model_files import ModelFiles
from services.worker.private.pieces import Piece, total_bytes
from services.worker.private.private_bytes import private_bytes

EXPAND_ROWS = 64
"""Rows that are expanded at a time where only some of their columns are kept."""


class OwnedWeights:
    """Matrices and vectors by canonical name (tensor_places), for every share that lies within the pieces."""

    def __init__(self, files: ModelFiles, pieces: Sequence[Piece], sources: Mapping[str, str]) -> None:
        """`sources`: of each tensor, the one whose bytes it has; its own name but for a tied head."""
        self._files, self._sources = files, sources
        self._flat = private_bytes(total_bytes(pieces), wants_large_pages=True)
        self._held: dict[str, list[tuple[Piece, Matrix]]] = {}
        self._vectors: dict[str, Tensor] = {}
        for piece in pieces:
            memory = self._flat[piece.offset : piece.offset + piece.num_bytes]
            fill(memory, piece, files)
            self._held.setdefault(piece.shard.tensor, []).append((piece, self._seen(piece, memory)))

    @property
    def num_bytes(self) -> int:
        """What this rank owns of the weights."""
        return self._flat.numel()

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
        """[columns] float32, made once for both layouts."""
        if name not in self._vectors:
            stored = self.matrix(name)
            out = torch.empty((stored.num_rows, stored.num_columns), dtype=torch.float32)
            dequantize(stored, out)
            self._vectors[name] = out.view(-1)
        return self._vectors[name]


def fill(memory: Tensor, piece: Piece, files: ModelFiles) -> None:
    """Writes a piece's bytes, uint8 and contiguous, from the files."""
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
