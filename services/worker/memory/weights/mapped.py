"""A model's weights as every rank of a host sees them: the files' own pages, multiplied as they are.

Never moves a byte for a layout: a share is a set of views. There is no float32 copy for prompts: measured, products on
the stored blocks are faster than float32 products through torch at every number of rows (decisions/). The exception is
a share whose columns begin or end within a quantisation block: such a tensor is expanded, once for the host, into the
`weights` region, which outlives a rank. Each rank begins at another place and passes over what is done, so no rank
waits for a peer and a restarted one finds everything there.

Invariants of the expanded tensors: a mark is set after a tensor's last byte; marks belong to the identity in the header
and are cleared before another identity is written there.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.linear import dequantize
from kernels.weights import Matrix
from services.core.layout import Span
from services.models.model_files import ModelFiles
from services.models.tensor_places import TensorPlace
from services.worker.memory.pages.shared_memory import SharedRegion

ALIGN_BYTES = 4096
"""Places of expanded tensors: whole pages, so that no tensor shares one with its neighbour."""
IDENTITY_BYTES = 32
FLOAT_BYTES = 4


class ExpandedTensors:
    """Float32 tensors in a shared region: a header with an identity and a mark for each, then the tensors."""

    def __init__(self, fd: int, identity: bytes, places: Mapping[str, TensorPlace]) -> None:
        self._names = tuple(places)
        offset = _aligned(IDENTITY_BYTES + len(places))
        offsets = []
        for place in places.values():
            offsets.append(offset)
            offset = _aligned(offset + place.rows * place.columns * FLOAT_BYTES)
        self.num_bytes = offset
        region = SharedRegion("expanded weights", fd, offset)
        self._identity = region.tensor(torch.uint8, (IDENTITY_BYTES,)).numpy()
        self._marks = region.tensor(torch.uint8, (len(places),), IDENTITY_BYTES).numpy()
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

    def __init__(self, files: ModelFiles, weights_fd: int, cut_within_blocks: Collection[str]) -> None:
        """`cut_within_blocks`: the tensors that some share cuts where their blocks cannot be cut; usually none."""
        self._files = files
        self.file_bytes = sum(len(buffer) for buffer in files.buffers)
        places = {name: files.tensors[name] for name in sorted(cut_within_blocks)}
        self._expanded = ExpandedTensors(weights_fd, files_identity(files), places) if places else None

    @property
    def expanded_bytes(self) -> int:
        """Of the expanded tensors; 0: there are none."""
        return 0 if self._expanded is None else self._expanded.num_bytes

    def expand(self, rank: int, num_ranks: int) -> int:
        """Makes what is missing of the expanded tensors; returns how many were made by this rank."""
        count = 0
        if self._expanded is not None:
            for name in self._expanded.missing(rank, num_ranks):
                dequantize(self._stored(name), self._expanded.tensors[name])
                self._expanded.mark(name)
                count += 1
        return count

    def _stored(self, name: str) -> Matrix:
        place = self._files.tensors[name]
        buffer = self._files.buffers[place.file_index]
        return Matrix.from_buffer(buffer, place.offset, place.ggml_type, place.rows, place.columns)

    def matrix(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Matrix:
        """A view of the part of a matrix that a share holds; the whole by default."""
        whole = self._stored(name)
        if columns is not None and self._expanded is not None and name in self._expanded.tensors:
            whole = Matrix.from_tensor(self._expanded.tensors[name])
        if rows is not None:
            whole = whole.rows(rows.begin, rows.end)
        return whole if columns is None else whole.columns(columns.begin, columns.end)

    def vector(self, name: str) -> Tensor:
        """[columns] float32, an own copy: norms are small."""
        stored = self._stored(name)
        out = torch.empty((stored.num_rows, stored.num_columns), dtype=torch.float32)
        dequantize(stored, out)
        return out.view(-1)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def files_identity(files: ModelFiles) -> bytes:
    """Of the very bytes that were expanded: the model's digest does not see weights, so files' own stamps are added."""
    digest = hashlib.blake2b(files.digest.encode(), digest_size=IDENTITY_BYTES)
    for path in files.paths:
        stat = path.stat()
        digest.update(repr((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.digest()
