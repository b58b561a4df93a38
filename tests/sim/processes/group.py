"""One group and its clients in one world: connects the processes, does the faults, runs a case to its end."""

import traceback
from dataclasses import dataclass
from functools import partial
from random import Random

from services.core.flip.attempts import Coordination
from services.core.flip.coordinator import FlipCoordinator
from services.core.flip.log_side import FlipAttempts
from services.core.flip.participant import FlipParticipant
from services.core.flip.rank_side import RankFlips
from services.core.flip.work import FlipWork
from services.core.ids import Epoch, Generation, LayoutKind, Rank
from services.core.layout import Layout, ShardUnits
from services.core.log import LogFollower
from services.placement.cuts import pp_layout, tp_layout
from services.policy.decide import LoadSignal, PolicyMode, PolicyRules, advise
from services.scheduler.batch.batcher import Batcher
from services.scheduler.inputs import Question, QuestionFailed
from services.scheduler.log import GenerationLog
from tests.sim.case import SLOW_CHANNEL_NS, Case, Fault
from tests.sim.checks import Checks
from tests.sim.processes.memory import Memory
from tests.sim.processes.mover import MoverProcess
from tests.sim.processes.rank import RankProcess
from tests.sim.processes.resident_places import Places
from tests.sim.processes.router import RouterProcess
from tests.sim.processes.scheduler import Run, SchedulerProcess
from tests.sim.processes.world import Channel, InvariantError, Process, World

