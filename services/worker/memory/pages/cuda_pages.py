"""Pages of one CUDA device: addresses reserved once, under which allocations of one piece each are mapped and unmapped.

The second kind of memory under `Backing`; speaks to the driver itself, since torch's allocator neither reserves
addresses nor gives up memory under a view. Memory that the driver creates is not promised to be zero, so it is cleared
before anyone sees it. Work that may still touch a piece must have ended before it is withdrawn: withdrawing waits for
the device. Touching what is not backed ends the process's use of the device, as an illegal access.

Invariants: a piece is one allocation, mapped whole; a call that fails leaves none behind; allocations stay in this
process.
"""

import ctypes
import errno
import weakref

import torch
from torch import Tensor

from services.worker.memory.pages.backing import BackingError, whole_pieces

PIECE_BYTES = 64 << 20
"""A multiple of what devices map at a time (2 MiB). Each piece costs the driver its calls: 8 GiB on an H200 are backed
in 154 ms by pieces of 2 MiB, in 20 by 16 and in 6 by 64, and released in 127, 21 and 8; clearing takes 2.5 more."""

LEAST_PIECE_BYTES = 2 << 20
"""What devices map at a time."""

OUT_OF_MEMORY = 2
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""CUmemAllocationType, CUmemLocationType, CUmemAccess_flags."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("security_attributes", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaPages:
    """[num_bytes] of reserved addresses of one device; see `backing.Pages`."""

    def __init__(self, name: str, num_bytes: int, device: int, piece_bytes: int = PIECE_BYTES) -> None:
        """`num_bytes` is rounded up to whole pieces. `device`: torch's index; its context is made if there is none.

        Raises:
            BackingError: the pieces do not suit the device, or the range cannot be reserved.
        """
        self.name, self._device, self._piece_bytes = name, device, piece_bytes
        self._num_bytes = whole_pieces(num_bytes, piece_bytes)
        torch.empty(1, device=f"cuda:{device}")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._properties = _AllocationProperties(type=PINNED, location=_Location(ON_DEVICE, device))
        self._pieces: dict[int, int] = {}
        """Allocation of each backed piece, by its first byte."""
        try:
            granularity = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
            if piece_bytes < 1 or piece_bytes % granularity.value:
                raise BackingError(
                    f"{name}: pieces of {piece_bytes} bytes, the device maps {granularity.value} at a time"
                )
            address = ctypes.c_uint64()
            size = ctypes.c_size_t(self._num_bytes)
            self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), 0)
        except OSError as error:
            raise BackingError(f"{name}: {self._num_bytes} bytes of addresses cannot be reserved: {error}") from error
        self._address = address.value
        # Not through the array interface, which asks the driver what kind of memory is there: there is none yet.
        storage = torch._C._construct_storage_from_data_pointer(
            self._address, torch.device("cuda", device), self._num_bytes
        )
        flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
        self._flat = flat.set_(storage, 0, (self._num_bytes,), (1,))
        self._end = weakref.finalize(self, _withdraw_all, self._driver, self._pieces, self._address, piece_bytes)

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8 on the device."""
        return self._flat

    @property
    def piece_bytes(self) -> int:
        """Bytes of one allocation."""
        return self._piece_bytes

    def provide(self, begin: int, end: int) -> None:
        """Creates, maps and clears bytes [begin, end); OSError, with nothing mapped, if the device has no memory."""
        done = begin
        try:
            with torch.cuda.device(self._device):
                for done in range(begin, end, self._piece_bytes):
                    self._map(done)
                access = _Access(_Location(ON_DEVICE, self._device), READ_WRITE)
                place, size = ctypes.c_uint64(self._address + begin), ctypes.c_size_t(end - begin)
                self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
                self._flat[begin:end].zero_()
        except OSError:
            for start in range(begin, done + 1, self._piece_bytes):
                if start in self._pieces:
                    _unmap(self._driver, self._pieces, self._address, start, self._piece_bytes)
            raise

    def withdraw(self, begin: int, end: int) -> None:
        """Waits for the device, then unmaps and releases bytes [begin, end)."""
        torch.cuda.synchronize(self._device)
        for start in range(begin, end, self._piece_bytes):
            _unmap(self._driver, self._pieces, self._address, start, self._piece_bytes)

    def held_bytes(self) -> int:
        """Allocations mapped; the driver has no count by range."""
        return len(self._pieces) * self._piece_bytes

    def close(self) -> None:
        """Releases all memory; the addresses stay reserved until the process ends, so no view sees another's memory."""
        torch.cuda.synchronize(self._device)
        self._end()

    def _map(self, start: int) -> None:
        handle = ctypes.c_uint64()
        size, nothing = ctypes.c_size_t(self._piece_bytes), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), nothing)
        try:
            place = ctypes.c_uint64(self._address + start)
            self._call("cuMemMap", place, size, ctypes.c_size_t(0), handle, nothing)
        except OSError:
            self._call("cuMemRelease", handle)
            raise
        self._pieces[start] = handle.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            number = errno.ENOMEM if code == OUT_OF_MEMORY else errno.EIO
            raise OSError(number, f"{self.name}: {name} on device {self._device} failed with {code}")


def _unmap(driver: ctypes.CDLL, pieces: dict[int, int], address: int, start: int, piece_bytes: int) -> None:
    driver.cuMemUnmap(ctypes.c_uint64(address + start), ctypes.c_size_t(piece_bytes))
    driver.cuMemRelease(ctypes.c_uint64(pieces.pop(start)))


def _withdraw_all(driver: ctypes.CDLL, pieces: dict[int, int], address: int, piece_bytes: int) -> None:
    for start in list(pieces):
        _unmap(driver, pieces, address, start, piece_bytes)
