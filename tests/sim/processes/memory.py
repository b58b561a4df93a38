"""Where a rank's rows and weights are, as lists, and what each ask of a flip's work does to them: performer of asks.

A rank has a plane of rows for each layout: under PP its own layers of every head, under TP its heads of every layer.
Weights are whole or they are not: in `shared` and `dual` mode both layouts' are there, else one arena holds one layout
or, while a flip is at work, neither. Where pools take turns each block has pages in one layout at a time. The order of
asks is the shipped program's (services/core/flip/work); there is none here. What goes wrong is put in where it happens,
and does its damage, so that a program that does not look finds out later.

A holder is what else keeps a layout on a rank. A layout that is read while it is not whole is a violation.
"""

from collections.abc import Callable, Generator
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from services.core.flip.work import Outcome, Program, RowsKind, WeightsKind, settle
from services.core.flip.work_asks import (
    GROUP_ASKS,
    Agree,
    Ask,
    CheckWeights,
    CompareRows,
    FillWeights,
    HaveWeights,
    KeepRows,
    LookForRoom,
    PassRows,
    ReadRows,
    TradePages,
    TrimPages,
    WriteKeptRows,
    WriteRows,
)
from services.core.flip.work_table import WELL, Answer, Verdict
from services.core.ids import BLOCK_SLOTS, Epoch, LayoutKind
from services.core.step import FlipEntry
from tests.sim.processes.world import InvariantError

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess

NUM_PHASES = 2
"""Of an exchange: a rank can be between any two."""
NUM_BATCHES = 2
"""Of rows that go between pools in turns: what is under way is bounded, whatever is live."""
DAMAGED = -1
"""A row that is not what was sent."""

Plane = list[int | None]
Rows = list[list[int | None]]
Work = Generator[tuple[Any, ...], Any, None]
Worked = Generator[tuple[Any, ...], Any, Outcome]
Answering = Generator[tuple[Any, ...], Any, Answer]


class Mode(Enum):
    """How a group keeps its weights."""

    SHARED = "shared"
    DUAL = "dual"
    EXCHANGE = "exchange"
    IMAGE = "image"


WEIGHTS_KINDS = {
    Mode.SHARED: WeightsKind.KEPT,
    Mode.DUAL: WeightsKind.KEPT,
    Mode.EXCHANGE: WeightsKind.EXCHANGED,
    Mode.IMAGE: WeightsKind.FILLED,
}


class Slip(Enum):
    """What goes wrong in a flip's work on one rank."""

    ROOM = "there is no room"
    ROWS = "rows are not what was sent"
    WRITTEN = "rows do not lie as they came"
    WEIGHTS = "weights are not what was loaded"
    UNFORESEEN = "something that nobody foresaw"


