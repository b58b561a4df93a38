"""Small ranges of real memory for tests, and what the system says about them."""

import contextlib
import ctypes
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.worker.memory.pages.backing import Backing
from services.worker.memory.pages.host_pages import HostPages

PIECE = 64 << 10
MIB = 1 << 20
MNT_DETACH = 2


def plenty() -> int:
    """A device whose memory does not bind."""
    return 1 << 40


class Device:
    """A device of fixed size that counts what the given ranges hold; `others_bytes` is taken by somebody else."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.others_bytes = total_bytes, 0
        self.backings: list[Backing] = []
        self.peak_bytes = 0

    def free(self) -> int:
        held = sum(backing.held_bytes() for backing in self.backings)
        self.peak_bytes = max(self.peak_bytes, held)
        return self.total_bytes - self.others_bytes - held

    def range(self, name: str, num_bytes: int, margin_bytes: int = 0, piece_bytes: int = PIECE) -> Backing:
        pages = HostPages(name, num_bytes, piece_bytes=piece_bytes)
        backing = Backing(name, pages, self.free, margin_bytes)
        self.backings.append(backing)
        return backing


def shared_memory_bytes() -> int:
    """Memory of shared mappings that this process has in, by the system's account."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss_Shmem:\s+(\d+) kB", text, re.MULTILINE)
    assert found, text
    return int(found[1]) * 1024


def checksum(view: memoryview) -> int:
    """Of 64 bits, quick, and not the same for zeros of another length."""
    return zlib.crc32(view) << 32 | len(view) & 0xFFFFFFFF


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system in memory of 1 MiB at `directory`; where none may be mounted the test is skipped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"no file system may be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert libc.umount2(bytes(directory), MNT_DETACH) == 0
