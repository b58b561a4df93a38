"""Memory under a reserved range of addresses: backed and released piece by piece, at addresses that never move.

A `Backing` decides (which pieces are missing, whether there is room, what is undone on failure) and counts; a `Pages`
does: one per kind of memory. Views are made over the whole range, once, and stay valid while pages come and go; a
view's bytes exist only while they are backed. Touching others ends the process: on no device is that a silent zero or
a silent growth. Never waits, and never chooses what to release. One thread at a time.

Invariants: pages that were freshly backed read as zero; a call that fails has changed nothing; memory that would leave
less free than the margin is refused before anything is asked of the system.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Protocol

import torch
from torch import Tensor

FreeBytes = Callable[[], int]
"""Free memory of the device at this moment; of a host: by its control group."""


class BackingError(RuntimeError):
    """A range that cannot be backed, released or seen as asked; the message has both numbers."""


class MissingMemoryError(BackingError):
    """There is no memory for a range, now; nothing was changed. It may be asked again once others have released."""

    def __init__(self, name: str, needed_bytes: int, free_bytes: int, margin_bytes: int, detail: str = "") -> None:
        super().__init__(
            f"{name}: {needed_bytes} bytes are to be backed and {margin_bytes} to stay free, {free_bytes} are free"
            f"{detail}: release another pool or image first, or lower the budget"
        )
        self.needed_bytes, self.free_bytes, self.margin_bytes = needed_bytes, free_bytes, margin_bytes


class Pages(Protocol):
    """Reserved addresses of one device and the means to put memory under them.

    In CUDA's words: reserve at construction; `provide` creates, maps, grants access and clears; `withdraw` unmaps and
    releases. There a piece is one allocation, which can only be released whole.
    """

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8: the whole range, whether backed or not."""

    @property
    def piece_bytes(self) -> int:
        """The least that can be backed or released."""

    def provide(self, begin: int, end: int) -> None:
        """Backs bytes [begin, end), whole pieces without memory, so that they read as zero.

        Raises OSError, with nothing backed, where the system has no memory.
        """

    def withdraw(self, begin: int, end: int) -> None:
        """Returns the memory of bytes [begin, end) to the system: whole pieces, all backed."""

    def held_bytes(self) -> int:
        """Memory of the range as the system counts it, not as this process remembers it."""

    def close(self) -> None:
        """Returns all memory; the addresses stay reserved while a view of them lives."""


