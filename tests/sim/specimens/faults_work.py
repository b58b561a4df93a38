"""Programs of a flip's work that lack one rule of its order, and ranks that say more than they know of its end."""

from typing import ClassVar

from services.core.flip.messages import WorkDone, WorkFailed
from services.core.flip.work import Asking, Broken, FlipWork, Outcome
from services.core.flip.work_asks import About, Ask, CompareRows, PassRows, ReadRows, TrimPages, WriteRows
from services.core.flip.work_table import WAYS, Answer, Phase, Verdict, Way, WayTable
from services.core.ids import LayoutKind
from services.core.step import FlipEntry
from tests.sim.processes.rank import RankProcess


class SkippedVerdictWork(FlipWork):
    """A batch lies where it is written: each rank looks for itself, and nobody asks the group."""

    def agreed(self, phase: Phase, about: About, batch: int, *asks: Ask) -> Asking:
        if about is About.WRITTEN and phase is Phase.TRIMMED:
            for ask in asks:
                self.judge(phase, (yield ask))
        else:
            yield from super().agreed(phase, about, batch, *asks)


class EarlyTradeWork(FlipWork):
    """A rank whose own rows are right goes on to pages, before it has heard that all rows of all ranks are."""

    def judge_pair(self, compared: Answer) -> Asking:
        self.judge(Phase.ROWS, compared)
        yield from ()


class EarlyTrimWork(FlipWork):
    """Pages of a batch are given up while it is still to be compared."""

    def cross(self, batch: int, toward: LayoutKind, reading: Phase, crossing: Phase) -> Asking:
        yield from self.agreed(reading, About.READ, batch, ReadRows(batch, toward))
        self.judge(reading, (yield PassRows(batch, toward)))
        yield from self.agreed(crossing, About.TRIMMED, batch, TrimPages(batch, toward.other))
        self.judge(reading, (yield CompareRows(batch, toward)))
        yield from self.agreed(crossing, About.WRITTEN, batch, WriteRows(batch, toward))


class UncomparedWork(FlipWork):
    """Rows are never compared with what was sent: what lies as it came is taken for right."""

    def cross(self, batch: int, toward: LayoutKind, reading: Phase, crossing: Phase) -> Asking:
        yield from self.agreed(reading, About.READ, batch, ReadRows(batch, toward))
        self.judge(reading, (yield PassRows(batch, toward)))
        yield from self.agreed(crossing, About.TRIMMED, batch, TrimPages(batch, toward.other))
        yield from self.agreed(crossing, About.WRITTEN, batch, WriteRows(batch, toward))


class HopefulWork(FlipWork):
    """What broke off among ranks is called restored, as if nothing had been touched."""

    WAYS: ClassVar[WayTable] = {pair: Way.STAY if pair[1] is Verdict.UNKNOWN else way for pair, way in WAYS.items()}


class OneBatchBackWork(FlipWork):
    """Only the batch that failed is had back, and those before it stay where they went."""

    def rows_back(self, before: LayoutKind) -> Asking:
        yield from ()


class HopefulRank(RankProcess):
    """The thread of the model answers what nobody foresaw with RESTORED."""

    def said_of(self, flip: FlipEntry, outcome: Outcome) -> WorkDone | WorkFailed:
        if isinstance(outcome, Broken):
            return WorkFailed(flip.flip_id, outcome.reason, restored=True)
        return super().said_of(flip, outcome)
