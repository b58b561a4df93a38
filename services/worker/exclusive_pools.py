"""KV pools of both layouts of which one has memory at a time, each in its own range of addresses.

Where both pools fit, both stay resident and nothing of this is needed. Otherwise a flip takes the memory from one range
and puts it under the other, at the seam; block ids, views and captured graphs stay valid. Boot goes the same way, else
its peak, the sum of both, would cap the budget for ever. Never moves a row: rows are packed before the seam and
scattered after it, by others; `Seam` keeps the order. Order in memory, outermost first: layer, keys then values, block,
KV head, slot, element.

Invariants: at most one layout holds pages; nothing is released before the other's pages are known to fit; freshly
backed rows read as zero; a pool without pages is never touched.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.worker.backing import Backing, BackingError, MissingMemoryError

POLL_S = 0.005
"""Between two looks at free memory, which others release without telling."""


class PoolRefusedError(BackingError):
    """What was asked would lose rows or touch a pool without pages; nothing was changed."""


class SeamFailedError(BackingError):
    """The source's pages are gone and the destination's cannot be had in time; `Seam.restore` is the way back."""


class PoolsLostError(BackingError):
    """No layout holds pages and the restored one cannot be backed: the generation ends, its requests are recomputed."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A rank's part of the pool under one layout."""

    num_layers: int
    num_kv_heads: int
    """Of this rank; 0: it holds no rows."""
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def plane_block_bytes(self) -> int:
        """One block of one layer's keys, or of its values."""
        return self.num_kv_heads * BLOCK_SLOTS * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """One block over the rank's layers, keys and values."""
        return 2 * self.num_layers * self.plane_block_bytes


def capacity_blocks(
    budget_bytes: int, shapes: Mapping[LayoutKind, PoolShape], piece_bytes: int, *, exclusive: bool
) -> int:
    """Blocks that one rank's budget holds in either layout: the larger pool counts if exclusive, else the sum.

    The group's capacity is the least over its ranks. Raises PoolRefusedError if no rank's pool has bytes to count.
    """
    sizes = [shape.block_bytes for shape in shapes.values()]
    if not any(sizes):
        raise PoolRefusedError("this rank holds no KV rows in any layout: its budget does not bind, leave it out")
    if exclusive:
        return budget_bytes // piece_bytes * piece_bytes // max(sizes)
    rounding = (len(sizes) - 1) * (piece_bytes - 1)
    return max(budget_bytes - rounding, 0) // piece_bytes * piece_bytes // sum(sizes)


