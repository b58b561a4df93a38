"""A flip's work on one rank, and what its outcome leads to: programs that say in which order things are done. Pure.

A program yields asks and is sent what came of each; it ends with an outcome. Ranks perform the asks on memory
(`worker/memory/drive`), the simulator on lists: neither has an order of its own. What a rank's weights and rows are
kept as are two values; one program is composed from them. `work_table` says what each answer leads to.

Invariants: no page of the layout before is given up, and no weight written over, before all ranks have said that what
comes instead is right; rows that are on their way have a copy that nobody writes; `Restored` is returned only where
nothing was touched, or when everything that was asked on the way back has answered well.
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from services.core.flip.work_asks import (
    About,
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
from services.core.flip.work_table import WAYS, Answer, Phase, Verdict, Way, WayTable
from services.core.ids import LayoutKind


class WeightsKind(Enum):
    """How a rank keeps its weights."""

    KEPT = "kept"
    """Both layouts' are there, mapped or its own."""
    EXCHANGED = "exchanged"
    """One arena, whose pages are traded with the other ranks."""
    FILLED = "filled"
    """One arena, filled from images on this host."""


class RowsKind(Enum):
    """How a rank keeps its rows."""

    SHARED = "shared"
    """One pool that all ranks map."""
    PAIR = "pair"
    """A pool for each layout, both backed: the one in force is never written."""
    TURNS = "turns"
    """Two pools that share one memory: a block has pages in one of them at a time."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The layout after is whole here, as far as this rank knows."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The layout before is whole here, by evidence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """It is not, or nobody can say so."""

    reason: str


Outcome = Finished | Restored | Broken
Asking = Generator[Ask, Answer, None]
Program = Generator[Ask, Answer, Outcome]


class TurnedError(Exception):
    """An answer that does not lead on."""

    def __init__(self, way: Way, reason: str) -> None:
        super().__init__(reason)
        self.way, self.reason = way, reason


class FlipWork:
    """The work of one attempt on one rank, from ENTER to verified, failed or broken."""

    WAYS: ClassVar[WayTable] = WAYS

    def __init__(self, weights: WeightsKind, rows: RowsKind, target: LayoutKind, num_batches: int) -> None:
        """`num_batches`: of rows, the same on every rank; one where both pools are backed."""
        self.weights, self.rows = weights, rows
        self.target, self.num_batches = target, num_batches
        self._crossed: list[int] = []
        """Batches whose rows are in the pool of the layout after, and there alone."""
        self._batch = 0
        """On its way."""

    @property
    def meets(self) -> bool:
        """Whether the ranks wait for each other in it."""
        return self.rows is not RowsKind.SHARED or self.weights is not WeightsKind.KEPT

    def run(self) -> Program:
        """The work, and the way back where it has to be gone."""
        try:
            yield from self.begin()
            yield from self.move_rows()
            yield from self.change_weights()
        except TurnedError as turned:
            return (yield from self._back(turned))
        return Finished()

    def _back(self, turned: TurnedError) -> Program:
        if turned.way is Way.BROKEN:
            return Broken(turned.reason)
        try:
            if turned.way is Way.WEIGHTS_BACK:
                yield from self.weights_back(self.target.other)
            if turned.way is Way.BATCH_BACK:
                yield from self.batch_back(self._batch, self.target.other)
            if turned.way is not Way.STAY:
                yield from self.rows_back(self.target.other)
        except TurnedError as again:
            return Broken(f"{turned.reason}; and on the way back: {again.reason}")
        return Restored(turned.reason)

    # Forward.

    def begin(self) -> Asking:
        """What can fail alone, with nothing touched: one verdict before anybody waits for anybody."""
        if not self.meets:
            self.judge(Phase.READY, (yield LookForRoom()))
            return
        asks: list[Ask] = [LookForRoom()]
        if self.rows is RowsKind.PAIR:
            asks.append(ReadRows(0, self.target))
        yield from self.agreed(Phase.READY, About.READY, 0, *asks)

    def move_rows(self) -> Asking:
        """Every live row, to where the layout after has it."""
        if self.rows is RowsKind.PAIR:
            self.judge(Phase.ROWS, (yield PassRows(0, self.target)))
            yield from self.judge_pair((yield CompareRows(0, self.target)))
        elif self.rows is RowsKind.TURNS:
            for batch in range(self.num_batches):
                self._batch = batch
                yield from self.cross(batch, self.target, Phase.ROWS, Phase.TRIMMED)
                self._crossed.append(batch)

    def judge_pair(self, compared: Answer) -> Asking:
        """Each rank for itself, as the pool before is whole on all; where weights follow, all of them first."""
        if self.weights is WeightsKind.KEPT or compared.verdict is Verdict.UNKNOWN:
            self.judge(Phase.ROWS, compared)
        else:
            self.judge(Phase.ROWS, (yield Agree(About.ROWS, compared.reason)))

    def cross(self, batch: int, toward: LayoutKind, reading: Phase, crossing: Phase) -> Asking:
        """One batch, from the other layout's pool to that of `toward`, all ranks together."""
        yield from self.agreed(reading, About.READ, batch, ReadRows(batch, toward))
        self.judge(reading, (yield PassRows(batch, toward)))
        self.judge(reading, (yield CompareRows(batch, toward)))
        yield from self.agreed(crossing, About.TRIMMED, batch, TrimPages(batch, toward.other))
        yield from self.agreed(crossing, About.WRITTEN, batch, WriteRows(batch, toward))

    def change_weights(self) -> Asking:
        """To those of the layout after, when every row of every rank is right."""
        if self.weights is WeightsKind.KEPT:
            return
        if self.weights is WeightsKind.EXCHANGED:
            self.judge(Phase.WEIGHTS, (yield TradePages(self.target)))
            change: Ask = CheckWeights(self.target)
        else:
            change = FillWeights(self.target)
        yield from self.agreed(Phase.WEIGHTS, About.WEIGHTS, 0, change)

    # Back.

    def weights_back(self, before: LayoutKind) -> Asking:
        """All ranks: what was damaged on the way is had from files or image, each rank for itself."""
        if self.weights is WeightsKind.EXCHANGED:
            self.judge(Phase.RETURNING, (yield TradePages(before, undoes=True)))
            yield CheckWeights(before)
        self.judge(Phase.RETURNING, (yield HaveWeights(before)))

    def batch_back(self, batch: int, before: LayoutKind) -> Asking:
        """All ranks: what was kept of a batch is the only copy."""
        back = Phase.RETURNING
        yield from self.agreed(back, About.TRIMMED_BACK, batch, TrimPages(batch, before.other))
        yield from self.agreed(back, About.WRITTEN_BACK, batch, WriteKeptRows(batch, before))

    def rows_back(self, before: LayoutKind) -> Asking:
        """All ranks: what has crossed comes back, the last batch first."""
        for batch in reversed(self._crossed):
            yield from self.cross(batch, before, Phase.RETURNING, Phase.RETURNING)

    # What all share.

    def agreed(self, phase: Phase, about: About, batch: int, *asks: Ask) -> Asking:
        """What this rank does alone, up to what fails, and the group's verdict on it: a barrier as well."""
        failure = ""
        for ask in asks:
            answer = yield ask
            if answer.verdict is Verdict.UNKNOWN:
                self.judge(phase, answer)
            if answer.verdict is not Verdict.WELL:
                failure = answer.reason
                break
        self.judge(phase, (yield Agree(about, failure, batch)))

    def judge(self, phase: Phase, answer: Answer) -> None:
        """Goes by the table. Raises TurnedError where it does not lead on."""
        way = self.WAYS[phase, answer.verdict]
        if way is not Way.GO_ON:
            raise TurnedError(way, answer.reason)


def settle(weights: WeightsKind, rows: RowsKind, kind: LayoutKind, work: Outcome | None) -> Program:
    """Behind COMMIT or ABANDON: `kind` is in force, and must be whole here. `work`: what this rank's ended with.

    No rank waits for another: an attempt that ends well has left its layout whole on every rank, by evidence, and one
    that does not is broken. Weights can be had again alone; rows that are not there cannot, and end the generation.
    """
    if isinstance(work, Broken):
        return Broken(f"an outcome comes for work that is broken here: {work.reason}")
    if weights is not WeightsKind.KEPT:
        answer = yield HaveWeights(kind)
        if answer.verdict is not Verdict.WELL:
            return Broken(answer.reason)
    if rows is not RowsKind.SHARED:
        answer = yield KeepRows(kind)
        if answer.verdict is not Verdict.WELL:
            return Broken(answer.reason)
    return Finished()
