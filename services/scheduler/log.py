"""One generation's log, as decisions: what is told goes into `step`, what is to be done comes out of `ready`. Pure.

Batch, ledger, fence and flips meet here: a step is issued and remembered together; a flip freezes the batch once the
mover has taken it, and its COMMIT moves the fence before anything is written behind it. Whatever a rank does wrong, or
does not do in time, ends the generation. Never waits, reads no clock and knows no stream: the loop around it and the
simulator run the same object.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from services.core.fence import EpochFence
from services.core.flip.log_side import Attempt, FlipAttempts, FlipBrokenError, is_advice
from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, Generation, LayoutKind, LogIndex, Rank
from services.core.layout import Layout
from services.core.log import FIRST_EPOCH
from services.core.request import RequestEvent
from services.core.step import AbandonEntry, CommitEntry, Entry, FlipEntry, LogEntry, ResetEntry, StepReport
from services.scheduler.batch.batcher import Batcher, ResultError
from services.scheduler.batch.pressure import climb
from services.scheduler.batch.step_ledger import LogBrokenError, StepLedger
from services.scheduler.carries import OpenCarries
from services.scheduler.inputs import (
    Abort,
    Clock,
    Finish,
    FlipEnded,
    FlipWanted,
    Input,
    MemoryRead,
    MoverDecided,
    MoverSpoke,
    Question,
    QuestionFailed,
    RankGone,
    RankReady,
    RankReports,
    Ready,
    RouterGone,
    Submit,
    fence_of,
)

NS_PER_S = 1_000_000_000
STOOD_STILL_NS = 500_000_000
"""A clock that comes so much later than asked for: this process was stopped; and what it gives others' words then."""


@dataclass(frozen=True, slots=True)
class LogDeadlines:
    """How long ranks may take to answer; those of a flip are its attempts'."""

    boot_ns: int
    """RESET."""
    step_ns: int


