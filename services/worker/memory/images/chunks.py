"""Checksums of memory in chunks, so that a bounded part is read at a time and a fault has a place.

The function that adds up a chunk is given: it belongs to the device that holds the bytes. Nothing here copies.
"""

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from kernels.cpu.checksum import checksum

Checksum = Callable[[memoryview], int]
"""64 bits over a chunk; the same bytes give the same value on every device."""

CHUNK_BYTES = 16 << 20
"""What one checksum covers, and the most that is read between two looks at a deadline or a cancellation."""


def host_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor of the host, writable, not copied."""
    return flat.numpy().data


def host_checksum(view: memoryview) -> int:
    """The checksum that moved bytes have everywhere, of host memory."""
    return checksum((np.frombuffer(view, np.uint8).ctypes.data, len(view))) if len(view) else 0


def chunk_ranges(num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover [0, num_bytes); the last may be short."""
    for begin in range(0, num_bytes, chunk_bytes):
        yield begin, min(begin + chunk_bytes, num_bytes)


def chunk_checksums(flat: Tensor, checksum: Checksum, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """One checksum for each chunk of a contiguous uint8 tensor; none for an empty one."""
    view = host_bytes(flat)
    return tuple(checksum(view[begin:end]) for begin, end in chunk_ranges(len(view), chunk_bytes))


def first_difference(flat: Tensor, expected: tuple[int, ...], checksum: Checksum, chunk_bytes: int) -> int | None:
    """The first chunk whose checksum is not the expected one, or None."""
    view = host_bytes(flat)
    ranges = chunk_ranges(len(view), chunk_bytes)
    for index, ((begin, end), value) in enumerate(zip(ranges, expected, strict=True)):
        if checksum(view[begin:end]) != value:
            return index
    return None
