"""The group's scheduler: the shipped generation log and flip attempts behind channels.

What is decided is decided in shipped code: what is written when, what an answer proves, which attempt is made and what
its outcome leads to. Here are the channels between: one log to every rank, reports back, a question to the mover that
is asked again, a lost rank that ends the generation.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.core.fence import EpochFence
from services.core.flip.log_side import FlipAttempts, FlipBrokenError, is_advice
from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, Rank, RequestId
from services.core.request import Rejected, RejectReason, RequestEvent, Submission
from services.core.step import CommitEntry, FlipEntry, LogEntry, StepPlan, StepReport
from services.policy.decide import Advice, LoadSignal
from services.scheduler.batch.batcher import Batcher, Load
from services.scheduler.log import GenerationLog
from tests.sim.case import MOVER_ABSENT_NS, STEP_NS
from tests.sim.processes.data_plane import DataPlane
from tests.sim.processes.rank import Ready
from tests.sim.processes.world import Channel, InvariantError, Process

if TYPE_CHECKING:
    from tests.sim.processes.group import Group

NS_PER_S = 1e9
MOVER_RETRY_NS = 5_000_000
"""Between two questions to a mover that is gone."""

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


@dataclass(slots=True)
class PendingFlip:
    """One attempt, from its entry in the log to the entry of its outcome."""

    entry: FlipEntry
    outcome: FlipOutcome | None = None
    reason: str = ""


@dataclass(slots=True, eq=False)
class Run:
    """One generation."""

    log: GenerationLog
    attempts: FlipAttempts
    streams: list[Channel]
    begun_ns: int
    ready: set[Rank] = field(default_factory=set)
    is_open: bool = False
    flip: PendingFlip | None = None
    num_flips: int = 0
    flipped_ns: int = 0
    attempted_ns: int = 0
    signalled: Load | None = None
    """What the policy was told last."""
    signal_factor: int = 1

    @property
    def batcher(self) -> Batcher:
        """Its requests and blocks."""
        return self.log.batcher

    @property
    def fence(self) -> EpochFence:
        """Generation and epoch now."""
        return self.log.fence

    @property
    def kind(self) -> LayoutKind:
        """The layout now."""
        return self.log.kind


class SchedulerProcess(Process):
    """The authority; its numbers of generations outlive it, nothing else does."""

    def __init__(self, group: "Group") -> None:
        super().__init__(group.world, "scheduler")
        self.group = group
        self._last_generation = 0
        self.run: Run | None = None
        self.router: Channel | None = None

    # A life, and generations.

    def boot(self) -> None:
        """The process is up: it waits for fresh ranks."""
        self.is_up, self.run, self.router = True, None, None
        self.group.connect_router()
        self.group.connect_policy()
        self.look_for_ranks()

    def look_for_ranks(self) -> None:
        """Opens a generation once every rank is up and has had no log."""
        if self.is_up and self.run is None and self.group.all_fresh:
            self._open()

    def _open(self) -> None:
        group = self.group
        case, layout = group.case, group.layouts[group.case.kind]
        self._last_generation += 1
        streams = [Channel(group.world, rank, rank.take_entry, case.control) for rank in group.ranks]
        batcher = group.parts.batcher(case.limits, layout)
        log = group.parts.log(Generation(self._last_generation), batcher, group.layouts, case.kind)
        log.write = self._write
        now_ns = group.world.now_ns
        self.run = run = Run(
            log=log,
            attempts=group.parts.attempts(case.ranks_meet),
            streams=streams,
            begun_ns=now_ns,
            flipped_ns=now_ns,
            attempted_ns=now_ns,
        )
        plane = DataPlane(group.world, list(group.ranks), case.link_capacity, case.data)
        group.checks.on_generation(run.fence.generation, plane)
        for rank in group.ranks:
            rank.open(Channel(group.world, self, self._hear_of(run), case.control), plane)
        log.open()

    def lose(self, run: Run, reason: str) -> None:
        """The generation is over: ranks exit, routers submit again."""
        if self.run is not run:
            return
        self.world.note(self.name, "lost", f"generation {run.fence.generation}:", reason)
        self.group.checks.on_lost(run, reason)
        self.run = None
        for rank, stream in zip(self.group.ranks, run.streams, strict=True):
            stream.end(rank.on_stream_end)
        if self.router is not None:
            self.router.send("lost", run.fence.generation)
        self.group.leave_mover(run)
        self.look_for_ranks()

    # Requests.

    def on_router(self, what: str, request_id: RequestId, argument: Submission | int | None) -> None:
        """A message of the router."""
        self.world.note(self.name, what, request_id)
        run = self.run
        if run is None or not run.is_open:
            if what == "submit":
                self._deliver([Rejected(request_id, RejectReason.UNAVAILABLE, "", "no generation")])
            return
        batcher = run.batcher
        if isinstance(argument, Submission):
            self._deliver(batcher.submit(argument, self.world.now_ns))
        elif isinstance(argument, int):
            self._deliver(batcher.finish(request_id, argument))
        else:
            self._deliver(batcher.abort(request_id))
        self._pump(run)

    def _deliver(self, events: list[RequestEvent]) -> None:
        if events and self.router is not None:
            self.router.send("events", tuple(events))

    # The log.

    def _write(self, entry: LogEntry) -> None:
        """To every rank."""
        run = self.run
        assert run is not None
        self.group.checks.on_logged(entry)
        for stream in run.streams:
            stream.send(entry)
        if isinstance(plan := entry.entry, StepPlan):
            self.world.note(self.name, "step", entry.sequence, f"mb{plan.microbatch}", PlanText(plan))

    def _pump(self, run: Run) -> None:
        if run.log.issue(self.world.now_ns) and self.group.case.faults:
            self.world.at(STEP_NS, self, self._watch, run)
        self._deliver(run.batcher.take_events())

    def _watch(self, run: Run) -> None:
        if self.run is run and (reason := run.log.ledger.overdue(self.world.now_ns, STEP_NS)) is not None:
            self.lose(run, reason)

    # Answers.

    def _hear_of(self, run: Run):  # type: ignore[no-untyped-def]
        def hear(rank: Rank, fence: tuple[int, int], message: Ready | StepReport) -> None:
            if self.run is run:
                self._hear(run, rank, fence, message)

        return hear

    def _hear(self, run: Run, rank: Rank, fence: tuple[int, int], message: Ready | StepReport) -> None:
        refusal = run.log.admit(rank, *fence)
        if refusal is not None:
            raise InvariantError("fence", refusal)
        if isinstance(message, Ready):
            run.ready.add(rank)
            if len(run.ready) == len(run.streams):
                self._opened(run)
            return
        answered = run.log.hear(rank, message, self.world.now_ns)
        self._deliver(answered.events)
        if answered.finished is not None:
            self.group.checks.census(run)
            self.maybe_conclude(run)
        self._pump(run)

    def _opened(self, run: Run) -> None:
        run.is_open = True
        self.world.note(self.name, "open", f"generation {run.fence.generation}", run.kind.value)
        if self.router is not None:
            self.router.send("opened", run.fence.generation)
        if self.group.case.policy_ns is not None:
            self.world.at(self.group.case.policy_ns, self, self._signal, run)

    # Flips.

    def trigger(self, target: LayoutKind, why: str) -> None:
        """Somebody wants `target`: arms a flip, unless one is pending or the layout is in force."""
        run = self.run
        if run is None or not run.is_open:
            return
        refusal = run.attempts.refusal(target, run.kind)
        if refusal is not None:
            self.world.note(self.name, "no-flip", target.value, why)
            return
        run.num_flips += 1
        flip_id = run.attempts.begin(target)
        self.group.checks.on_freeze(run, flip_id)
        entry = run.log.arm(flip_id, target)
        run.flip = PendingFlip(entry)
        self.world.note(self.name, "flip", entry.flip_id, target.value, why, f"live {entry.live_runs}")
        self.ask_mover(run)
        self.world.at(MOVER_ABSENT_NS, self, self._watch_mover, run, run.flip)

    def _watch_mover(self, run: Run, flip: PendingFlip) -> None:
        if self.run is not run or run.flip is not flip or flip.outcome is not None:
            return
        away_ns = self.group.mover.away_ns
        left_ns = MOVER_ABSENT_NS if away_ns is None else away_ns + MOVER_ABSENT_NS - self.world.now_ns
        if left_ns > 0:
            self.world.at(left_ns, self, self._watch_mover, run, flip)
            return
        self.group.leave_mover(run)
        self.on_outcome(run, flip.entry.flip_id, run.attempts.without_mover, "the mover is absent")

    def ask_mover(self, run: Run) -> None:
        """Asks for the outcome, and again until there is one."""
        if self.run is run and run.flip is not None and run.flip.outcome is None:
            self.group.ask_mover(self, run)

    def on_outcome(self, run: Run, flip_id: FlipId, outcome: FlipOutcome, reason: str) -> None:
        """The mover has decided."""
        flip = run.flip
        if self.run is not run or flip is None or flip.entry.flip_id != flip_id or flip.outcome is not None:
            return
        self.world.note(self.name, "outcome", flip_id, outcome.value, reason)
        self.group.checks.on_outcome(outcome, reason)
        flip.outcome, flip.reason = outcome, reason
        self.maybe_conclude(run)

    def maybe_conclude(self, run: Run) -> None:
        """Writes the outcome that the mover has decided, as soon as it may be written."""
        flip = run.flip
        if flip is None or flip.outcome is None:
            return
        try:
            entry = run.attempts.entry_for(flip.outcome, flip.reason, is_parked=run.log.is_parked)
        except FlipBrokenError as error:
            self.lose(run, str(error))
            return
        if entry is None:
            return
        self.group.checks.on_thaw(run, flip)
        run.log.conclude(entry)
        run.attempts.end()
        run.flip, run.attempted_ns = None, self.world.now_ns
        if isinstance(entry, CommitEntry):
            run.flipped_ns = self.world.now_ns
        self.world.note(self.name, "thaw", run.kind.value, f"epoch {run.fence.epoch}")
        self.group.checks.census(run)
        self._pump(run)
        if run.num_flips < self.group.case.eager_flips:
            self.world.at(self.world.draw((0, EAGER_NS)), self, self._flip_again, run)

    def _flip_again(self, run: Run) -> None:
        if self.run is run and self.group.router.num_open:
            self.trigger(run.kind.other, "again")

    # The policy.

    def _signal(self, run: Run) -> None:
        if self.run is not run or not self.group.router.num_open:
            return
        load, now_ns = run.batcher.load(), self.world.now_ns
        signal = LoadSignal(
            layout=run.kind,
            uncomputed_prefill_tokens=load.uncomputed_prefill_tokens,
            decode_rows=load.decode_rows,
            queued_requests=load.queued_requests,
            since_flip_s=(now_ns - run.flipped_ns) / NS_PER_S,
            since_attempt_s=(now_ns - run.attempted_ns) / NS_PER_S,
            abandoned_in_a_row=run.attempts.abandoned_in_a_row,
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
        run = self.run
        if run is not None and is_advice(advice.layout, asked, run.kind, (run.fence.generation, run.fence.epoch)):
            self.trigger(advice.layout, "policy")