class GenerationLog:
    """From RESET to the loss of a member."""

    def __init__(
        self,
        generation: Generation,
        batcher: Batcher,
        layouts: Mapping[LayoutKind, Layout],
        layout: LayoutKind,
        deadlines: LogDeadlines,
        flips: FlipAttempts,
        now_ns: int,
    ) -> None:
        self._layouts, self._deadlines = layouts, deadlines
        self.batcher, self.flips = batcher, flips
        self.ledger = StepLedger(layouts[layout].num_ranks, layouts[layout].sampling_rank)
        self.carries = OpenCarries()
        self.fence = EpochFence(generation, FIRST_EPOCH)
        self.layout = layout
        """The layout now."""
        self.sequence = LogIndex(0)
        """Of the last entry written; 0 before the first."""
        self.is_open = False
        """Whether every rank has answered RESET."""
        self.began_ns = now_ns
        """Of the layout now: the last commit, or the generation's start."""
        self._answered: list[RankReady] = []
        self._ticket: int | None = None
        self._flip_entry: FlipEntry | None = None
        self._now_ns = now_ns
        self._grace_ns = 0
        self._ready = Ready()
        limits = batcher.limits
        self.append(ResetEntry(layout, limits.num_blocks, limits.max_resident_requests, limits.context_tokens))

    # In and out.

    def step(self, given: Input, now_ns: int) -> None:
        """Takes one input; what follows from it is in the next `ready`."""
        if self._ready.lost is not None:
            return
        self._now_ns = now_ns
        try:
            self._STEPS[type(given)](self, given)
        except (LogBrokenError, ResultError) as error:
            self._lose(str(error))

    def ready(self) -> Ready:
        """What is to be done since the last call, the steps among it that may be issued now."""
        ready = self._ready
        if ready.lost is None and self.is_open:
            self._go_on(ready)
        if ready.lost is not None:
            self.flips.end(self._now_ns)
        else:
            self._ready = Ready()
        ready.clock_ns = self.clock_ns
        return ready

    def _go_on(self, ready: Ready) -> None:
        """Concludes, asks and issues."""
        if self.flips.attempt is not None:
            self._conclude_attempt()
            if self.flips.is_to_ask(self._now_ns):
                ready.question = self._question()
        self.issue(self._now_ns)
        self._tell(self.batcher.take_events())

    # Ranks.

    def _on_ready(self, given: RankReady) -> None:
        limits, rank = self.batcher.limits, given.stream
        if self._refuses(rank, *given.fence):
            return
        if given.rank != rank:
            self._lose(f"rank {rank}'s socket is served by rank {given.rank}: check the ranks' start")
        elif given.num_blocks < limits.num_blocks:
            self._lose(
                f"rank {rank} holds {given.num_blocks} blocks, the allocator issues {limits.num_blocks}: "
                "lower pool.num_blocks"
            )
        else:
            self._answered.append(given)
            if len(self._answered) == self._num_ranks:
                self._open()

    def _open(self) -> None:
        if len({answer.model_digest for answer in self._answered}) > 1:
            digests = sorted(f"rank {answer.rank}: {answer.model_digest}" for answer in self._answered)
            self._lose(f"the ranks hold different models ({', '.join(digests)}): use one file")
            return
        self.is_open = self._ready.is_opened = True

    def _on_reports(self, given: RankReports) -> None:
        if not self.is_open:
            self._lose(f"rank {given.rank} answers RESET with reports, not ready")
        elif not self._refuses(given.rank, *given.fence):
            for report in given.reports:
                self._hear(given.rank, report)

    def _hear(self, rank: Rank, report: StepReport) -> None:
        heard = self.ledger.hear(rank, report, self._now_ns)
        if heard.tokens is not None:
            self._tell(self.batcher.on_tokens(heard.sequence, heard.tokens))
        if heard.is_acknowledged:
            self.batcher.on_acknowledged(heard.sequence)
            self._ready.finished.append(self.ledger.records[-1])

    def _on_rank_gone(self, given: RankGone) -> None:
        self._lose(given.reason)

    def _refuses(self, rank: Rank, generation: Generation, epoch: Epoch) -> bool:
        """Whether an answer under that fence may not be heard: the generation is lost then."""
        refusal = self.fence.admit(generation, epoch, f"rank {rank}")
        if refusal is not None:
            self._lose(refusal)
        return refusal is not None

    # Routers.

    def _on_submit(self, given: Submit) -> None:
        self._tell(self.batcher.submit(given.submission, self._now_ns))

    def _on_abort(self, given: Abort) -> None:
        self._tell(self.batcher.abort(given.request_id))

    def _on_finish(self, given: Finish) -> None:
        self._tell(self.batcher.finish(given.request_id, given.num_output_tokens))

    def _on_router_gone(self, given: RouterGone) -> None:
        for request_id in self.batcher.open_request_ids:
            if request_id.startswith(given.prefix):
                self._tell(self.batcher.abort(request_id))

    def _tell(self, events: list[RequestEvent]) -> None:
        if events:
            self._ready.events += events
            self._ready.carries += self.carries.note(events, self._now_ns)

    # Steps.

    def append(self, entry: Entry) -> None:
        """Writes the next entry."""
        self.sequence = LogIndex(self.sequence + 1)
        self._ready.entries.append(LogEntry(self.fence.generation, self.fence.epoch, self.sequence, entry))

    def issue(self, now_ns: int) -> None:
        """Writes every step that may be written now."""
        while (plan := self.batcher.next_step(LogIndex(self.sequence + 1))) is not None:
            self.append(plan)
            self.ledger.issue(self.sequence, plan, now_ns)

    # Flips.

    @property
    def is_parked(self) -> bool:
        """Whether FLIP is written and every step before it is acknowledged: COMMIT may be written.

        Ranks had executed them when they parked, but their reports come by another way than the mover's outcome, and a
        report of the old epoch must not meet the new fence.
        """
        return self.batcher.is_parked

    def _on_flip_wanted(self, given: FlipWanted) -> None:
        is_late = given.answers is not None and not is_advice(
            given.target, given.answers, self.layout, fence_of(self.fence)
        )
        refusal = "late, or to stay" if is_late else self.flips.refusal(given.target, self.layout)
        if refusal is None and not self.is_open:
            refusal = "the group is not ready"
        if refusal is None:
            self.flips.begin(given.target, given.cause, self._now_ns)
            self._ticket = given.ticket
        else:
            self._ready.flips.append(FlipEnded(None, None, refusal, given.target, given.cause, given.ticket))

    def _on_mover_spoke(self, given: MoverSpoke) -> None:
        if self.flips.on_word(given.flip_id, self._now_ns):
            assert self.flips.attempt is not None
            self.arm(self.flips.attempt)

    def _on_mover_decided(self, given: MoverDecided) -> None:
        self.flips.on_outcome(given.flip_id, given.outcome, given.reason)

    def _on_question_failed(self, given: QuestionFailed) -> None:
        self.flips.on_failure(given.flip_id, given.reason, self._now_ns)

    def _question(self) -> Question:
        attempt, entry = self.flips.attempt, self._flip_entry
        assert attempt is not None
        question = Question(attempt.flip_id, fence_of(self.fence), self.layout, attempt.target)
        if entry is None:
            return question
        return Question(
            question.flip_id, question.fence, question.source, question.target, self.sequence, entry.live_runs
        )

    def arm(self, attempt: Attempt) -> None:
        """Freezes the batch and writes FLIP."""
        self.batcher.freeze()
        attempt.frozen_ns = self._now_ns
        self._flip_entry = entry = FlipEntry(attempt.flip_id, attempt.target, self.batcher.live_runs())
        self.append(entry)
        self.carries.arm(entry, fence_of(self.fence), self.batcher)

    def _conclude_attempt(self) -> None:
        """Writes the outcome as soon as it may be written."""
        attempt = self.flips.attempt
        assert attempt is not None
        if attempt.outcome is None:
            return
        if attempt.frozen_ns is None:
            # Nothing stands still and nothing is written: the attempt was not made.
            self._end_attempt(attempt, None)
            return
        try:
            entry = self.flips.entry_for(is_parked=self.is_parked)
        except FlipBrokenError as error:
            self._end_attempt(attempt, attempt.outcome)
            self._lose(str(error))
            return
        if entry is not None:
            self._ready.carries += self.carries.begin(attempt.outcome, self._now_ns)
            self.conclude(entry)
            self._end_attempt(attempt, attempt.outcome)

    def conclude(self, entry: CommitEntry | AbandonEntry) -> None:
        """Writes the outcome and thaws the batch, under the next epoch after a COMMIT."""
        assert self.is_parked or isinstance(entry, AbandonEntry), "COMMIT before every step is acknowledged"
        self.append(entry)
        if isinstance(entry, CommitEntry):
            self.layout, self.began_ns = entry.layout, self._now_ns
            self.fence.move(self.fence.generation, Epoch(self.fence.epoch + 1))
        self.batcher.thaw(self._layouts[self.layout])

    def _end_attempt(self, attempt: Attempt, outcome: FlipOutcome | None) -> None:
        self.flips.end(self._now_ns)
        census = None if attempt.frozen_ns is None else self.batcher.census()
        ended = FlipEnded(attempt.flip_id, outcome, attempt.reason, attempt.target, attempt.cause, self._ticket, census)
        self._ready.flips.append(ended)
        self._ticket = self._flip_entry = None

    # Memory and time.

    def _on_memory(self, given: MemoryRead) -> None:
        self._ready.relieved += climb(self.batcher, given.num_needed, is_enough=given.is_enough)

    @property
    def clock_ns(self) -> int | None:
        """When something is to be done by time alone."""
        if self._ready.lost is not None:
            return None
        issued_ns = self.ledger.oldest_issued_ns
        clocks = (
            None if self.is_open else self.began_ns + self._deadlines.boot_ns,
            None if issued_ns is None else issued_ns + self._deadlines.step_ns,
            self.flips.clock_ns,
            self.carries.clock_ns,
        )
        running = [clock for clock in clocks if clock is not None]
        return max(min(running), self._grace_ns) if running else None

    def _on_clock(self, _given: Clock) -> None:
        due_ns, now_ns = self.clock_ns, self._now_ns
        if due_ns is None or now_ns < due_ns:
            return
        if now_ns > due_ns + STOOD_STILL_NS:
            # What came while this process stood still is heard before the clock that ran out meanwhile.
            self._grace_ns = now_ns + STOOD_STILL_NS
            return
        if not self.is_open and now_ns >= self.began_ns + self._deadlines.boot_ns:
            missing = set(range(self._num_ranks)) - {answer.stream for answer in self._answered}
            limit_s = self._deadlines.boot_ns / NS_PER_S
            self._lose(f"rank {min(missing)} did not answer RESET within {limit_s:g} s; see its log")
        elif (reason := self.ledger.overdue(now_ns, self._deadlines.step_ns)) is not None:
            self._lose(reason)
        else:
            self.flips.on_clock(now_ns)
            self._ready.carries += self.carries.give_up(now_ns)

    @property
    def _num_ranks(self) -> int:
        return self._layouts[self.layout].num_ranks

    def _lose(self, reason: str) -> None:
        if self._ready.lost is None:
            self._ready.lost = reason

    _STEPS: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        RankReady: _on_ready,
        RankReports: _on_reports,
        RankGone: _on_rank_gone,
        Submit: _on_submit,
        Abort: _on_abort,
        Finish: _on_finish,
        RouterGone: _on_router_gone,
        FlipWanted: _on_flip_wanted,
        MoverSpoke: _on_mover_spoke,
        MoverDecided: _on_mover_decided,
        QuestionFailed: _on_question_failed,
        MemoryRead: _on_memory,
        Clock: _on_clock,
    }