class Backing:
    """A range of fixed size and address, of which some pieces have memory; at first none."""

    def __init__(self, name: str, pages: Pages, free_bytes: FreeBytes, margin_bytes: int) -> None:
        """`margin_bytes` must stay free on the device after any `back`."""
        self.name, self.margin_bytes = name, margin_bytes
        self._pages, self._free_bytes = pages, free_bytes
        self._is_backed = bytearray(pages.flat.numel() // pages.piece_bytes)
        """Of each piece: 1 or 0."""

    @property
    def num_bytes(self) -> int:
        """Bytes of address range, backed or not."""
        return self._pages.flat.numel()

    @property
    def address(self) -> int:
        """Of byte 0; never changes."""
        return self._pages.flat.data_ptr()

    @property
    def piece_bytes(self) -> int:
        """The unit of `back` and `release`."""
        return self._pages.piece_bytes

    @property
    def backed_bytes(self) -> int:
        """Memory held, by this range's own account."""
        return self._is_backed.count(1) * self.piece_bytes

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8: the whole range; only backed bytes may be touched."""
        return self._pages.flat

    def free_bytes(self) -> int:
        """Free memory of the device, now."""
        return self._free_bytes()

    def held_bytes(self) -> int:
        """Memory held, by the system's account."""
        return self._pages.held_bytes()

    def missing_bytes(self, begin: int, end: int) -> int:
        """What `back` of bytes [begin, end) would take from the system."""
        first, last = self._pieces(begin, end)
        return self._is_backed.count(0, first, last) * self.piece_bytes

    def is_backed(self, begin: int, end: int) -> bool:
        """Whether all bytes of [begin, end) have memory; any bytes, not only whole pieces."""
        self._check_inside(begin, end)
        first, last = begin // self.piece_bytes, -(-end // self.piece_bytes)
        return self._is_backed.count(0, first, last) == 0

    def check_room(self, needed_bytes: int) -> None:
        """Raises MissingMemoryError if `needed_bytes` more would leave less than the margin."""
        free = self._free_bytes()
        if needed_bytes and free - needed_bytes < self.margin_bytes:
            raise MissingMemoryError(self.name, needed_bytes, free, self.margin_bytes)

    def back(self, begin: int, end: int) -> int:
        """Puts memory under bytes [begin, end), whole pieces; those that have it keep it, and their content.

        Returns the bytes that were taken from the system. Raises MissingMemoryError, with nothing changed.
        """
        first, last = self._pieces(begin, end)
        runs = list(self._runs(0, first, last))
        needed = sum(stop - start for start, stop in runs) * self.piece_bytes
        self.check_room(needed)
        done: list[tuple[int, int]] = []
        try:
            for run in runs:
                self._provide(*run)
                done.append(run)
        except OSError as error:
            for run in done:
                self._withdraw(*run)
            detail = f", but the system has none ({error.strerror})"
            raise MissingMemoryError(self.name, needed, self._free_bytes(), self.margin_bytes, detail) from error
        return needed

    def release(self, begin: int, end: int) -> int:
        """Returns the memory of bytes [begin, end), whole pieces, to the system; their content is gone.

        Returns the bytes that were given back; pieces without memory are passed over.
        """
        before = self.backed_bytes
        for run in list(self._runs(1, *self._pieces(begin, end))):
            self._withdraw(*run)
        return before - self.backed_bytes

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> Tensor:
        """A view of `shape` at `offset_bytes`, backed or not; valid for the life of the range."""
        end = offset_bytes + prod(shape) * dtype.itemsize
        self._check_inside(offset_bytes, end)
        if offset_bytes % dtype.itemsize:
            raise BackingError(f"{self.name}: a view of {dtype} cannot begin at byte {offset_bytes}: align it")
        return self.flat[offset_bytes:end].view(dtype).view(shape)

    def close(self) -> None:
        """Returns all memory; views must not be touched from here on."""
        self._is_backed[:] = bytes(len(self._is_backed))
        self._pages.close()

    def _provide(self, first: int, last: int) -> None:
        self._pages.provide(first * self.piece_bytes, last * self.piece_bytes)
        self._is_backed[first:last] = b"\1" * (last - first)

    def _withdraw(self, first: int, last: int) -> None:
        self._pages.withdraw(first * self.piece_bytes, last * self.piece_bytes)
        self._is_backed[first:last] = bytes(last - first)

    def _runs(self, wanted: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Half-open runs of pieces within [first, last) that all are `wanted`."""
        start = self._is_backed.find(wanted, first, last)
        while start >= 0:
            stop = self._is_backed.find(1 - wanted, start, last)
            stop = last if stop < 0 else stop
            yield start, stop
            start = self._is_backed.find(wanted, stop, last)

    def _pieces(self, begin: int, end: int) -> tuple[int, int]:
        self._check_inside(begin, end)
        if begin % self.piece_bytes or end % self.piece_bytes:
            raise BackingError(
                f"{self.name}: bytes [{begin}, {end}) are not whole pieces of {self.piece_bytes}: round them outwards "
                "to back and inwards to release"
            )
        return begin // self.piece_bytes, end // self.piece_bytes

    def _check_inside(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.num_bytes:
            raise BackingError(f"{self.name}: bytes [{begin}, {end}) are not within its {self.num_bytes}")


MakeBacking = Callable[[str, int], Backing]
"""A named range of so many bytes, without memory yet."""


def whole_pieces(num_bytes: int, piece_bytes: int) -> int:
    """`num_bytes` rounded up to whole pieces; at least one, since a range cannot be empty."""
    return max(-(-num_bytes // piece_bytes), 1) * piece_bytes
