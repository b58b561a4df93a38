"""Memory that belongs to this process alone: anonymous pages, zero until written, taken when first touched."""

import contextlib
import mmap

import torch
from torch import Tensor


def private_bytes(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 at a constant address, zero; the mapping lives as long as any view of it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A wish: nothing depends on large pages.
    with contextlib.suppress(OSError):
        whole.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(whole, dtype=torch.uint8)