@dataclass(frozen=True, slots=True)
class PoolViews:
    """By the rank's own count of layers, each [num_blocks, num_kv_heads, 16, head_dim], contiguous."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class ExclusivePools:
    """Two ranges, one memory; `held` says whose."""

    def __init__(
        self, backings: Mapping[LayoutKind, Backing], shapes: Mapping[LayoutKind, PoolShape], num_blocks: int
    ) -> None:
        """`num_blocks`: the ids that the allocator can issue, which both pools hold.

        Raises:
            PoolRefusedError: a range is smaller than that.
        """
        self.num_blocks, self.shapes = num_blocks, dict(shapes)
        self.held: LayoutKind | None = None
        self._backings = dict(backings)
        for kind, shape in shapes.items():
            needed, room = num_blocks * shape.block_bytes, backings[kind].num_bytes
            if needed > room:
                raise PoolRefusedError(
                    f"the {kind.name} pool's {room} bytes hold {room // shape.block_bytes} blocks, the allocator "
                    f"issues {num_blocks}: raise the budget, or cap pool.num_blocks"
                )
        self.views = {kind: self._views(kind) for kind in shapes}
        """Handed out once; valid across flips, to be touched while `held` is their layout."""

    def pool_bytes(self, kind: LayoutKind) -> int:
        """What a layout's pool takes while it is held whole: whole pieces."""
        piece = self._backings[kind].piece_bytes
        return -(-self.num_blocks * self.shapes[kind].block_bytes // piece) * piece

    def build(self, order: tuple[LayoutKind, ...], on_backed: Callable[[LayoutKind, PoolViews], None]) -> None:
        """Boot: backs each layout alone for `on_backed` (graphs, warm-up), then the first again, all zero.

        `order`: the layout to serve first, then the others. Raises MissingMemoryError, with nothing held.
        """
        try:
            for kind in order:
                self._back(kind)
                on_backed(kind, self.views[kind])
                self._release(kind)
            self._back(order[0])
        except BaseException:
            for kind in order:
                self._release(kind)
            raise

    def shortage_bytes(self, to: LayoutKind) -> int:
        """By how much free memory falls short of the seam, margin included; 0: it fits. A rank's verdict on a flip."""
        held = 0 if self.held is None or self.held is to else self._backings[self.held].backed_bytes
        destination = self._backings[to]
        needed = destination.missing_bytes(0, self.pool_bytes(to)) - held
        if needed <= 0:
            return 0
        return max(needed + destination.margin_bytes - destination.free_bytes(), 0)

    def wait_for_room(self, to: LayoutKind, deadline_s: float) -> None:
        """Returns once a seam would fit; before anything irreversible.

        Raises:
            MissingMemoryError: it did not within `deadline_s`; the flip is to be abandoned, serving goes on.
        """
        for last in _until(deadline_s):
            shortage = self.shortage_bytes(to)
            if not shortage:
                return
            if last:
                backing = self._backings[to]
                raise MissingMemoryError(
                    backing.name,
                    self.pool_bytes(to),
                    backing.free_bytes(),
                    backing.margin_bytes,
                    f" beside what the other pool would release, {shortage} too few after {deadline_s} s",
                )

    def open_seam(self, to: LayoutKind) -> "Seam":
        """The way to the other layout. Raises PoolRefusedError if it is held already or nothing is."""
        if self.held is None or self.held is to:
            held = "nothing" if self.held is None else self.held.name
            raise PoolRefusedError(
                f"a seam to {to.name} needs the other layout's pages, {held} is held: refetch the layout"
            )
        return Seam(self, self.held, to)

    def flush(self) -> int:
        """Zeroes the pool that holds pages, those of its pages that are backed; returns their bytes."""
        if self.held is None:
            return 0
        backing, num_bytes = self._backings[self.held], 0
        for begin, end in self._backed_runs(self.held):
            backing.flat[begin:end].zero_()
            num_bytes += end - begin
        return num_bytes

    def release_above(self, num_blocks: int, own_live_blocks: int) -> int:
        """Releases pages that hold only rows of blocks from `num_blocks` on; returns their bytes.

        `own_live_blocks`: one above the highest block that this rank itself knows of, in its block tables and in a
        pending FLIP entry.

        Raises:
            PoolRefusedError: that is above `num_blocks`; nothing was released.
        """
        if num_blocks < own_live_blocks:
            raise PoolRefusedError(
                f"blocks from {num_blocks} on are to be released, this rank knows of live ones below {own_live_blocks}"
                ": the caller's live set leaves some out"
            )
        if self.held is None:
            return 0
        backing, piece = self._backings[self.held], self._backings[self.held].piece_bytes
        block, plane = self._plane_bytes(self.held)
        freed = 0
        for start in range(0, 2 * self.shapes[self.held].num_layers * plane, max(plane, 1)):
            begin = -(-(start + num_blocks * block) // piece) * piece
            end = (start + plane) // piece * piece
            freed += backing.release(begin, end) if begin < end else 0
        return freed

    def back_all(self) -> int:
        """Backs what `release_above` released; returns its bytes. Raises MissingMemoryError, with nothing changed."""
        return 0 if self.held is None else self._backings[self.held].back(0, self.pool_bytes(self.held))

    def held_bytes(self) -> int:
        """Memory of both ranges, by the system's account."""
        return sum(backing.held_bytes() for backing in self._backings.values())

    def _back(self, kind: LayoutKind) -> None:
        assert self.held in (None, kind), "one layout holds pages at a time"
        self._backings[kind].back(0, self.pool_bytes(kind))
        self.held = kind

    def _release(self, kind: LayoutKind) -> None:
        self._backings[kind].release(0, self._backings[kind].num_bytes)
        if self.held is kind:
            self.held = None

    def _plane_bytes(self, kind: LayoutKind) -> tuple[int, int]:
        """Of one block in a plane, and of a plane."""
        block = self.shapes[kind].plane_block_bytes
        return block, block * self.num_blocks

    def _backed_runs(self, kind: LayoutKind) -> Iterator[tuple[int, int]]:
        backing = self._backings[kind]
        for begin in range(0, self.pool_bytes(kind), backing.piece_bytes):
            if backing.is_backed(begin, begin + backing.piece_bytes):
                yield begin, begin + backing.piece_bytes

    def _views(self, kind: LayoutKind) -> PoolViews:
        shape = self.shapes[kind]
        extents = (shape.num_layers, 2, self.num_blocks, shape.num_kv_heads, BLOCK_SLOTS, shape.head_dim)
        planes = self._backings[kind].tensor(shape.dtype, extents)
        return PoolViews(tuple(layer[0] for layer in planes), tuple(layer[1] for layer in planes))


class SeamStep(Enum):
    """Where a seam stands. Rows are read in the first, written in the third."""

    READING = "reading"
    """The source holds its pages; live rows are being packed."""
    RELEASED = "released"
    """No pool holds pages; the packed rows are the only copy."""
    BACKED = "backed"
    """The destination's pages are there and read as zero; packed rows may be written, and are kept."""
    RESTORED = "restored"
    """The source's pages are there and read as zero; packed rows are written back."""
    COMMITTED = "committed"
    """Verified; packed rows may be dropped."""


class Seam:
    """One passage of the memory from one layout's pool to the other's; reads before writes, by its steps.

    Packed rows must be kept until `committed`, or until they are written back after `restore`.
    """

    def __init__(self, pools: ExclusivePools, source: LayoutKind, destination: LayoutKind) -> None:
        self.source, self.destination, self.step = source, destination, SeamStep.READING
        self._pools = pools

    def release_source(self) -> None:
        """All live rows are packed: gives the source's pages back. A group does this on all ranks before any backs.

        Raises:
            MissingMemoryError: the destination would not fit; the source still has its pages and rows.
        """
        self._check(SeamStep.READING)
        self._pools.wait_for_room(self.destination, deadline_s=0)
        self._pools._release(self.source)
        self.step = SeamStep.RELEASED

    def back_destination(self, deadline_s: float) -> None:
        """Puts pages under the destination, as soon as there are enough.

        Raises:
            SeamFailedError: there were not within `deadline_s`; `restore` next.
        """
        self._check(SeamStep.RELEASED)
        try:
            _back_within(self._pools, self.destination, deadline_s)
        except MissingMemoryError as error:
            raise SeamFailedError(
                f"no pages for {self.destination.name} within {deadline_s} s, restore: {error}"
            ) from error
        self.step = SeamStep.BACKED

    def restore(self, deadline_s: float) -> None:
        """Puts pages under the source again; its packed rows are to be written back.

        Raises:
            PoolsLostError: there are none within `deadline_s`.
        """
        self._check(SeamStep.RELEASED, SeamStep.BACKED)
        self._pools._release(self.destination)
        try:
            _back_within(self._pools, self.source, deadline_s)
        except MissingMemoryError as error:
            raise PoolsLostError(
                f"{self.destination.name} was not to be had and {self.source.name} cannot be backed again within "
                f"{deadline_s} s: the generation ends and its requests are recomputed: {error}"
            ) from error
        self.step = SeamStep.RESTORED

    def commit(self) -> None:
        """Every rank has verified what was written."""
        self._check(SeamStep.BACKED)
        self.step = SeamStep.COMMITTED

    def _check(self, *expected: SeamStep) -> None:
        if self.step not in expected:
            wanted = " or ".join(step.name for step in expected)
            raise PoolRefusedError(
                f"the seam {self.source.name} to {self.destination.name} is {self.step.name}, {wanted} is needed: rows "
                "are read before the release and written after the backing"
            )


def _back_within(pools: ExclusivePools, kind: LayoutKind, deadline_s: float) -> None:
    for last in _until(deadline_s):
        try:
            pools._back(kind)
            return
        except MissingMemoryError:
            if last:
                raise


def _until(deadline_s: float) -> Iterator[bool]:
    """Yields False until a deadline and True once after it: at least one try, and a last one that may complain."""
    end_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while time.monotonic() < end_s:
        yield False
        pause.wait(POLL_S)
    yield True
