"""Where a rank's rows and weights are, by mode, and what a flip's work does to them: the bytes behind RESTORED.

A rank has a plane of rows for each layout: under PP its own layers of every head, under TP its heads of every layer.
Weights are whole or they are not: in `shared` and `dual` mode both layouts' are there, else one arena holds one layout
or, while a flip is at work, neither. Under exclusive backing each block has pages in one layout at a time, and a flip
goes through them window by window. Steps and verdicts follow `services/worker/memory`: what is the group's to say
there is a group operation here.

A holder is what else keeps a layout on a rank. Never decides an outcome: `work` raises what a rank has to say, and
`settle` makes the layout in force whole or ends the rank. A layout that is read while it is not whole is a violation.
"""

from collections.abc import Generator
from enum import Enum
from typing import TYPE_CHECKING, Any

from services.core.ids import BLOCK_SLOTS, Epoch, LayoutKind
from services.core.step import FlipEntry
from tests.sim.processes.world import InvariantError

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess

NUM_PHASES = 2
"""Of an exchange: a rank can be between any two."""
NUM_WINDOWS = 2
"""Of rows that pass the seam: what is under way is bounded, whatever is live."""

Plane = list[int | None]
Rows = list[list[int | None]]
Work = Generator[tuple[Any, ...], Any, None]


class Mode(Enum):
    """How a group keeps its weights."""

    SHARED = "shared"
    DUAL = "dual"
    EXCHANGE = "exchange"
    IMAGE = "image"


class Slip(Enum):
    """What goes wrong in a flip's work on one rank."""

    ROWS = "rows are not what was sent"
    WEIGHTS = "weights are not what was loaded"
    LATE = "something failed when all was done"


Held = tuple[LayoutKind, Epoch]


class RestorableError(Exception):
    """The layout in force is whole here, or can be made so."""


class LostError(Exception):
    """It cannot."""


class Holder:
    """Something of the worker that holds a layout: the stage, and what a speculation would have."""

    def __init__(self, name: str, held: Held) -> None:
        self.name, self.held = name, held

    def switch(self, kind: LayoutKind, epoch: Epoch) -> None:
        """Works under another layout from now on."""
        self.held = (kind, epoch)


