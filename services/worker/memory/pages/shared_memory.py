"""Memory that all ranks of one host map: a region over an inherited memfd, seen as tensors.

Never makes or names anything: descriptors come from the supervisor and end with the processes that hold them. Sizing is
idempotent, so that every rank may do it, in any order; a region never shrinks. Pages are backed when first touched.
"""

import mmap
import os
from math import prod

import torch

from services.worker.memory.pages.host_pages import STAT_BLOCK_BYTES


class RegionError(OSError):
    """The system would not size or map a region; the message names the region and its bytes."""


class SharedRegion:
    """A writable mapping of the first `num_bytes` of a memfd; the mapping lives as long as any tensor on it."""

    def __init__(self, name: str, fd: int, num_bytes: int) -> None:
        self.name, self.num_bytes, self._fd = name, num_bytes, fd
        try:
            if os.fstat(fd).st_size < num_bytes:
                os.ftruncate(fd, num_bytes)
            self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise RegionError(f"{name}: {num_bytes} bytes cannot be mapped from descriptor {fd}: {error}") from error
        self._ask_for_huge_pages()

    def _ask_for_huge_pages(self) -> None:
        """A wish: kernels that keep shared memory in small pages refuse it, and nothing depends on it."""
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return

    def release(self, begin: int, end: int) -> None:
        """Makes bytes [begin, end), whole pages, a hole for every process: zero when next touched."""
        self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def held_bytes(self) -> int:
        """Memory of the file, by the file system's count."""
        return os.fstat(self._fd).st_blocks * STAT_BLOCK_BYTES

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> torch.Tensor:
        """A view of `shape` at `offset_bytes`, sharing the region's memory."""
        count, item = prod(shape), torch.empty((), dtype=dtype).element_size()
        if count < 1 or offset_bytes < 0 or offset_bytes + count * item > self.num_bytes:
            raise RegionError(f"{self.name}: {shape} at byte {offset_bytes} is not inside its {self.num_bytes} bytes")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset_bytes).view(shape)