Fence = tuple[Generation, Epoch]
CONNECT_AGAIN_NS = 5_000_000
"""Between two looks for a mover that is not there."""
UNITS = ShardUnits(num_layers=8, num_heads=8, num_kv_heads=8, ffn=64, ffn_unit=8, vocab=64)
LAYOUTS = {
    num_ranks: {LayoutKind.PP: pp_layout(UNITS, num_ranks), LayoutKind.TP: tp_layout(UNITS, num_ranks)}
    for num_ranks in range(1, 5)
}
RULES = PolicyRules(
    prefill_threshold_tokens=40,
    release_threshold_tokens=12,
    min_dwell_s=0.005,
    rest_s=0.02,
    resting_layout=LayoutKind.TP,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a schedule is run with: the shipped classes, unless a specimen puts a fault back into one."""

    batcher: type[Batcher] = Batcher
    follower: type[LogFollower] = LogFollower
    coordinator: type[FlipCoordinator] = FlipCoordinator
    participant: type[FlipParticipant] = FlipParticipant
    places: type[Places] = Places
    memory: type[Memory] = Memory
    work: type[FlipWork] = FlipWork
    rank: type[RankProcess] = RankProcess
    flips: type[RankFlips] = RankFlips
    log: type[GenerationLog] = GenerationLog
    attempts: type[FlipAttempts] = FlipAttempts
    coordination: type[Coordination] = Coordination
    scheduler: type[SchedulerProcess] = SchedulerProcess
    mover: type[MoverProcess] = MoverProcess
    channel: type[Channel] = Channel


SHIPPED = Parts()


@dataclass(slots=True, eq=False)
class Ask:
    """A question on its way to the mover, or at it."""

    run: Run
    question: Question
    answers: Channel
    asks: Channel | None = None
    """None: the mover is not there yet."""


class PolicyProcess(Process):
    """The shipped rule, asked over a channel."""

    def on_signal(self, signal: LoadSignal, fence: Fence, answers: Channel) -> None:
        """Advises on what the scheduler saw a while ago."""
        answers.send(advise(PolicyMode.AUTO, RULES, signal), fence)


class Group:
    """Everything of one schedule."""

    def __init__(self, case: Case, rng: Random, parts: Parts = SHIPPED, *, keeps_all: bool = False) -> None:
        self.case, self.parts = case, parts
        self.world = World(rng, keeps_all=keeps_all, slow_share=case.slow_share, slow_ns=SLOW_CHANNEL_NS)
        self.layouts: dict[LayoutKind, Layout] = LAYOUTS[case.num_ranks]
        self.poison = {
            asked.name: len(asked.prompt) + asked.poison_index for asked in case.asked if asked.poison_index is not None
        }
        self.checks = Checks(self)
        self.router = RouterProcess(self)
        self.scheduler = parts.scheduler(self)
        self.mover = parts.mover(self)
        self.policy = PolicyProcess(self.world, "policy")
        self.ranks = [parts.rank(self, Rank(rank)) for rank in range(case.num_ranks)]
        self._processes: dict[str, Process] = {
            process.name: process for process in (self.scheduler, self.mover, *self.ranks)
        }
        self._signals: Channel | None = None
        self._advice: Channel | None = None
        self._said: dict[Rank, Channel] = {}
        self._awaiting = [fault for fault in case.faults if fault.moment is not None]
        self.mover_ask: Ask | None = None
        """The scheduler's open question."""

    def run(self) -> None:
        """The whole case.

        Raises:
            InvariantError: an invariant broke, or shipped code raised.
        """
        world, case = self.world, self.case
        for process in self._processes.values():
            self._boot_later(process)
        for asked in case.asked:
            world.at(asked.at_ns + case.begin_ns, None, self.router.arrive, asked)
        for trigger in case.triggers:
            world.at(trigger.at_ns + case.begin_ns, None, self._trigger, trigger.target)
        for fault in case.faults:
            if fault.moment is None:
                world.at(fault.at_ns + case.begin_ns, None, self._do, fault)
        try:
            world.run(case.bound_ns)
        except InvariantError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename.rsplit('/', 2)[-2]}/{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
            raise InvariantError("raised", f"{type(error).__name__} at {place}: {error}") from error
        self.checks.at_end()

    def take_apart(self) -> None:
        """The group has been looked at and is used no more: what refers to each other in rings is let go of at once."""
        for process in (self.router, self.policy, *self._processes.values()):
            vars(process).clear()
        self.world.heap.clear()
        for part in (self.checks, self.world, self):
            vars(part).clear()

    # Processes.

    def _boot_later(self, process: Process, after_ns: int = 0) -> None:
        self.world.at(after_ns + self.world.draw(self.case.boot), process, self._boot, process)

    def _boot(self, process: Process) -> None:
        self.world.note(process.name, "boot", f"life {process.life + 1}")
        process.boot()  # type: ignore[attr-defined]

    def _trigger(self, target: LayoutKind) -> None:
        if self.scheduler.is_up and not self.scheduler.is_stopped:
            self.scheduler.trigger(target, "by hand")

    def moment(self, name: str) -> None:
        """A flip has come so far: faults that waited for it happen within a few messages' time."""
        for fault in self._awaiting:
            if fault.moment == name and self.world.now_ns >= fault.at_ns + self.case.begin_ns:
                self._awaiting.remove(fault)
                self.world.at(self.world.draw((0, 2 * self.case.control[1])), None, self._do, fault)
                return

    def _do(self, fault: Fault) -> None:
        process = self._processes[fault.who]
        self.world.note("fault", fault.kind, fault.who)
        self.checks.on_fault(fault)
        if fault.kind == "crash":
            self.crash(process, fault.for_ns)
        elif fault.kind == "unlink":
            assert isinstance(process, RankProcess)
            self._unlink(process)
        elif fault.kind == "unask":
            self._unask()
        elif fault.kind == "fill":
            self.mover.journal.is_full = True
            self.world.at(fault.for_ns, None, setattr, self.mover.journal, "is_full", False)
        elif not process.is_stopped:
            process.stop()
            self.world.at(fault.for_ns, None, self._go_on, process, process.life)

    def _go_on(self, process: Process, life: int) -> None:
        if process.life == life:
            self.world.note("fault", "continue", process.name)
            process.go_on()

    def crash(self, process: Process, away_ns: int = 0) -> None:
        """SIGKILL: what it sent still arrives, then its peers see the end of their streams; a mover may stay away."""
        if not process.is_up:
            return
        if isinstance(process, RankProcess):
            self.restart(process)
        elif process is self.scheduler:
            self._crash_scheduler()
        else:
            self._crash_mover(away_ns)

    def restart(self, rank: RankProcess) -> None:
        """A rank's process ends, whyever, and is replaced."""
        reports, run = rank.reports, self.scheduler.run
        self._drop_link(rank)
        rank.die()
        if reports is not None and run is not None:
            reports.end(self.scheduler.on_rank_lost, run, f"{rank.name} is lost")
        self._boot_later(rank)

    def _crash_scheduler(self) -> None:
        scheduler, run = self.scheduler, self.scheduler.run
        if run is not None:
            for rank, stream in zip(self.ranks, run.streams, strict=True):
                stream.end(rank.on_stream_end)
        self.leave_mover()
        if scheduler.router is not None:
            scheduler.router.end(self.router.on_stream_end)
        scheduler.die()
        scheduler.run = None
        self._boot_later(scheduler)

    def _crash_mover(self, away_ns: int) -> None:
        for rank, link in self.mover.links.items():
            if (said := self._said.get(rank)) is not None:
                link.end(self.ranks[rank].on_mover_lost, said)
        ask = self.mover_ask
        self.mover.die()
        self._boot_later(self.mover, away_ns)
        if ask is not None:
            ask.answers.end(self.scheduler.on_mover_said, ask.run, ask.question, _broken(ask))

    # Streams.

    @property
    def all_fresh(self) -> bool:
        """Whether every rank is up and has had no log."""
        return all(rank.is_up and rank.reports is None for rank in self.ranks)

    def on_rank_up(self, rank: RankProcess) -> None:
        """A rank has a new life: the scheduler and the mover find it after a while."""
        world = self.world
        world.at(world.draw(self.case.control), None, self._look)
        self._link_later(rank)

    def _look(self) -> None:
        if not self.scheduler.is_stopped:
            self.scheduler.look_for_ranks()
        else:
            self.world.at(self.case.boot[1], None, self._look)

    def connect_router(self) -> None:
        """Opens the router's stream: when the scheduler is up and the router has seen its last stream end."""
        scheduler, control = self.scheduler, self.case.control
        if not scheduler.is_up or self.router.scheduler is not None:
            return
        scheduler.router = Channel(self.world, self.router, self._to_router, control)
        self.router.scheduler = Channel(self.world, scheduler, scheduler.on_router, control)
        if scheduler.run is not None and scheduler.run.is_open:
            scheduler.router.send("opened", scheduler.run.fence.generation)

    def _to_router(self, what: str, argument: object) -> None:
        self.router.on_scheduler(what, argument)

    def connect_policy(self) -> None:
        """A new life of the scheduler: the policy's stream opens."""
        control = self.case.control
        self._signals = Channel(self.world, self.policy, self.policy.on_signal, control)
        self._advice = Channel(self.world, self.scheduler, self.scheduler.on_advice, control)

    def ask_policy(self, signal: LoadSignal, fence: Fence) -> None:
        """The scheduler's load, to the policy."""
        assert self._signals is not None and self._advice is not None
        self._signals.send(signal, fence, self._advice)

    def connect_links(self) -> None:
        """A new life of the mover: it looks for every rank."""
        for rank in self.ranks:
            self._link_later(rank)

    def link_again(self, rank: Rank) -> None:
        """The mover has seen a link end."""
        self._link_later(self.ranks[rank])

    def _link_later(self, rank: RankProcess) -> None:
        self.world.at(self.world.draw(self.case.control), rank, self._link, rank, self.mover.life)

    def _link(self, rank: RankProcess, mover_life: int) -> None:
        mover = self.mover
        if not (rank.is_up and mover.is_up and mover.life == mover_life) or rank.rank in mover.links:
            return
        said = self._said[rank.rank] = Channel(self.world, mover, mover.on_said, self.case.control)
        stream = rank.on_mover_connected(said)
        mover.links[rank.rank] = Channel(self.world, rank, partial(rank.on_command, stream), self.case.control)

    def _drop_link(self, rank: RankProcess) -> None:
        said = self._said.pop(rank.rank, None)
        if said is not None and rank.mover is said:
            said.end(self.mover.on_rank_lost, rank.rank)

    def _unlink(self, rank: RankProcess) -> None:
        link = self.mover.links.get(rank.rank)
        if link is None or rank.mover is None:
            return
        link.cut()
        rank.mover.cut()
        rank.on_mover_lost(rank.mover)
        self.mover.on_rank_lost(rank.rank)

    def _unask(self) -> None:
        """The scheduler's stream to the mover breaks, and both live: what is on its way is lost, and it asks again."""
        ask = self.mover_ask
        if ask is None or ask.asks is None:
            return
        ask.asks.end(self.mover.on_scheduler_lost, ask.answers)
        ask.answers.cut()
        delay_ns = self.world.draw(self.case.control)
        self.world.at(delay_ns, self.scheduler, self.scheduler.on_mover_said, ask.run, ask.question, _broken(ask))

    def is_asking(self, question: Question) -> bool:
        """Whether it is the one that the scheduler waits for."""
        return self.mover_ask is not None and self.mover_ask.question is question

    def leave_mover(self) -> None:
        """Nobody waits for an answer any more: the stream to the mover ends."""
        ask, self.mover_ask = self.mover_ask, None
        if ask is not None and ask.asks is not None:
            ask.asks.end(self.mover.on_scheduler_lost, ask.answers)

    def ask_mover(self, run: Run, question: Question) -> None:
        """The scheduler's question, once the mover is there."""
        self.leave_mover()
        scheduler = self.scheduler
        hear = partial(scheduler.on_mover_said, run, question)
        self.mover_ask = Ask(run, question, Channel(self.world, scheduler, hear, self.case.control))
        self._put_question(self.mover_ask)

    def _put_question(self, ask: Ask) -> None:
        if self.mover_ask is not ask:
            return
        if not self.mover.is_up:
            self.world.at(CONNECT_AGAIN_NS, self.scheduler, self._put_question, ask)
            return
        ask.asks = Channel(self.world, self.mover, self.mover.run_flip, self.case.control)
        ask.asks.send((ask.question.fence[0], ask.question.flip_id), ask.answers)


def _broken(ask: Ask) -> QuestionFailed:
    return QuestionFailed(ask.question.flip_id, "its stream ended")
