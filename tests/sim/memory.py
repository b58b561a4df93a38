"""Where a rank's rows and weights are, by mode, and what a flip's work does to them: the bytes behind RESTORED.

A rank has a plane of rows for each layout: under PP its own layers of every head, under TP its heads of every layer.
Weights are whole or they are not: in `shared` and `dual` mode both layouts' are there, else one arena holds one layout
or, while a flip is at work, neither. Under exclusive backing one plane has pages at a time, passed on by the shipped
`Seam`. Steps and verdicts follow `services/worker/private`: what is the group's to say there is a group operation here.

A holder is what else keeps a layout on a rank. Never decides an outcome: `work` raises what a rank has to say, and
`settle` makes the layout in force whole or ends the rank. A layout that is read while it is not whole is a violation.
"""

from collections.abc import Generator
from enum import Enum
from typing import TYPE_CHECKING, Any

from services.core.ids import BLOCK_SLOTS, Epoch, FlipId, LayoutKind
from services.core.step import FlipEntry
from services.worker.exclusive_pools import Seam, SeamStep
from services.worker.holders import Held
from tests.sim.world import InvariantError

if TYPE_CHECKING:
    from tests.sim.rank import RankProcess

NUM_PHASES = 2
"""Of an exchange: a rank can be between any two."""

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


class RestorableError(Exception):
    """The layout in force is whole here, or can be made so."""


class LostError(Exception):
    """It cannot."""


class Pages:
    """Which plane has pages, as the shipped seam sees its pools."""

    def __init__(self, planes: dict[LayoutKind, Plane | None], num_slots: int) -> None:
        self._planes, self._num_slots = planes, num_slots

    def wait_for_room(self, kind: LayoutKind, deadline_s: float) -> None:
        """There is as much as one plane takes."""

    def _back(self, kind: LayoutKind) -> None:
        if self._planes[kind.other] is not None:
            raise InvariantError("one layout's pages", f"{kind.value} is backed while {kind.other.value} holds pages")
        self._planes[kind] = [None] * self._num_slots

    def _release(self, kind: LayoutKind) -> None:
        self._planes[kind] = None


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
        other = pool if mode is Mode.SHARED else None if is_exclusive else [None] * num_slots
        self.planes: dict[LayoutKind, Plane | None] = {kind: pool, kind.other: other}
        self.held: LayoutKind | None = kind
        """Whose weights the arena holds, where there is one."""
        self._pages = Pages(self.planes, num_slots)
        self.seam: Seam | None = None
        self.kept: tuple[list[int], Rows] = ([], [])
        """Blocks and what was packed of them, until the outcome: behind the seam the only copy."""

    def slots(self, kind: LayoutKind) -> Plane:
        """The plane of a layout that is read or written in full."""
        plane = self.planes[kind]
        has_weights = self.mode in (Mode.SHARED, Mode.DUAL) or self.held is kind
        if plane is None or not has_weights:
            what = "rows have no pages" if plane is None else f"weights are those of {self.held and self.held.value}"
            raise InvariantError("half a layout", f"{kind.value} is in force, its {what}")
        return plane

    # A flip's work.

    def work(self, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Work:
        """Read, seam, write, verify; ends with the other layout whole beside the one in force.

        Raises:
            RestorableError, LostError: it does not.
        """
        blocks = [block for begin, length in flip.live_runs for block in range(begin, begin + length)]
        yield (rank.compute, len(blocks))
        rank.group.moment("read")
        try:
            if self.mode is not Mode.SHARED:
                yield from self._move_rows(rank, flip, blocks, slip)
            if self.mode is Mode.EXCHANGE:
                yield from self._exchange(rank, flip, slip)
            elif self.mode is Mode.IMAGE:
                yield from self._refill(rank, flip, slip)
            elif slip in (Slip.ROWS, Slip.WEIGHTS):
                raise RestorableError(slip.value)
        except RestorableError:
            self._restore_rows()
            raise
        if slip is Slip.LATE:
            raise RestorableError(slip.value)

    def _move_rows(self, rank: "RankProcess", flip: FlipEntry, blocks: list[int], slip: Slip | None) -> Work:
        assert rank.plane is not None
        packed = self._packed(flip.target.other, blocks)
        everyones = yield (rank.plane.join, rank.rank, ("rows", flip.flip_id), packed)
        rank.check_equal("rows of the other ranks", flip.flip_id, everyones, [packed] * len(everyones))
        if self.is_exclusive:
            yield from self._cross(rank, flip, blocks, packed)
        else:
            self.planes[flip.target] = [None] * self._num_slots
        yield (rank.compute, len(blocks))
        self._write(flip.target, blocks, packed)
        rank.group.moment("written")
        yield (rank.plane.join, rank.rank, ("sums", flip.flip_id), None)
        failure = slip if slip is Slip.ROWS else None
        if self.mode is Mode.DUAL:
            # Each rank compares for itself: the layout before is as it was on all of them.
            if failure is not None:
                raise RestorableError(failure.value)
        else:
            yield from self.agree(rank, ("rows are right", flip.flip_id), failure)

    def _packed(self, kind: LayoutKind, blocks: list[int]) -> Rows:
        source = self.slots(kind)
        return [source[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] for block in blocks]

    def _write(self, kind: LayoutKind, blocks: list[int], rows: Rows) -> None:
        plane = self.planes[kind]
        assert plane is not None, "written where there are pages"
        for block, row in zip(blocks, rows, strict=True):
            plane[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] = row

    def _cross(self, rank: "RankProcess", flip: FlipEntry, blocks: list[int], packed: Rows) -> Work:
        """The seam: every rank has released before any backs."""
        assert rank.plane is not None
        self.kept = (blocks, packed)
        self.seam = Seam(self._pages, flip.target.other, flip.target)  # type: ignore[arg-type]
        self.seam.release_source()
        rank.group.moment("seam")
        yield (rank.plane.join, rank.rank, ("released", flip.flip_id), None)
        self.seam.back_destination(0)

    def agree(self, rank: "RankProcess", what: tuple[str, FlipId], failure: Slip | None) -> Work:
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

    def settle(self, rank: "RankProcess", kind: LayoutKind) -> None:
        """After an outcome: `kind` is in force, and whole.

        Raises:
            LostError: it cannot be had.
        """
        if self.held is not kind:
            self._settle_weights(rank, kind)
        if self.mode is Mode.SHARED:
            return
        if self.seam is not None and self.seam.source is kind:
            self._restore_rows()
        elif self.seam is not None:
            self.seam.commit()
        elif not self.is_exclusive:
            self.planes[kind.other] = [None] * self._num_slots
        self.seam, self.kept = None, ([], [])

    def _settle_weights(self, rank: "RankProcess", kind: LayoutKind) -> None:
        if self.mode in (Mode.EXCHANGE, Mode.IMAGE) and rank.breaks():
            raise LostError(f"the weights of {kind.value} are not to be had")
        self.held = kind

    def _restore_rows(self) -> None:
        """Behind the seam: the source's pages again, and what was packed of it."""
        seam = self.seam
        if seam is not None and seam.step in (SeamStep.RELEASED, SeamStep.BACKED):
            seam.restore(0)
            self._write(seam.source, *self.kept)