class Memory:
    """One rank's, from RESET on."""

    def __init__(self, mode: Mode, kind: LayoutKind, num_slots: int, *, is_exclusive: bool) -> None:
        self.mode, self.is_exclusive, self._num_slots = mode, is_exclusive, num_slots
        pool: Plane = [None] * num_slots
        self.planes: dict[LayoutKind, Plane] = {kind: pool, kind.other: pool if mode is Mode.SHARED else list(pool)}
        self.held: LayoutKind | None = kind
        """Whose weights the arena holds, where there is one."""
        self.pages: list[LayoutKind | None] = [kind] * (num_slots // BLOCK_SLOTS)
        """Of each block, under exclusive backing: in which layout it has them."""

    def slots(self, kind: LayoutKind) -> Plane:
        """The plane of a layout that is read or written in full."""
        if self.mode in (Mode.EXCHANGE, Mode.IMAGE) and self.held is not kind:
            self._half(kind, f"weights are those of {self.held and self.held.value}")
        if self.is_exclusive and self.pages.count(kind) < len(self.pages):
            self._half(kind, f"blocks have pages in {[there and there.value for there in self.pages]}")
        return self.planes[kind]

    def _half(self, kind: LayoutKind, what: str) -> None:
        raise InvariantError("half a layout", f"{kind.value} is in force, its {what}")

    # A flip's work.

    def work(self, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Work:
        """Read, seam, write, verify; ends with the other layout whole beside the one in force.

        Raises:
            RestorableError, LostError: it does not.
        """
        blocks = live_blocks(flip)
        yield (rank.compute, len(blocks))
        rank.group.moment("read")
        if self.is_exclusive:
            yield from self._cross(rank, flip, blocks, slip)
        elif self.mode is not Mode.SHARED:
            yield from self._move_rows(rank, flip, blocks, slip)
        try:
            if self.mode is Mode.EXCHANGE:
                yield from self._exchange(rank, flip, slip)
            elif self.mode is Mode.IMAGE:
                yield from self._refill(rank, flip, slip)
        except RestorableError:
            if self.is_exclusive:
                yield from self._return(rank, flip, blocks)
            raise
        if slip is Slip.LATE or (slip is not None and self.mode in (Mode.SHARED, Mode.DUAL)):
            raise RestorableError(slip.value)

    def _move_rows(self, rank: "RankProcess", flip: FlipEntry, blocks: list[int], slip: Slip | None) -> Work:
        """Into a plane that is nobody's until COMMIT."""
        packed = yield from self._passed(rank, ("rows", flip.flip_id), flip.target.other, blocks)
        self.planes[flip.target] = [None] * self._num_slots
        yield (rank.compute, len(blocks))
        self._write(flip.target, blocks, packed)
        rank.group.moment("written")
        assert rank.plane is not None
        yield (rank.plane.join, rank.rank, ("sums", flip.flip_id), None)
        failure = slip if slip is Slip.ROWS else None
        if self.mode is Mode.DUAL:
            # Each rank compares for itself: the layout before is as it was on all of them.
            if failure is not None:
                raise RestorableError(failure.value)
        else:
            yield from self.agree(rank, ("rows are right", flip.flip_id), failure)

    def _passed(
        self, rank: "RankProcess", what: tuple[object, ...], kind: LayoutKind, blocks: list[int]
    ) -> Generator[tuple[Any, ...], Any, Rows]:
        """What is packed here of `kind`, when every rank has the others' part of it."""
        assert rank.plane is not None
        packed = self.packed(kind, blocks)
        everyones = yield (rank.plane.join, rank.rank, what, packed)
        rank.check_equal("rows of the other ranks", 0, everyones, [packed] * len(everyones))
        return packed

    def packed(self, kind: LayoutKind, blocks: list[int]) -> Rows:
        """Copies of rows, which must have pages."""
        if self.is_exclusive and any(self.pages[block] is not kind for block in blocks):
            self._half(kind, "rows are read where they have no pages")
        source = self.planes[kind]
        return [source[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] for block in blocks]

    def _write(self, kind: LayoutKind, blocks: list[int], rows: Rows) -> None:
        plane = self.planes[kind]
        for block, row in zip(blocks, rows, strict=True):
            plane[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] = row

    def _windows(self, blocks: list[int]) -> list[tuple[range, list[int]]]:
        """Every block of the pool, cut in rising windows, and the live ones of each."""
        size = -(-len(self.pages) // NUM_WINDOWS)
        cuts = [range(begin, min(begin + size, len(self.pages))) for begin in range(0, len(self.pages), size)]
        return [(cut, [block for block in blocks if block in cut]) for cut in cuts]

    def turn(self, kind: LayoutKind, window: range) -> None:
        """Pages of a window's blocks go to `kind`, where they read as nothing; what the other layout held is gone."""
        for block in window:
            self.pages[block] = kind
            for each in LayoutKind:
                self.planes[each][block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] = [None] * BLOCK_SLOTS

    def _cross(self, rank: "RankProcess", flip: FlipEntry, blocks: list[int], slip: Slip | None) -> Work:
        """The seam, window by window; where one fails it is restored, and those before go back the way they came."""
        gone: list[int] = []
        for number, (window, live) in enumerate(self._windows(blocks)):
            packed = yield from self._passed(rank, ("window", number, flip.flip_id), flip.target.other, live)
            self.turn(flip.target, window)
            rank.group.moment("seam")
            yield (rank.compute, len(live))
            self._write(flip.target, live, packed)
            rank.group.moment("written")
            failure = slip if slip is Slip.ROWS and number == NUM_WINDOWS - 1 else None
            try:
                yield from self.agree(rank, ("window is right", number, flip.flip_id), failure)
            except RestorableError:
                self.restore(flip.target.other, window, live, packed)
                yield from self._return(rank, flip, gone)
                raise
            gone += live

    def restore(self, kind: LayoutKind, window: range, live: list[int], packed: Rows) -> None:
        """A window that failed: what was packed of it is the only copy."""
        self.turn(kind, window)
        self._write(kind, live, packed)

    def _return(self, rank: "RankProcess", flip: FlipEntry, blocks: list[int]) -> Work:
        """All ranks: what has crossed comes back."""
        kind = flip.target.other
        for number, (window, live) in reversed(list(enumerate(self._windows(blocks)))):
            if self.pages[window.start] is not kind:
                packed = yield from self._passed(rank, ("window back", number, flip.flip_id), flip.target, live)
                self.restore(kind, window, live, packed)

    def agree(self, rank: "RankProcess", what: tuple[object, ...], failure: Slip | None) -> Work:
        """One verdict for all ranks."""
        assert rank.plane is not None
        verdicts = yield (rank.plane.join, rank.rank, what, failure)
        wrong = next((f"rank {number}: {said.value}" for number, said in enumerate(verdicts) if said), None)
        if wrong is not None:
            raise RestorableError(wrong)

    def _exchange(self, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Work:
        yield from self._pass_pages(rank, flip, "pages", range(NUM_PHASES))
        try:
            yield from self.agree(rank, ("pages are right", flip.flip_id), slip if slip is Slip.WEIGHTS else None)
        except RestorableError:
            yield from self._pass_pages(rank, flip, "pages back", reversed(range(NUM_PHASES)))
            self._take_back(rank, flip.target.other, is_damaged=slip is Slip.WEIGHTS)
            raise
        self.held = flip.target

    def _pass_pages(self, rank: "RankProcess", flip: FlipEntry, what: str, phases: Any) -> Work:
        assert rank.plane is not None
        for phase in phases:
            self.held = None
            yield (rank.plane.join, rank.rank, (what, phase, flip.flip_id), None)
            rank.group.moment("pages")
        yield (rank.compute, NUM_PHASES)

    def _refill(self, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Work:
        """From the other layout's image, or from this one's again."""
        self.held = None
        rank.group.moment("pages")
        yield (rank.compute, NUM_PHASES)
        try:
            yield from self.agree(rank, ("weights are right", flip.flip_id), slip if slip is Slip.WEIGHTS else None)
        except RestorableError:
            yield (rank.compute, NUM_PHASES)
            self._take_back(rank, flip.target.other, is_damaged=slip is Slip.WEIGHTS)
            raise
        self.held = flip.target

    def _take_back(self, rank: "RankProcess", kind: LayoutKind, *, is_damaged: bool) -> None:
        """The arena holds `kind` again; one that was damaged takes it from files or image, if they are whole."""
        if is_damaged and rank.breaks():
            raise LostError("what was active is not to be had again")
        self.held = kind

    # Outcomes.

    def settle(self, rank: "RankProcess", flip: FlipEntry, kind: LayoutKind) -> Work:
        """After a flip's outcome: `kind` is in force, and whole; all ranks do this, and meet where rows come back.

        Raises:
            LostError: it cannot be had.
        """
        if self.held is not kind:
            self._settle_weights(rank, kind)
        if self.is_exclusive and kind is not flip.target:
            yield from self._return(rank, flip, live_blocks(flip))
        if not self.is_exclusive and self.mode is not Mode.SHARED:
            self.planes[kind.other] = [None] * self._num_slots

    def _settle_weights(self, rank: "RankProcess", kind: LayoutKind) -> None:
        if self.mode in (Mode.EXCHANGE, Mode.IMAGE) and rank.breaks():
            raise LostError(f"the weights of {kind.value} are not to be had")
        self.held = kind


def live_blocks(flip: FlipEntry) -> list[int]:
    """Those whose rows must survive."""
    return [block for begin, length in flip.live_runs for block in range(begin, begin + length)]
