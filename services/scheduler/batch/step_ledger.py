"""Who has acknowledged which step, and what the acknowledgements prove. Pure.

Holds ranks to the log: every rank answers every step once, in order, under the same digest; only the sampling rank
sends tokens. Anything else is a `LogBrokenError`, after which the generation must end. Never waits and reads no clock.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.ids import LogIndex, Rank
from services.core.step import SampledTokens, StepPlan, StepReport

MAX_STEP_RECORDS = 1024
"""Finished steps whose timings are kept: some seconds of decoding, for status and tools."""


class LogBrokenError(Exception):
    """A rank's answers cannot be those of a rank that executes this log."""


@dataclass(slots=True)
class StepRecord:
    """One step from its issue to its last acknowledgement; times of `compute_ns` and `wait_ns` by rank."""

    sequence: LogIndex
    microbatch: int
    num_rows: int
    num_tokens: int
    issued_ns: int
    compute_ns: list[int]
    wait_ns: list[int]
    digest: int | None = None
    first_rank: Rank | None = None
    """Who said `digest`."""
    awaits: set[Rank] = field(default_factory=set)
    finished_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """What one report adds: tokens to commit, and whether it was the step's last acknowledgement."""

    sequence: LogIndex
    tokens: SampledTokens | None
    is_acknowledged: bool


class StepLedger:
    """Acknowledgements of one generation."""

    def __init__(self, num_ranks: int, sampling_rank: Rank) -> None:
        self._ranks = tuple(Rank(rank) for rank in range(num_ranks))
        self._sampling_rank = sampling_rank
        self._open: dict[LogIndex, StepRecord] = {}
        self._last: list[LogIndex | None] = [None] * num_ranks
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        """Finished steps, oldest first."""

    @property
    def oldest_issued_ns(self) -> int | None:
        """When the oldest unfinished step was issued, or None where all are finished."""
        return next((record.issued_ns for record in self._open.values()), None)

    def issue(self, sequence: LogIndex, plan: StepPlan, now_ns: int) -> None:
        """A step went out to every rank."""
        self._open[sequence] = StepRecord(
            sequence=sequence,
            microbatch=plan.microbatch,
            num_rows=len(plan.row_request_index),
            num_tokens=plan.num_tokens,
            issued_ns=now_ns,
            compute_ns=[0] * len(self._ranks),
            wait_ns=[0] * len(self._ranks),
            awaits=set(self._ranks),
        )

    def hear(self, rank: Rank, report: StepReport, now_ns: int) -> Heard:
        """Takes one rank's report.

        Raises:
            LogBrokenError: it is not the rank's next one, it has tokens from the wrong rank, or digests differ.
        """
        record = self._expected(rank, report)
        if record.digest is None:
            record.digest, record.first_rank = report.digest, rank
        elif record.digest != report.digest:
            raise LogBrokenError(
                f"step {report.sequence}: rank {rank} has digest {report.digest:016x}, rank {record.first_rank} has "
                f"{record.digest:016x}: they did not execute the same log; see both ranks' rings"
            )
        record.compute_ns[rank], record.wait_ns[rank] = report.compute_ns, report.wait_ns
        record.awaits.discard(rank)
        self._last[rank] = report.sequence
        if not record.awaits:
            record.finished_ns = now_ns
            self.records.append(self._open.pop(report.sequence))
        return Heard(report.sequence, report.tokens, not record.awaits)

    def overdue(self, now_ns: int, limit_ns: int) -> str | None:
        """Which ranks owe the oldest step for longer than `limit_ns`, and where each of them is; None: nobody."""
        record = next(iter(self._open.values()), None)
        if record is None or now_ns - record.issued_ns < limit_ns:
            return None
        owed = ", ".join(
            f"rank {rank} (last acknowledged: {self._last[rank] or 'none'})" for rank in sorted(record.awaits)
        )
        return f"step {record.sequence} is unanswered for {(now_ns - record.issued_ns) / 1e9:.1f} s by {owed}"

    def _expected(self, rank: Rank, report: StepReport) -> StepRecord:
        owed = next((sequence for sequence, record in self._open.items() if rank in record.awaits), None)
        if report.sequence != owed:
            wanted = "nothing is owed" if owed is None else f"step {owed} is owed"
            raise LogBrokenError(f"rank {rank} acknowledges step {report.sequence}, {wanted}: it left the log's order")
        if report.tokens is not None and rank != self._sampling_rank:
            raise LogBrokenError(
                f"step {report.sequence}: tokens from rank {rank}; only rank {self._sampling_rank} samples"
            )
        return self._open[report.sequence]
