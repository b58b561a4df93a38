"""One generation's log, as decisions: what is written into it, what an answer proves, and when. Pure.

Batch, ledger and fence meet here: a step is issued and remembered together, a flip freezes before it is written, its
COMMIT moves the fence before anything is written behind it. Entries leave by `write`, in their order; events of
requests are returned. Never waits, reads no clock and knows no stream; the shell around it and the simulator run the
same code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.core.fence import EpochFence
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex, Rank
from services.core.layout import Layout
from services.core.log import FIRST_EPOCH
from services.core.request import RequestEvent
from services.core.step import AbandonEntry, CommitEntry, Entry, FlipEntry, LogEntry, ResetEntry, StepReport
from services.scheduler.batch.batcher import Batcher
from services.scheduler.batch.step_ledger import StepLedger, StepRecord


@dataclass(frozen=True, slots=True)
class Answered:
    """What one report led to; `finished`: the step that has been answered by all, if it was the last answer."""

    events: list[RequestEvent]
    finished: StepRecord | None


class GenerationLog:
    """From RESET to the loss of a member."""

    def __init__(
        self, generation: Generation, batcher: Batcher, layouts: Mapping[LayoutKind, Layout], kind: LayoutKind
    ) -> None:
        self._layouts = layouts
        self.batcher = batcher
        self.ledger = StepLedger(layouts[kind].num_ranks, layouts[kind].sampling_rank)
        self.fence = EpochFence(generation, FIRST_EPOCH)
        self.kind = kind
        """The layout now."""
        self.sequence = LogIndex(0)
        """Of the last entry written; 0 before the first."""
        self.write: Callable[[LogEntry], None] = _nowhere
        """To every rank."""

    def open(self) -> None:
        """Writes RESET."""
        limits = self.batcher.limits
        self.append(ResetEntry(self.kind, limits.num_blocks, limits.max_resident_requests, limits.context_tokens))

    def append(self, entry: Entry) -> None:
        """Writes the next entry."""
        self.sequence = LogIndex(self.sequence + 1)
        self.write(LogEntry(self.fence.generation, self.fence.epoch, self.sequence, entry))

    def issue(self, now_ns: int) -> int:
        """Writes every step that may be written now and returns their number."""
        num_issued = 0
        while (plan := self.batcher.next_step(LogIndex(self.sequence + 1))) is not None:
            self.append(plan)
            self.ledger.issue(self.sequence, plan, now_ns)
            num_issued += 1
        return num_issued

    def admit(self, rank: Rank, generation: int, epoch: int) -> str | None:
        """None if an answer of `rank` under that fence may be heard, else why not."""
        return self.fence.admit(Generation(generation), Epoch(epoch), f"rank {rank}")

    def hear(self, rank: Rank, report: StepReport, now_ns: int) -> Answered:
        """Takes a report that was admitted.

        Raises:
            LogBrokenError, ResultError: it is not of a rank that executes this log: the generation must end.
        """
        heard = self.ledger.hear(rank, report, now_ns)
        events = [] if heard.tokens is None else self.batcher.on_tokens(heard.sequence, heard.tokens)
        if not heard.is_acknowledged:
            return Answered(events, None)
        self.batcher.on_acknowledged(heard.sequence)
        return Answered(events, self.ledger.records[-1])

    # Flips.

    @property
    def is_parked(self) -> bool:
        """Whether FLIP is written and every step before it is acknowledged: COMMIT may be written.

        Ranks had executed them when they parked, but their reports come by another way than the mover's outcome, and a
        report of the old epoch must not meet the new fence.
        """
        return self.batcher.is_parked

    def arm(self, flip_id: FlipId, target: LayoutKind) -> FlipEntry:
        """Freezes the batch and writes FLIP."""
        self.batcher.freeze()
        entry = FlipEntry(flip_id, target, self.batcher.live_runs())
        self.append(entry)
        return entry

    def conclude(self, entry: CommitEntry | AbandonEntry) -> None:
        """Writes the outcome and thaws the batch, under the next epoch after a COMMIT."""
        assert self.is_parked or isinstance(entry, AbandonEntry), "COMMIT before every step is acknowledged"
        self.append(entry)
        if isinstance(entry, CommitEntry):
            self.kind = entry.layout
            self.fence.move(self.fence.generation, Epoch(self.fence.epoch + 1))
        self.batcher.thaw(self._layouts[self.kind])


def _nowhere(_entry: LogEntry) -> None:
    raise AssertionError("a log is written to from the time its ranks are there")
