"""A model's weights as every rank of a host sees them: the files' own pages, and one float32 copy beside them.

The files are mapped and multiplied as they are (few rows). The copy, in the `weights` region that outlives a rank, is
for many rows, where float32 products through torch are faster. Whoever needs the copy fills what is missing: each rank
begins at another place and passes over what is done, so no rank waits for a peer and a restarted one finds everything
there. Never moves a byte for a layout: a share is a set of views.

Invariants: a tensor's mark is set after its last byte; marks belong to the identity in the header and are cleared
before another identity is written there.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.linear import Matrix, dequantize, multiply
from services.core.ggml_types import GgmlType, GgmlTypeError, row_bytes
from services.core.layout import Span
from services.core.tensor_places import TensorPlace
from services.mesh.model_files import ModelFiles
from services.worker.shared_memory import SharedRegion

ALIGN_BYTES = 4096
"""Places of the copy: whole pages, so that no tensor shares one with its neighbour."""
IDENTITY_BYTES = 32
FLOAT_BYTES = 4
NOT_COPIED = ("token_embd", "output")
"""Looked up or multiplied for the rows that sample alone: few, so the copy would be the largest and the least used."""

FEW_ROWS = 16
"""Up to here the kernel on the stored weights is faster than float32 products on the copy; measured by
tools/bench_worker.py."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix, or the part of it that a share holds: `out[t] = matrix x[t]`."""

    stored: Matrix
    """[outputs, inputs], as the file has it."""
    copy: Tensor | None
    """[inputs, outputs] float32, a view of the copy; None where there is no copy."""

    def into(self, x: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """Writes or adds the products: `x` [T, inputs] and `out` [T, outputs], float32, rows may be apart."""
        if self.copy is None or x.shape[0] <= FEW_ROWS:
            multiply(x, self.stored, out, accumulate=accumulate)
        elif accumulate:
            out.addmm_(x, self.copy)
        else:
            torch.mm(x, self.copy, out=out)


class ExpandedCopy:
    """The float32 copy: a header with an identity and a mark per tensor, then the tensors."""

    def __init__(self, fd: int, identity: bytes, places: Mapping[str, TensorPlace]) -> None:
        self._names = tuple(places)
        offset = _aligned(IDENTITY_BYTES + len(places))
        offsets = []
        for place in places.values():
            offsets.append(offset)
            offset = _aligned(offset + place.rows * place.columns * FLOAT_BYTES)
        self.num_bytes = offset
        region = SharedRegion("weights copy", fd, offset)
        self._identity = region.tensor(torch.uint8, (IDENTITY_BYTES,)).numpy()
        self._marks = region.tensor(torch.uint8, (max(1, len(places)),), IDENTITY_BYTES).numpy()
        self.tensors = {
            name: region.tensor(torch.float32, (place.rows, place.columns), offset)
            for (name, place), offset in zip(places.items(), offsets, strict=True)
        }
        if bytes(self._identity) != identity:
            self._marks[:] = 0
            self._identity[:] = np.frombuffer(identity, np.uint8)

    def missing(self, start: int, num_starts: int) -> Iterator[str]:
        """Yields what is not marked when its turn comes, from part `start` of `num_starts` on, all the way round."""
        count = len(self._names)
        first = count * start // num_starts
        for index in (*range(first, count), *range(first)):
            if not self._marks[index]:
                yield self._names[index]

    def mark(self, name: str) -> None:
        """Says that a tensor's last byte is written."""
        self._marks[self._names.index(name)] = 1


class WeightStore:
    """Matrices and vectors of one model by canonical name (tensor_places)."""

    def __init__(self, files: ModelFiles, copy_fd: int | None) -> None:
        """`copy_fd`: the region for the copy; None: none is made, many rows are multiplied as few are."""
        self._files = files
        self.file_bytes = sum(len(buffer) for buffer in files.buffers)
        copied = {name: place for name, place in files.tensors.items() if _is_copied(name, place)}
        self._copy = None if copy_fd is None else ExpandedCopy(copy_fd, _identity(files), copied)

    @property
    def copy_bytes(self) -> int:
        """Of the float32 copy; 0: there is none."""
        return 0 if self._copy is None else self._copy.num_bytes

    def fill_copy(self, rank: int, num_ranks: int) -> int:
        """Makes what is missing of the copy; returns how many tensors were made by this rank."""
        if self._copy is None:
            return 0
        count = 0
        for name in self._copy.missing(rank, num_ranks):
            dequantize(self.matrix(name), self._copy.tensors[name])
            self._copy.mark(name)
            count += 1
        return count

    def matrix(self, name: str) -> Matrix:
        """The whole tensor, as the file has it."""
        place = self._files.tensors[name]
        return Matrix.from_buffer(
            self._files.buffers[place.file_index], place.offset, place.ggml_type, place.rows, place.columns
        )

    def vector(self, name: str) -> Tensor:
        """[columns] float32, an own copy: norms are small."""
        place = self._files.tensors[name]
        out = torch.empty((place.rows, place.columns), dtype=torch.float32)
        dequantize(self.matrix(name), out)
        return out.view(-1)

    def linear(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Linear:
        """The part of a matrix that a share holds, which is not empty; the whole by default.

        Columns that do not begin and end on the type's blocks are taken from the copy, where they can be cut anywhere.
        """
        place = self._files.tensors[name]
        rows = Span(0, place.rows) if rows is None else rows
        columns = Span(0, place.columns) if columns is None else columns
        assert len(rows) and len(columns), f"{name}: an empty share {rows}, {columns} has no matrix"
        whole = None if self._copy is None else self._copy.tensors.get(name)
        copy = None if whole is None else whole[rows.begin : rows.end, columns.begin : columns.end]
        if _on_blocks(place.ggml_type, columns):
            stored = self.matrix(name).rows(rows.begin, rows.end).columns(columns.begin, columns.end)
        elif copy is not None:
            stored = Matrix.from_tensor(copy)
        else:
            raise GgmlTypeError(
                f"{name}: columns [{columns.begin}, {columns.end}) do not fall on blocks of {place.ggml_type.name}, "
                "and there is no float32 copy to cut; give the host memory for the copy, or choose another num_ranks"
            )
        return Linear(stored, None if copy is None else copy.T)


def _is_copied(name: str, place: TensorPlace) -> bool:
    return place.rows > 1 and name not in NOT_COPIED


def _on_blocks(kind: GgmlType, columns: Span) -> bool:
    try:
        return row_bytes(kind, columns.begin) >= 0 and row_bytes(kind, columns.end) >= 0
    except GgmlTypeError:
        return False


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _identity(files: ModelFiles) -> bytes:
    """Of the very bytes that were expanded: the model's digest does not see weights, so files' own stamps are added."""
    digest = hashlib.blake2b(files.digest.encode(), digest_size=IDENTITY_BYTES)
    for path in files.paths:
        stat = path.stat()
        digest.update(repr((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.digest()
