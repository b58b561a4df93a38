"""Pages of host memory: an anonymous file mapped whole, of which only what is backed has memory or may be touched.

Backing allocates in the file, so that a full system is an error here and not a signal at first touch; releasing takes
the right to touch away and punches a hole, which returns the memory at once, for every process that maps the file.
(MADV_DONTNEED on a shared mapping returns nothing.)

Invariants: a descriptor belongs to one `HostPages`, which begins with no page, whatever an earlier owner left there.
Whoever else maps it sees zeros in holes, and by touching one would allocate it again: peers map only what they use.
"""

import contextlib
import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

from services.worker.memory.pages.backing import BackingError, whole_pieces

PIECE_BYTES = 2 << 20
"""A huge page of x86-64 and the least that CUDA maps, so that both kinds of memory are counted alike."""
PROVIDE_STEP_BYTES = 64 << 20
"""Allocated by one call: a signal makes the kernel begin a call again, so a call must not be long."""

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Modes of fallocate (linux/falloc.h)."""
STAT_BLOCK_BYTES = 512


class HostPages:
    """[num_bytes] of reserved addresses over a memfd; see `backing.Pages`."""

    def __init__(self, name: str, num_bytes: int, fd: int | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        """`num_bytes` is rounded up to whole pieces. `fd`: an inherited memfd, emptied here; None: one of its own.

        Raises:
            BackingError: the range cannot be reserved, or the pieces are not whole pages.
        """
        if piece_bytes < mmap.PAGESIZE or piece_bytes % mmap.PAGESIZE:
            raise BackingError(f"{name}: pieces of {piece_bytes} bytes are not whole pages of {mmap.PAGESIZE}")
        self.name, self._piece_bytes = name, piece_bytes
        self._num_bytes = whole_pieces(num_bytes, piece_bytes)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = os.memfd_create(f"flipmesh-{name}", os.MFD_CLOEXEC) if fd is None else os.dup(fd)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            self._flat = self._reserve()
        except (OSError, ValueError) as error:
            self._close_fd()
            raise BackingError(
                f"{name}: {self._num_bytes} bytes of addresses cannot be reserved ({error}): raise the address space "
                "limit (ulimit -v) or lower the budget"
            ) from error

    def _reserve(self) -> Tensor:
        os.ftruncate(self._fd, max(os.fstat(self._fd).st_size, self._num_bytes))
        self._punch(0, self._num_bytes)
        whole = mmap.mmap(self._fd, self._num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # A wish: kernels that keep shared memory in small pages refuse it, and nothing depends on it.
        with contextlib.suppress(OSError):
            whole.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(whole, dtype=torch.uint8)
        self._protect(flat.data_ptr(), self._num_bytes, 0)
        return flat

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8; keeps the mapping alive."""
        return self._flat

    @property
    def piece_bytes(self) -> int:
        """A multiple of the system's page."""
        return self._piece_bytes

    @property
    def fd(self) -> int:
        """For peers to map; closed by `close`."""
        return self._fd

    def provide(self, begin: int, end: int) -> None:
        """Allocates bytes [begin, end), which are holes; OSError, with nothing allocated, if there is no memory."""
        try:
            for start in range(begin, end, PROVIDE_STEP_BYTES):
                os.posix_fallocate(self._fd, start, min(PROVIDE_STEP_BYTES, end - start))
            self._protect(self._flat.data_ptr() + begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self._punch(begin, end)
            raise

    def withdraw(self, begin: int, end: int) -> None:
        """Makes bytes [begin, end) a hole that this process cannot touch."""
        self._protect(self._flat.data_ptr() + begin, end - begin, 0)
        self._punch(begin, end)

    def held_bytes(self) -> int:
        """Blocks of the file, by the file system's count."""
        return os.fstat(self._fd).st_blocks * STAT_BLOCK_BYTES

    def close(self) -> None:
        """Empties the file and closes this descriptor of it; a second time it does nothing."""
        if self._close_fd.alive:
            self.withdraw(0, self._num_bytes)
            self._close_fd()

    def _punch(self, begin: int, end: int) -> None:
        size = ctypes.c_int64
        if self._libc.fallocate(self._fd, KEEP_SIZE | PUNCH_HOLE, size(begin), size(end - begin)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{self.name}: no hole at bytes [{begin}, {end}): {os.strerror(number)}")

    def _protect(self, address: int, num_bytes: int, rights: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), rights) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{self.name}: rights of {num_bytes} bytes: {os.strerror(number)}")