Held = tuple[LayoutKind, Epoch]


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
        self.weights = WEIGHTS_KINDS[mode]
        self.rows = RowsKind.TURNS if is_exclusive else RowsKind.SHARED if mode is Mode.SHARED else RowsKind.PAIR
        self.active: LayoutKind | None = kind
        """Whose weights the arena holds, where there is one."""
        self.pages: list[LayoutKind | None] = [kind] * (num_slots // BLOCK_SLOTS)
        """Of each block, where pools take turns: in which layout it has them."""
        self._outcome: Outcome | None = None
        """Of the work that was done last."""
        self._kept: Rows = []
        self._taken: Rows = []
        """Of the batch that is under way."""
        self._is_damaged = False
        """Whether the weights that came are not what was loaded."""
        self._breaks_at = -1
        """At which of the asks among ranks, counted down, something happens that nobody foresaw; below 0: at none."""

    def slots(self, kind: LayoutKind) -> Plane:
        """The plane of a layout that is read or written in full."""
        if self.weights is not WeightsKind.KEPT and self.active is not kind:
            self._half(kind, f"weights are those of {self.active and self.active.value}")
        if self.is_exclusive and self.pages.count(kind) < len(self.pages):
            self._half(kind, f"blocks have pages in {[there and there.value for there in self.pages]}")
        return self.planes[kind]

    def _half(self, kind: LayoutKind, what: str) -> None:
        raise InvariantError("half a layout", f"{kind.value} is in force, its {what}")

    @property
    def slips(self) -> tuple[Slip, ...]:
        """What can go wrong in memory of this kind, and be undone."""
        of_rows = {RowsKind.SHARED: (), RowsKind.PAIR: (Slip.ROWS,), RowsKind.TURNS: (Slip.ROWS, Slip.WRITTEN)}
        of_weights = () if self.weights is WeightsKind.KEPT else (Slip.WEIGHTS,)
        return (Slip.ROOM, *of_rows[self.rows], *of_weights)

    # The shipped programs, asked and answered.

    def work(self, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Worked:
        """From ENTER to what the mover is told."""
        program = rank.group.parts.work(self.weights, self.rows, flip.target, NUM_BATCHES)
        self._breaks_at = rank.world.rng.randrange(8) if slip is Slip.UNFORESEEN and program.meets else -1
        self._is_damaged = False
        self._outcome = yield from self._carry_out(program.run(), rank, flip, slip)
        return self._outcome

    def settle(self, rank: "RankProcess", flip: FlipEntry, kind: LayoutKind) -> Worked:
        """Behind an outcome: `kind` is in force."""
        outcome = yield from self._carry_out(settle(self.weights, self.rows, kind, self._outcome), rank, flip, None)
        self._outcome = None
        return outcome

    def _carry_out(self, program: Program, rank: "RankProcess", flip: FlipEntry, slip: Slip | None) -> Worked:
        try:
            ask = next(program)
            while True:
                ask = program.send((yield from self._answer(rank, flip, ask, slip)))
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome

    def _answer(self, rank: "RankProcess", flip: FlipEntry, ask: Ask, slip: Slip | None) -> Answering:
        if self._breaks_at >= 0 and isinstance(ask, GROUP_ASKS):
            self._breaks_at -= 1
            if self._breaks_at < 0:
                return Answer(Verdict.UNKNOWN, Slip.UNFORESEEN.value)
        return (yield from self._PERFORMS[type(ask)](self, rank, flip, ask, slip))

    def look(self, rank: "RankProcess", flip: FlipEntry, ask: LookForRoom, slip: Slip | None) -> Answering:
        """Nothing is touched."""
        yield (rank.compute, len(live_blocks(flip)))
        rank.group.moment("read")
        if slip is Slip.ROOM:
            return Answer(Verdict.FAILED_HERE, slip.value)
        if slip is Slip.UNFORESEEN and self.rows is RowsKind.SHARED and self.weights is WeightsKind.KEPT:
            return Answer(Verdict.UNKNOWN, slip.value)
        return WELL

    def agree(self, rank: "RankProcess", flip: FlipEntry, ask: Agree, slip: Slip | None) -> Answering:
        """One verdict for all ranks."""
        assert rank.plane is not None
        what = ("verdict", ask.about.value, ask.batch, flip.flip_id)
        verdicts = yield (rank.plane.join, rank.rank, what, ask.failure)
        if ask.failure:
            return Answer(Verdict.FAILED_HERE, ask.failure)
        wrong = next((f"rank {number}: {said}" for number, said in enumerate(verdicts) if said), None)
        return WELL if wrong is None else Answer(Verdict.FAILED_ELSEWHERE, wrong)

    # Rows.

    def read(self, rank: "RankProcess", flip: FlipEntry, ask: ReadRows, slip: Slip | None) -> Answering:
        """Copies of own rows, kept beside the pools."""
        self._kept = self.packed(ask.toward.other, self.live(flip, ask.batch))
        yield from ()
        return WELL

    def packed(self, kind: LayoutKind, blocks: list[int]) -> Rows:
        """Copies of rows, which must have pages."""
        if self.is_exclusive and any(self.pages[block] is not kind for block in blocks):
            self._half(kind, "rows are read where they have no pages")
        source = self.planes[kind]
        return [source[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] for block in blocks]

    def pass_rows(self, rank: "RankProcess", flip: FlipEntry, ask: PassRows, slip: Slip | None) -> Answering:
        """Every rank has the others' part; with both pools there, it is written at once."""
        assert rank.plane is not None
        what = ("rows", ask.batch, ask.toward.value, flip.flip_id)
        everyones = yield (rank.plane.join, rank.rank, what, self._kept)
        rank.check_equal("rows of the other ranks", 0, everyones, [self._kept] * len(everyones))
        self._taken = list(self._kept)
        if self._slips_here(flip, ask.batch, ask.toward, slip, Slip.ROWS):
            self._taken = [[DAMAGED] * BLOCK_SLOTS for _ in self._taken]
        if self.rows is RowsKind.PAIR:
            self.planes[ask.toward] = [None] * self._num_slots
            yield (rank.compute, len(self._kept))
            self._write(ask.toward, self.live(flip, ask.batch), self._taken)
            rank.group.moment("written")
        return WELL

    def _slips_here(self, flip: FlipEntry, batch: int, toward: LayoutKind, slip: Slip | None, what: Slip) -> bool:
        """In the last batch on its way there, so that others have gone before it."""
        is_last = batch == NUM_BATCHES - 1 or self.rows is RowsKind.PAIR
        return slip is what and toward is flip.target and is_last

    def compare(self, rank: "RankProcess", flip: FlipEntry, ask: CompareRows, slip: Slip | None) -> Answering:
        """Where pools take turns everybody sees every pair of ranks, else each sees what came to it."""
        assert rank.plane is not None
        own = self._slips_here(flip, ask.batch, ask.toward, slip, Slip.ROWS)
        what = ("sums", ask.batch, ask.toward.value, flip.flip_id)
        everyones = yield (rank.plane.join, rank.rank, what, own)
        is_wrong = any(everyones) if self.rows is RowsKind.TURNS else own
        return Answer(Verdict.FAILED_HERE, Slip.ROWS.value) if is_wrong else WELL

    def trim(self, rank: "RankProcess", flip: FlipEntry, ask: TrimPages, slip: Slip | None) -> Answering:
        """What the pool had of the batch is gone."""
        self._give_up(ask.layout, self.batch(ask.batch))
        rank.group.moment("seam")
        yield from ()
        return WELL

    def _give_up(self, kind: LayoutKind, blocks: range) -> None:
        for block in blocks:
            if self.pages[block] is kind:
                self.pages[block] = None
            self.planes[kind][block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] = [None] * BLOCK_SLOTS

    def write(self, rank: "RankProcess", flip: FlipEntry, ask: WriteRows, slip: Slip | None) -> Answering:
        """What came, where the other layout has it."""
        live, rows = self.live(flip, ask.batch), self._taken
        yield (rank.compute, len(live))
        is_wrong = self._slips_here(flip, ask.batch, ask.toward, slip, Slip.WRITTEN)
        if is_wrong:
            rows = [[DAMAGED] * BLOCK_SLOTS for _ in rows]
        self._take_pages(ask.toward, self.batch(ask.batch))
        self._write(ask.toward, live, rows)
        rank.group.moment("written")
        return Answer(Verdict.FAILED_HERE, Slip.WRITTEN.value) if is_wrong else WELL

    def write_kept(self, rank: "RankProcess", flip: FlipEntry, ask: WriteKeptRows, slip: Slip | None) -> Answering:
        """What was kept, where it was; pages for it may be others' by now."""
        if rank.breaks():
            return Answer(Verdict.FAILED_HERE, "rows that were kept cannot be written back")
        self._take_pages(ask.layout, self.batch(ask.batch))
        self._write(ask.layout, self.live(flip, ask.batch), self._kept)
        yield from ()
        return WELL

    def _take_pages(self, kind: LayoutKind, blocks: range) -> None:
        for block in blocks:
            self.pages[block] = kind

    def _write(self, kind: LayoutKind, blocks: list[int], rows: Rows) -> None:
        plane = self.planes[kind]
        for block, row in zip(blocks, rows, strict=True):
            plane[block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS] = row

    def batch(self, number: int) -> range:
        """Its blocks: the pool's, cut in rising parts."""
        size = -(-len(self.pages) // NUM_BATCHES)
        return range(number * size, min((number + 1) * size, len(self.pages)))

    def live(self, flip: FlipEntry, number: int) -> list[int]:
        """Its live ones; with both pools there one batch has all."""
        blocks = live_blocks(flip)
        return blocks if self.rows is RowsKind.PAIR else [block for block in blocks if block in self.batch(number)]

    def keep(self, rank: "RankProcess", flip: FlipEntry, ask: KeepRows, slip: Slip | None) -> Answering:
        """A layout is in force: its rows are here or nowhere, and the other pool is forgotten."""
        yield from ()
        if self.rows is RowsKind.TURNS and self.pages.count(ask.layout) < len(self.pages):
            return Answer(Verdict.FAILED_HERE, f"rows of {ask.layout.value} have no pages")
        if self.rows is RowsKind.PAIR:
            self.planes[ask.layout.other] = [None] * self._num_slots
        return WELL

    # Weights.

    def trade(self, rank: "RankProcess", flip: FlipEntry, ask: TradePages, slip: Slip | None) -> Answering:
        """Pages change places between all ranks."""
        assert rank.plane is not None
        for phase in range(NUM_PHASES):
            self.active = None
            yield (rank.plane.join, rank.rank, ("pages", phase, ask.toward.value, flip.flip_id), None)
            rank.group.moment("pages")
        yield (rank.compute, NUM_PHASES)
        # What was damaged on the way there is damaged when it is back: its first copy is written over.
        self._is_damaged = slip is Slip.WEIGHTS
        return WELL

    def check(self, rank: "RankProcess", flip: FlipEntry, ask: CheckWeights, slip: Slip | None) -> Answering:
        """By what was loaded."""
        yield from ()
        return self._checked(ask.layout)

    def _checked(self, kind: LayoutKind) -> Answer:
        if self._is_damaged:
            return Answer(Verdict.FAILED_HERE, Slip.WEIGHTS.value)
        self.active = kind
        return WELL

    def fill(self, rank: "RankProcess", flip: FlipEntry, ask: FillWeights, slip: Slip | None) -> Answering:
        """From a layout's image."""
        self.active = None
        rank.group.moment("pages")
        yield (rank.compute, NUM_PHASES)
        self._is_damaged = slip is Slip.WEIGHTS
        return self._checked(ask.layout)

    def have(self, rank: "RankProcess", flip: FlipEntry, ask: HaveWeights, slip: Slip | None) -> Answering:
        """From files or image, if they are whole."""
        if self.active is ask.layout:
            return WELL
        yield (rank.compute, NUM_PHASES)
        if rank.breaks():
            return Answer(Verdict.FAILED_HERE, f"the weights of {ask.layout.value} are not to be had")
        self._is_damaged = False
        self.active = ask.layout
        return WELL

    _PERFORMS: ClassVar[dict[type[Any], Callable[..., Answering]]] = {
        LookForRoom: lambda self, *at: self.look(*at),
        Agree: lambda self, *at: self.agree(*at),
        ReadRows: lambda self, *at: self.read(*at),
        PassRows: lambda self, *at: self.pass_rows(*at),
        CompareRows: lambda self, *at: self.compare(*at),
        TrimPages: lambda self, *at: self.trim(*at),
        WriteRows: lambda self, *at: self.write(*at),
        WriteKeptRows: lambda self, *at: self.write_kept(*at),
        KeepRows: lambda self, *at: self.keep(*at),
        TradePages: lambda self, *at: self.trade(*at),
        CheckWeights: lambda self, *at: self.check(*at),
        FillWeights: lambda self, *at: self.fill(*at),
        HaveWeights: lambda self, *at: self.have(*at),
    }


def live_blocks(flip: FlipEntry) -> list[int]:
    """Those whose rows must survive."""
    return [block for begin, length in flip.live_runs for block in range(begin, begin + length)]
