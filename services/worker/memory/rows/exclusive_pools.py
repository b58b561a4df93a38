"""KV pools of both layouts of one rank that share one memory, each in its own range of addresses.

Where both pools fit, both stay resident and nothing of this is needed. Otherwise a flip takes the memory from one range
and puts it under the other, some blocks at a time: what the one pool holds of them it gives up, then the other one gets
pages for them. Block ids and views stay valid. Never moves a row and never decides what goes: rows are packed before
their pages go and scattered after the others have come, by others (batch_mover).

Invariants: a block has pages in one layout at a time, but for pieces that lie across its borders; a pool's pages cover
the blocks that it is to hold; freshly backed pages read as zero; pages that are not backed are never touched.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.core.ids import LayoutKind
from services.core.layout import Span
from services.placement.rows.transfers import ALL_BLOCKS, BlockShare
from services.worker.memory.pages.backing import Backing, BackingError, MissingMemoryError

POLL_S = 0.005
"""Between two looks at free memory, which others release without telling."""
NOTHING = Span(0, 0)


class PoolRefusedError(BackingError):
    """Ranges that cannot hold every id; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """A rank's pool under one layout: as many planes, in each of which its blocks lie side by side."""

    num_planes: int
    """Keys and values of every layer."""
    block_bytes: int
    """Of one block in one plane; 0: the rank has no heads."""
    blocks: BlockShare = ALL_BLOCKS

    def num_bytes(self, num_blocks: int) -> int:
        """Of a pool for ids below `num_blocks`."""
        return self.num_planes * self.block_bytes * self.blocks.count(num_blocks)

    def pieces(self, held: Span, num_blocks: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields bytes of whole pieces, rising and disjoint, that have any row of the blocks `held`."""
        plane = self.block_bytes * self.blocks.count(num_blocks)
        first, last = (self.block_bytes * self.blocks.count(bound) for bound in (held.begin, held.end))
        begin, end = 0, 0
        for start in range(0, self.num_planes * plane if first < last else 0, max(plane, 1)):
            low, high = (start + first) // piece_bytes * piece_bytes, -(-(start + last) // piece_bytes) * piece_bytes
            if low > end:
                if begin < end:
                    yield begin, end
                begin = low
            end = high
        if begin < end:
            yield begin, end

    def gaps(self, held: Span, num_blocks: int, piece_bytes: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields the rest of `num_bytes`, rising and disjoint: bytes without any row of the blocks `held`."""
        begin = 0
        for first, end in (*self.pieces(held, num_blocks, piece_bytes), (num_bytes, num_bytes)):
            if begin < first:
                yield begin, first
            begin = end


class ExclusivePools:
    """Two ranges, one memory. One thread at a time."""

    def __init__(
        self, backings: Mapping[LayoutKind, Backing], shapes: Mapping[LayoutKind, PlaneShape], num_blocks: int
    ) -> None:
        """`num_blocks`: the ids that the allocator can issue, which both pools hold.

        Raises:
            PoolRefusedError: a range is smaller than that.
        """
        self.num_blocks, self._shapes, self._backings = num_blocks, dict(shapes), dict(backings)
        self.held = dict.fromkeys(shapes, NOTHING)
        """Of each layout's pool, the blocks that have pages."""
        for kind, shape in shapes.items():
            needed, room = shape.num_bytes(num_blocks), backings[kind].num_bytes
            if needed > room:
                raise PoolRefusedError(
                    f"the {kind.name} pool's {room} bytes are not the {needed} of the {num_blocks} blocks that the "
                    "allocator issues: raise the budget, or cap pool.num_blocks"
                )

    @property
    def every_block(self) -> Span:
        """What a pool holds that is in force."""
        return Span(0, self.num_blocks)

    @property
    def piece_bytes(self) -> int:
        """What both ranges are backed by at a time."""
        return max(backing.piece_bytes for backing in self._backings.values())

    def build(self, kind: LayoutKind) -> None:
        """Start: shows that each layout's pool can be had, one after the other; `kind` is held then, all zero.

        Raises:
            MissingMemoryError: one cannot; nothing is held.
        """
        try:
            for turn in (kind.other, kind):
                self.keep(turn.other, NOTHING)
                self.back(turn, self.every_block)
        except MissingMemoryError:
            for turn in (kind.other, kind):
                self.keep(turn, NOTHING)
            raise

    def back(self, kind: LayoutKind, blocks: Span) -> None:
        """Puts pages under a pool's rows of these blocks, where there are none.

        Raises:
            MissingMemoryError: there is no memory for them; nothing was changed.
        """
        before = self.held[kind]
        try:
            for begin, end in self._pieces(kind, blocks):
                self._backings[kind].back(begin, end)
        except MissingMemoryError:
            self.keep(kind, before)
            raise
        self.held[kind] = blocks

    def keep(self, kind: LayoutKind, blocks: Span) -> int:
        """Returns all pages of a pool that have no row of these blocks; their bytes."""
        backing, shape = self._backings[kind], self._shapes[kind]
        gaps = shape.gaps(blocks, self.num_blocks, backing.piece_bytes, backing.num_bytes)
        freed = sum(backing.release(begin, end) for begin, end in gaps)
        self.held[kind] = blocks
        return freed

    def wait_for_room(self, needed_bytes: int, margin_bytes: int, deadline_s: float) -> None:
        """Returns once so much is free and the margin besides; before anything irreversible.

        Raises:
            MissingMemoryError: it was not within `deadline_s`; the flip is to be abandoned, serving goes on.
        """
        backing = next(iter(self._backings.values()))
        for last in _until(deadline_s):
            free = backing.free_bytes()
            if free >= needed_bytes + margin_bytes:
                return
            if last:
                raise MissingMemoryError(
                    "KV pools at the seam", needed_bytes, free, margin_bytes, f" after {deadline_s:g} s"
                )

    def held_bytes(self) -> int:
        """Memory of both ranges, by the system's account."""
        return sum(backing.held_bytes() for backing in self._backings.values())

    def close(self) -> None:
        """Returns all memory; no view of it may be touched from here on."""
        for backing in self._backings.values():
            backing.close()

    def _pieces(self, kind: LayoutKind, blocks: Span) -> Iterator[tuple[int, int]]:
        return self._shapes[kind].pieces(blocks, self.num_blocks, self._backings[kind].piece_bytes)


def _until(deadline_s: float) -> Iterator[bool]:
    """Yields False until a deadline and True once after it: at least one try, and a last one that may complain."""
    end_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while time.monotonic() < end_s:
        yield False
        pause.wait(POLL_S)
    yield True
