"""One rank: executes the log in order, reads and writes its planes of the pool, takes part in flips.

The log follower and the participant are the shipped ones. The model thread is a generator that yields what it waits
for, so it can be anywhere when something happens. Each slot of the pool holds the chain of the prefix that was written
there; a row whose context is not exactly its request's own history is a violation at once.

Only the plane of the layout in force is read; a flip fills the other one from all ranks' planes, and its end empties
one of the two, so that a row that was not carried cannot be read by chance (`memory`).
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from services.core.flip.messages import (
    AbandonReached,
    AssembleReceived,
    CommitReached,
    DisarmReceived,
    EnterReceived,
    EntryReached,
    ParticipantEffect,
    ParticipantEvent,
    RoomSeen,
    SayNotReady,
    SayPresent,
    SayVerified,
    SayWithdrawn,
    StartWork,
    WorkDone,
    WorkFailed,
)
from services.core.flip.work import Broken, Finished, Outcome, Restored
from services.core.ids import BLOCK_SLOTS, FlipId, LayoutKind, LogIndex, Rank, RequestIndex, TokenId
from services.core.log import FIRST_EPOCH
from services.core.step import (
    AbandonEntry,
    CommitEntry,
    FlipEntry,
    LogEntry,
    ResetEntry,
    SampledTokens,
    StepPlan,
    StepReport,
)
from services.scheduler.inputs import RankReady, RankReports
from services.worker.steps.layout_evidence import check_parts
from tests.sim.processes.data_plane import WAIT, DataPlane, Member
from tests.sim.processes.memory import Held, Holder, Memory, Slip, Worked
from tests.sim.processes.model_thread import HOP_NS, LAYOUT_PARTS, MAX_UNREAD_STEPS, NOT_READY_NS, FlipWork, Work
from tests.sim.processes.resident_places import Places
from tests.sim.processes.shipped_table import ShippedPlaces
from tests.sim.processes.toy_model import next_token
from tests.sim.processes.world import Channel, InvariantError

if TYPE_CHECKING:
    from tests.sim.processes.group import Group


class RankProcess(Member):
    """One life after another; each serves one log."""

    def __init__(self, group: "Group", rank: Rank) -> None:
        super().__init__(group.world, f"rank-{rank}")
        self.group, self.rank = group, rank
        case = group.case
        self._slowness = case.slowness[rank] if case.slowness else 1.0
        self._step_ns, self._token_ns = case.step_ns, case.token_ns

    # A life.

    def boot(self) -> None:
        """The process is up, with nothing in its memory."""
        parts = self.group.parts
        self.is_up = True
        self.follower, self.participant = parts.follower(), parts.participant()
        self.flips = parts.flips(self.participant)
        self.reports: Channel | None = None
        self.mover: Channel | None = None
        self.plane: DataPlane | None = None
        self.places: Places | None = None
        self.memory: Memory | None = None
        self._queue: deque[LogEntry | FlipWork] = deque()
        self._work: Work | None = None
        self._fence: tuple[int, int] = (0, 0)
        self._unread: deque[tuple[LogIndex, list[tuple[RequestIndex, int]], tuple[TokenId, ...] | None]] = deque()
        self._digest = 0
        self._before: list[int | None] = []
        self._live: tuple[tuple[int, int], ...] = ()
        self._to_loop = Channel(self.world, self, self._tell, (0, min(HOP_NS, self.group.case.control[1])))
        self.group.on_rank_up(self)

    def open(self, reports: Channel, plane: DataPlane) -> None:
        """A scheduler has connected: this life is for its log."""
        self.reports, self.plane = reports, plane

    def on_stream_end(self) -> None:
        """The log has ended: the process exits and is replaced."""
        self.world.note(self.name, "exit", "the log ended")
        self.group.restart(self)

    # The log.

    def take_entry(self, entry: LogEntry) -> None:
        """The stream brought an entry; its fence is what reports carry from now on."""
        self._fence = (entry.generation, entry.epoch)
        self._queue.append(entry)
        if isinstance(flip := entry.entry, FlipEntry):
            self.world.at(NOT_READY_NS, self, self._say_behind, flip.flip_id)
        self._next()

    def _say_behind(self, flip_id: FlipId) -> None:
        """FLIP is received and entries before it still run: says so, as long as they do."""
        queued = (item.entry for item in self._queue if isinstance(item, LogEntry))
        if any(isinstance(entry, FlipEntry) and entry.flip_id == flip_id for entry in queued):
            self.carry_out(SayNotReady(flip_id, f"executing entry {self.follower.sequence}"))
            self.world.at(NOT_READY_NS, self, self._say_behind, flip_id)

    def _next(self) -> None:
        while self._work is None and self._queue:
            item = self._queue.popleft()
            self._work = self._execute(item) if isinstance(item, LogEntry) else self._flip_work(item)
            self.resume(None)

    def resume(self, value: Any) -> None:
        """The model thread goes on with what it waited for."""
        work = self._work
        assert work is not None
        try:
            while True:
                operation, *arguments = work.send(value)
                value = operation(*arguments)
                if value is WAIT:
                    return
        except StopIteration:
            self._work = None
            self._next()

    def compute(self, num_tokens: int) -> object:
        """Time passes."""
        spread = 0.8 + 0.4 * self.world.rng.random()
        self.world.at(
            int((self._step_ns + num_tokens * self._token_ns) * self._slowness * spread), self, self.resume, None
        )
        return WAIT

    def _execute(self, entry: LogEntry) -> Work:
        flip = self.follower.flip
        self.follower.follow(entry)
        self.group.checks.on_executed(self, entry)
        match entry.entry:
            case StepPlan() as plan:
                yield from self._step(plan, entry.sequence)
            case ResetEntry() as reset:
                yield (self.compute, 0)
                self._reset(reset)
            case FlipEntry() as armed:
                yield from self.park(armed)
            case CommitEntry(flip_id=flip_id, layout=layout):
                self.switch(layout)
                yield from self._settle(flip, layout)
                self._to_loop.send(CommitReached(flip_id))
            case AbandonEntry(flip_id=flip_id):
                yield from self._settle(flip, self.layout)
                self._check_source(flip_id)
                self._to_loop.send(AbandonReached(flip_id))

    def _reset(self, reset: ResetEntry) -> None:
        case = self.group.case
        if case.uses_shipped_table and self.rank == 0:
            self.places = ShippedPlaces(reset, case.limits.max_batch_tokens)
        else:
            self.places = self.group.parts.places(reset.max_resident_requests)
        self.places.poison = self.group.poison
        num_slots = reset.num_blocks * BLOCK_SLOTS
        held: Held = (reset.layout, FIRST_EPOCH)
        self.holders = [Holder("stage", held), *self.speculation(held)]
        self.memory = self.group.parts.memory(case.mode, reset.layout, num_slots, is_exclusive=case.is_exclusive)
        assert self.reports is not None
        num_blocks = self.group.case.limits.num_blocks
        self.reports.send(RankReady(self.rank, self.rank, self._fence, num_blocks, "toy"))

    def speculation(self, held: Held) -> list[Holder]:
        """The proposer's algorithm and its draft: of use only together."""
        return [Holder("algorithm", held), Holder("draft", held)]

    def switch(self, kind: LayoutKind) -> None:
        """COMMIT is executed: everything that holds a layout, by the shipped check."""
        assert self.follower.epoch is not None
        for holder in self.holders:
            holder.switch(kind, self.follower.epoch)
        evidence = {holder.name: {holder.held[0]} for holder in self.holders}
        check_parts(LAYOUT_PARTS, evidence, kind, self.follower.epoch)

    # A step.

    @property
    def layout(self) -> LayoutKind:
        """In force for the entry being executed."""
        assert self.follower.layout is not None
        return self.follower.layout

    def _step(self, plan: StepPlan, sequence: LogIndex) -> Work:
        plane, places, num_ranks = self.plane, self.places, self.group.case.num_ranks
        assert plane is not None and places is not None
        through = max(plan.tokens_through or 0, sequence - MAX_UNREAD_STEPS)
        while self._unread and self._unread[0][0] <= through:
            step, targets, ids = self._unread.popleft()
            if ids is None:
                ids = yield (plane.take_ids, self.rank, step)
            places.apply_tokens(step, targets, ids)
        places.apply_deltas(plan, sequence)
        ends = places.ends(plan)
        piped = self.layout is LayoutKind.PP
        if piped and self.rank > 0:
            hidden = yield (self.receive, sequence, ends)
            self.check_equal("hidden states", sequence, hidden, ends)
        yield (self.compute, plan.num_tokens)
        if not piped and num_ranks > 1:
            partials = yield (plane.join, self.rank, (sequence, "reduce"), ends)
            self.check_equal("partial sums", sequence, partials, [ends] * num_ranks)
        self._attend(plan, sequence)
        if piped and self.rank < num_ranks - 1:
            yield (self.hand_on, sequence, ends)
        sampled = None
        if plan.sampled_row:
            if not piped and num_ranks > 1:
                yield (plane.join, self.rank, (sequence, "logits"), None)
            sampled = self._sample(plan, sequence, ends, plane)
        self._digest = hash((self._digest, sequence, tuple(ends)))
        tokens = None if sampled is None else SampledTokens(sampled, non_finite=places.non_finite(plan))
        self._report(StepReport(sequence, self._digest, 0, 0, tokens))

    def receive(self, sequence: LogIndex, _ends: list[int]) -> object:
        """Hidden states of a step from the stage before."""
        assert self.plane is not None
        return self.plane.links[self.rank - 1].recv(sequence)

    def hand_on(self, sequence: LogIndex, ends: list[int]) -> object:
        """Hidden states of a step to the stage behind."""
        assert self.plane is not None
        return self.plane.links[self.rank].send(sequence, ends)

    def _attend(self, plan: StepPlan, sequence: LogIndex) -> None:
        assert self.places is not None and self.memory is not None
        slots = self.memory.slots(self.layout)
        self.places.read_rows(self, plan, slots, sequence)
        self.places.write_rows(plan, slots)

    def _sample(
        self, plan: StepPlan, sequence: LogIndex, ends: list[int], plane: DataPlane
    ) -> tuple[TokenId, ...] | None:
        _, algorithm, draft = self.holders
        if algorithm.held != draft.held:
            raise InvariantError(
                "half armed", f"{self.name} step {sequence}: algorithm of {algorithm.held}, draft of {draft.held}"
            )
        targets = [(plan.row_request_index[r], plan.row_start[r] + plan.row_num_tokens[r]) for r in plan.sampled_row]
        ids = None
        if self.rank == self.group.case.num_ranks - 1:
            ids = tuple(next_token(ends[row]) for row in plan.sampled_row)
            plane.publish(sequence, ids)
        self._unread.append((sequence, targets, ids))
        return ids

    def check_equal(self, what: str, sequence: int, got: object, own: object) -> None:
        """What peers hold must be what is computed here."""
        if got != own:
            raise InvariantError("agreement", f"{self.name} step {sequence}: {what} are of {got}, computed here {own}")

    def _report(self, report: StepReport) -> None:
        ids = "" if report.tokens is None else " ".join(map(str, report.tokens.token_ids))
        self.world.note(self.name, "done", report.sequence, ids)
        if self.reports is not None:
            self.reports.send(RankReports(self.rank, self._fence, (report,)))

    # A flip.

    def park(self, flip: FlipEntry) -> Work:
        """The log is executed up to the entry: says so, with the verdict whether the flip fits here."""
        odds, rng = self.group.case.odds, self.world.rng
        fits = not (odds.refuse and rng.random() < odds.refuse)
        self.group.moment("parked")
        assert self.memory is not None
        self._before, self._live = list(self.memory.slots(flip.target.other)), flip.live_runs
        plan_hash = hash((flip.target.value == "tp", flip.live_runs))
        self.say_parked(EntryReached(flip.flip_id, fits, "" if fits else "does not fit here", plan_hash))
        yield from ()

    def say_parked(self, reached: EntryReached) -> None:
        """To the loop, which tells the mover."""
        self._to_loop.send(reached)

    def on_mover_connected(self, channel: Channel) -> int:
        """The mover's stream has opened: its number."""
        self.mover = channel
        self.world.note(self.name, "hears", "MoverConnected")
        stream, effects = self.flips.connect()
        self._carry_out(effects)
        return stream

    def on_mover_lost(self, channel: Channel) -> None:
        """A stream of the mover has ended, which may be an older one than what is open now."""
        if self.mover is channel:
            self.mover = None

    def on_command(
        self, stream: int, generation: int, command: AssembleReceived | EnterReceived | DisarmReceived
    ) -> None:
        """From the mover, on the stream of that number."""
        self.world.note(self.name, "hears", type(command).__name__)
        self._carry_out(self.flips.on_command(stream, generation, command))

    def _tell(self, event: ParticipantEvent) -> None:
        """The loop hears of the model thread or the log."""
        self.world.note(self.name, "hears", type(event).__name__)
        if isinstance(event, EntryReached):
            self._carry_out(self.flips.park(event, self._fence[0]))
        else:
            self._carry_out(self.flips.on_event(event))

    def _carry_out(self, effects: list[ParticipantEffect]) -> None:
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: ParticipantEffect) -> None:
        """What the participant's table asks for."""
        if isinstance(effect, StartWork):
            self._queue.append(FlipWork(effect.flip_id))
            self._next()
            return
        if isinstance(effect, SayPresent):
            self.group.checks.on_present(self, effect.flip_id, effect.round)
        if isinstance(effect, SayWithdrawn):
            self.group.checks.on_withdrawn(self, effect.flip_id, effect.round)
        if isinstance(effect, SayVerified):
            self.group.checks.on_verified(self, effect.flip_id)
        if self.mover is not None:
            self.mover.send(self.rank, self._fence[0], effect)
            if isinstance(effect, SayPresent):
                self._maybe_look(effect)

    def _maybe_look(self, said: SayPresent) -> None:
        odds = self.group.case.odds
        if odds.withdraw and self.world.rng.random() < odds.withdraw:
            self.world.at(self.world.draw((0, self.group.case.control[1])), self, self._look, said.flip_id)

    def _look(self, flip_id: FlipId) -> None:
        """There is no room for the flip any more; before the next round there is again."""
        if self.participant.flip_id == flip_id:
            self._carry_out(self.flips.on_event(RoomSeen(flip_id, "there is no room any more")))
            self._carry_out(self.flips.on_event(RoomSeen(flip_id, "")))

    def _flip_work(self, work: FlipWork) -> Work:
        flip = self.follower.flip
        if flip is None or flip.flip_id != work.flip_id:
            self._to_loop.send(WorkFailed(work.flip_id, "not parked for it", restored=True))
            return
        self.group.moment("working")
        outcome = yield from self.move(flip)
        said = self.said_of(flip, outcome)
        if isinstance(said, WorkFailed) and said.restored:
            self._check_source(flip.flip_id)
        self._to_loop.send(said)

    def said_of(self, flip: FlipEntry, outcome: Outcome) -> WorkDone | WorkFailed:
        """What the mover is told of the work."""
        match outcome:
            case Finished():
                self.group.moment("verified")
                return WorkDone(flip.flip_id, 0, 0)
            case Restored(reason):
                return WorkFailed(flip.flip_id, reason, restored=True)
            case Broken(reason):
                return WorkFailed(flip.flip_id, reason, restored=False)

    def move(self, flip: FlipEntry) -> Worked:
        """Reads what is in force, makes the other layout whole beside it, verifies."""
        assert self.memory is not None
        return (yield from self.memory.work(self, flip, self._slip(flip.flip_id)))

    def _slip(self, flip_id: FlipId) -> Slip | None:
        odds, rng = self.group.case.odds, self.world.rng
        for rank, slip in self.group.case.slips:
            if (rank, 1) == (self.rank, flip_id):
                return slip
        assert self.memory is not None
        if not odds.fail or rng.random() >= odds.fail:
            return None
        return rng.choice((*self.memory.slips, Slip.UNFORESEEN) if odds.breaks else self.memory.slips)

    def breaks(self) -> bool:
        """Whether something that has gone wrong cannot be undone."""
        odds = self.group.case.odds
        return bool(odds.breaks) and self.world.rng.random() < odds.breaks

    def _settle(self, flip: FlipEntry | None, kind: LayoutKind) -> Work:
        assert self.memory is not None and flip is not None
        outcome = yield from self.memory.settle(self, flip, kind)
        if isinstance(outcome, Broken):
            self.world.note(self.name, "exit", outcome.reason)
            self.world.at(0, None, self.group.crash, self)
            yield (lambda: WAIT,)

    def _check_source(self, flip_id: FlipId) -> None:
        """A layout is said to be whole: every row of it, of the live ones where the others had no pages."""
        assert self.memory is not None
        now, then = self.memory.slots(self.layout), self._before
        runs = self._live if self.memory.is_exclusive else ((0, len(then) // BLOCK_SLOTS),)
        for begin, length in runs:
            rows = slice(begin * BLOCK_SLOTS, (begin + length) * BLOCK_SLOTS)
            if now[rows] != then[rows]:
                raise InvariantError(
                    "source untouched", f"{self.name}: flip {flip_id} is undone and its source has changed"
                )
