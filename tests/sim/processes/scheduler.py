"""The group's scheduler: the shipped generation log behind channels.

Everything is decided in shipped code: what is written when, what an answer proves, when the mover is asked and given
up, when a generation ends. Here are the channels between: one log to every rank, reports back, a question to the mover,
one clock; and what the invariants look at.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.fence import EpochFence
from services.core.flip.log_side import FlipAttempts, PastAttempts
from services.core.ids import Epoch, Generation, LayoutKind, RequestId
from services.core.request import Rejected, RejectReason, RequestEvent, Submission
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry, StepPlan
from services.policy.decide import Advice, LoadSignal
from services.scheduler.batch.batcher import Batcher, Load
from services.scheduler.inputs import (
    Abort,
    Clock,
    Finish,
    FlipEnded,
    FlipWanted,
    Input,
    MoverDecided,
    MoverSpoke,
    Question,
    QuestionFailed,
    RankGone,
    RankReady,
    RankReports,
    Ready,
    Submit,
    fence_of,
)
from services.scheduler.log import GenerationLog
from tests.sim.case import FLIP_CLOCKS, LOG_DEADLINES
from tests.sim.processes.data_plane import DataPlane
from tests.sim.processes.world import Channel, InvariantError, Process

if TYPE_CHECKING:
    from tests.sim.processes.group import Group

NS_PER_S = 1e9
EAGER_NS = 2_000_000
"""Until the next attempt, at most, where attempts follow each other at once."""

MAX_SIGNAL_FACTOR = 16
"""How many times rarer the policy is asked while nothing changes."""


@dataclass(frozen=True, slots=True)
class PlanText:
    """A plan in a few letters, written only if somebody reads it."""

    plan: StepPlan

    def __str__(self) -> str:
        """Released and admitted indexes, then index:[start,end) of each row, a star where it samples."""
        plan = self.plan
        words = [f"-{index}" for index in plan.released]
        words += [f"+{new.request_index}={new.request_id}" for new in plan.admitted]
        rows = zip(plan.row_request_index, plan.row_start, plan.row_num_tokens, strict=True)
        for row, (index, start, length) in enumerate(rows):
            words.append(f"{index}:[{start},{start + length})" + "*" * (row in plan.sampled_row))
        return " ".join(words)


@dataclass(slots=True, eq=False)
class Run:
    """One generation."""

    log: GenerationLog
    streams: list[Channel]
    begun_ns: int
    flip: FlipEntry | None = None
    """The entry that waits for its outcome."""
    timer_ns: int | None = None
    signalled: Load | None = None
    """What the policy was told last."""
    signal_factor: int = 1

    @property
    def batcher(self) -> Batcher:
        """Its requests and blocks."""
        return self.log.batcher

    @property
    def attempts(self) -> FlipAttempts:
        """Its flips."""
        return self.log.flips

    @property
    def fence(self) -> EpochFence:
        """Generation and epoch now."""
        return self.log.fence

    @property
    def layout(self) -> LayoutKind:
        """The layout now."""
        return self.log.layout

    @property
    def is_open(self) -> bool:
        """Whether every rank has answered RESET."""
        return self.log.is_open


class SchedulerProcess(Process):
    """The authority; its numbers of generations outlive it, nothing else does."""

    def __init__(self, group: "Group") -> None:
        super().__init__(group.world, "scheduler")
        self.group = group
        self._last_generation = 0
        self._past: PastAttempts | None = None
        self.run: Run | None = None
        self.router: Channel | None = None

    # A life, and generations.

    def boot(self) -> None:
        """The process is up: it waits for fresh ranks."""
        self.is_up, self.run, self.router, self._past = True, None, None, None
        self.group.connect_router()
        self.group.connect_policy()
        self.look_for_ranks()

    def look_for_ranks(self) -> None:
        """Opens a generation once every rank is up and has had no log."""
        if self.is_up and self.run is None and self.group.all_fresh:
            self._open()

    def _open(self) -> None:
        group = self.group
        case, parts, now_ns = group.case, group.parts, group.world.now_ns
        self._last_generation += 1
        log = parts.log(
            Generation(self._last_generation),
            parts.batcher(case.limits, group.layouts[case.kind]),
            group.layouts,
            case.kind,
            LOG_DEADLINES,
            parts.attempts(FLIP_CLOCKS, ranks_meet=case.ranks_meet, past=self._past),
            now_ns,
        )
        log.carries.within_ns = LOG_DEADLINES.step_ns
        streams = [Channel(group.world, rank, rank.take_entry, case.control) for rank in group.ranks]
        self.run = run = Run(log, streams, begun_ns=now_ns)
        plane = DataPlane(group.world, list(group.ranks), case.link_capacity, case.data)
        group.checks.on_generation(run.fence.generation, plane)
        for rank in group.ranks:
            rank.open(Channel(group.world, self, self._hear_of(run), case.control), plane)
        self._perform(run, log.ready())

    def give(self, run: Run, given: Input) -> None:
        """One input to the log, and what is ready then."""
        if self.run is not run:
            return
        log = run.log
        log.step(given, self.world.now_ns)
        if run.flip is not None:
            self.group.checks.while_frozen(run, run.flip)
        self._perform(run, log.ready())

    def on_rank_lost(self, run: Run, reason: str) -> None:
        """A rank's stream has ended."""
        self.give(run, RankGone(reason))

    def _lose(self, run: Run, reason: str) -> None:
        """The generation is over: ranks exit, routers submit again."""
        self.world.note(self.name, "lost", f"generation {run.fence.generation}:", reason)
        self.group.checks.on_lost(run, reason)
        self._past, self.run = run.log.flips.past, None
        for rank, stream in zip(self.group.ranks, run.streams, strict=True):
            stream.end(rank.on_stream_end)
        if self.router is not None:
            self.router.send("lost", run.fence.generation)
        self.group.leave_mover()
        self.look_for_ranks()

    # What is ready.

    def _perform(self, run: Run, ready: Ready) -> None:
        for entry in ready.entries:
            self._write(run, entry)
        self._deliver(ready.events)
        if ready.is_opened:
            self._opened(run)
        if ready.finished:
            self.group.checks.census(run)
        for ended in ready.flips:
            self._flip_ended(run, ended)
        if ready.question is not None:
            self.group.ask_mover(run, ready.question)
        if ready.lost is not None:
            self._lose(run, ready.lost)
        elif ready.clock_ns is not None:
            self._set_clock(run, ready.clock_ns)

    def _write(self, run: Run, logged: LogEntry) -> None:
        """To every rank."""
        checks, entry = self.group.checks, logged.entry
        checks.on_logged(logged)
        for stream in run.streams:
            stream.send(logged)
        if isinstance(entry, StepPlan):
            self.world.note(self.name, "step", logged.sequence, f"mb{entry.microbatch}", PlanText(entry))
        elif isinstance(entry, FlipEntry):
            run.flip = entry
            checks.on_freeze(run, entry)
            self.world.note(self.name, "flip", entry.flip_id, entry.target.value, f"live {entry.live_runs}")
        elif isinstance(entry, CommitEntry | AbandonEntry):
            checks.on_thaw(run)
            run.flip = None
            self.world.note(self.name, "thaw", run.layout.value, f"epoch {run.fence.epoch}")

    def _deliver(self, events: list[RequestEvent]) -> None:
        if events and self.router is not None:
            self.router.send("events", tuple(events))

    def _set_clock(self, run: Run, clock_ns: int) -> None:
        if run.timer_ns is None or clock_ns < run.timer_ns:
            run.timer_ns = clock_ns
            self.world.at(clock_ns - self.world.now_ns, self, self._on_clock, run, clock_ns)

    def _on_clock(self, run: Run, clock_ns: int) -> None:
        if run.timer_ns == clock_ns:
            run.timer_ns = None
            self.give(run, Clock())

    # Requests.

    def on_router(self, what: str, request_id: RequestId, argument: Submission | int | None) -> None:
        """A message of the router."""
        self.world.note(self.name, what, request_id)
        run = self.run
        if run is None or not run.is_open:
            if what == "submit":
                self._deliver([Rejected(request_id, RejectReason.UNAVAILABLE, "", "no generation")])
        elif isinstance(argument, Submission):
            self.give(run, Submit(argument))
        elif isinstance(argument, int):
            self.give(run, Finish(request_id, argument))
        else:
            self.give(run, Abort(request_id))

    # Answers.

    def _hear_of(self, run: Run):  # type: ignore[no-untyped-def]
        def hear(given: RankReady | RankReports) -> None:
            rank = given.stream if isinstance(given, RankReady) else given.rank
            if self.run is run and given.fence != fence_of(run.fence):
                raise InvariantError("fence", f"rank {rank} answers under {given.fence}, the log is at {run.fence}")
            self.give(run, given)

        return hear

    def _opened(self, run: Run) -> None:
        self.world.note(self.name, "open", f"generation {run.fence.generation}", run.layout.value)
        if self.router is not None:
            self.router.send("opened", run.fence.generation)
        if self.group.case.policy_ns is not None:
            self.world.at(self.group.case.policy_ns, self, self._signal, run)

    # Flips.

    def trigger(self, target: LayoutKind, why: str) -> None:
        """Somebody wants `target`."""
        if self.run is not None:
            self.give(self.run, FlipWanted(target, why))

    def on_mover_said(self, run: Run, question: Question, said: MoverSpoke | MoverDecided | QuestionFailed) -> None:
        """A word of the mover, or why there is none."""
        if self.group.is_asking(question):
            if not isinstance(said, MoverSpoke):
                self.group.mover_ask = None
            self.give(run, said)

    def _flip_ended(self, run: Run, ended: FlipEnded) -> None:
        if ended.flip_id is None:
            self.world.note(self.name, "no-flip", ended.target.value, ended.cause, ended.reason)
            return
        outcome = "not made" if ended.outcome is None else ended.outcome.value
        self.world.note(self.name, "outcome", ended.flip_id, outcome, ended.reason)
        self.group.leave_mover()
        self.group.checks.on_flip_ended(run, ended)
        if ended.flip_id < self.group.case.eager_flips:
            self.world.at(self.world.draw((0, EAGER_NS)), self, self._flip_again, run)

    def _flip_again(self, run: Run) -> None:
        if self.run is run and self.group.router.num_open:
            self.trigger(run.layout.other, "again")

    # The policy.

    def _signal(self, run: Run) -> None:
        if self.run is not run or not self.group.router.num_open:
            return
        load, now_ns, past = run.batcher.load(), self.world.now_ns, run.log.flips.past
        attempted_ns = run.log.began_ns if past.ended_ns is None else past.ended_ns
        signal = LoadSignal(
            layout=run.layout,
            uncomputed_prefill_tokens=load.uncomputed_prefill_tokens,
            decode_rows=load.decode_rows,
            queued_requests=load.queued_requests,
            since_flip_s=(now_ns - run.log.began_ns) / NS_PER_S,
            since_attempt_s=(now_ns - attempted_ns) / NS_PER_S,
            abandoned_in_a_row=past.abandoned_in_a_row,
            idle_s=0.0,
        )
        self.group.ask_policy(signal, (run.fence.generation, run.fence.epoch))
        assert self.group.case.policy_ns is not None
        # Where nothing changes there is less and less to ask.
        run.signal_factor = 1 if load != run.signalled else min(2 * run.signal_factor, MAX_SIGNAL_FACTOR)
        run.signalled = load
        self.world.at(run.signal_factor * self.group.case.policy_ns, self, self._signal, run)

    def on_advice(self, advice: Advice, asked: tuple[Generation, Epoch]) -> None:
        """The policy's answer to a signal under the fence `asked`."""
        if self.run is not None:
            self.give(self.run, FlipWanted(advice.layout, "policy", asked))
