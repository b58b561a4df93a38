"""One generation at work: one loop that takes what has come in, steps the log and performs what is ready.

Ranks, routers, the mover, the policy and the clock put their words into one inbox; the loop alone touches the log. It
decides nothing: `GenerationLog` does. Nor does it survive anything: what ends the log, or fails in here, ends the
generation as `GenerationLostError`. Every entry is serialised once and the same bytes go to each rank. Event driven:
with nothing to compute nothing runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.errors import MeshError
from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, Generation, LayoutKind
from services.mesh.codec.common import CodecError
from services.mesh.codec.flip import outcome_to_proto
from services.mesh.codec.worker import entry_to_proto, report_from_proto
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers, unary
from services.mesh.telemetry.progress import Progress
from services.scheduler.batch.pressure import Relief
from services.scheduler.inputs import (
    Carry,
    Clock,
    FlipEnded,
    FlipWanted,
    Input,
    Question,
    RankGone,
    RankReady,
    RankReports,
    Ready,
)
from services.scheduler.log import GenerationLog
from services.scheduler.memory_watch import MemoryWatch
from services.scheduler.meters import Meters
from services.scheduler.streams.mover_question import MoverQuestion
from services.scheduler.streams.policy_link import PolicyLink, signal_of
from services.scheduler.streams.rank_stream import RankLostError, RankStream
from services.scheduler.streams.sessions import Sessions
from services.scheduler.timeline import Timeline

NS_PER_S = 1_000_000_000
ENDED = "the generation ended; its requests are submitted again"


class GenerationLostError(Exception):
    """The generation is over; the message names the ranks and the sequence, and what they did or did not do."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a generation works with; it outlives it."""

    peers: Peers
    sessions: Sessions
    meters: Meters
    progress: Progress
    log: Log
    rpc_s: float
    memory: MemoryWatch | None = None
    """None: memory is not watched."""


class GenerationRun:
    """From RESET to its loss or the end of the process."""

    def __init__(self, log: GenerationLog, streams: Sequence[RankStream], around: Surroundings) -> None:
        self.log = log
        self.timeline = Timeline(log.layout)
        self.around = around
        self._streams = streams
        self._inbox: list[Input] = []
        self._has_mail = asyncio.Event()
        self._policy = PolicyLink(around.peers, around.log, around.meters, self._signal)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._asking: MoverQuestion | None = None
        self._waiting: dict[int, asyncio.Future[FlipEnded]] = {}
        self._num_tickets = 0

    def give(self, given: Input) -> None:
        """One more input; taken with the loop's next turn, so that requests that come together start together."""
        self._inbox.append(given)
        self._has_mail.set()

    async def flip(self, target: LayoutKind) -> FlipEnded:
        """A flip by hand, to its end."""
        self._num_tickets += 1
        ticket, cause = self._num_tickets, "by hand"
        answer: asyncio.Future[FlipEnded] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        self.give(FlipWanted(target, cause, ticket=ticket))
        try:
            return await answer
        finally:
            self._waiting.pop(ticket, None)

    async def run(self, on_open: Callable[[], Awaitable[None]]) -> None:
        """Opens the log, calls `on_open` once every rank is ready, and serves until cancelled.

        Raises:
            GenerationLostError: always, unless cancelled; the streams are closed then as well.
        """
        reasons: list[str] = []
        try:
            async with anyio.create_task_group() as tasks:
                for stream in self._streams:
                    tasks.start_soon(stream.write_all)
                    tasks.start_soon(self._listen, stream)
                await self._serve(tasks, on_open)
        except* GenerationLostError as group:
            reasons = [str(error) for error in _leaves(group)]
        except* Exception as group:
            # A fault of this process: what the log holds is not known any more, and nobody may wait for it.
            self.around.log.error("generation-failed", exc_info=group)
            reasons = [f"a fault of the scheduler: {type(error).__name__}: {error}" for error in _leaves(group)]
        finally:
            self._end()
        raise GenerationLostError("; ".join(reasons))

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.withdraw()
        for stream in self._streams:
            stream.close()
        for ticket, answer in self._waiting.items():
            if not answer.done():
                target = self.log.layout.other
                answer.set_result(FlipEnded(None, None, ENDED, target, "by hand", ticket))

    # The loop.

    async def _serve(self, tasks: TaskGroup, on_open: Callable[[], Awaitable[None]]) -> None:
        while True:
            ready = self._next()
            self._perform(ready, tasks)
            if ready.is_opened:
                await on_open()
                tasks.start_soon(self._policy.run, self.give)
            if ready.lost is not None:
                raise GenerationLostError(ready.lost)
            await self._has_mail.wait()

    def _next(self) -> Ready:
        """Steps the log through all that has come in."""
        self._has_mail.clear()
        inbox, self._inbox = self._inbox, []
        memory, now_ns = self.around.memory, time.monotonic_ns()
        for given in inbox:
            self.log.step(given, now_ns)
        if memory is not None and self.log.is_open and (looked := memory.look()) is not None:
            self.log.step(looked, now_ns)
        return self.log.ready()

    def _perform(self, ready: Ready, tasks: TaskGroup) -> None:
        for entry in ready.entries:
            message = entry_to_proto(entry).SerializeToString()
            for stream in self._streams:
                stream.put(message)
        self.around.sessions.deliver(ready.events)
        for record in ready.finished:
            self.around.progress.beat()
            self.around.meters.on_finished(record, self.log.batcher)
        for ended in ready.flips:
            self._on_flip_ended(ended)
        for carry in ready.carries:
            tasks.start_soon(self._report, carry)
        for relief in ready.relieved:
            self._say_relieved(relief)
        if ready.question is not None:
            self._ask(ready.question, tasks)
        self._set_timer(ready.clock_ns)
        self._policy.touch()

    def _say_relieved(self, relief: Relief) -> None:
        memory = self.around.memory
        assert memory is not None, "only what is watched is relieved"
        self.around.log.warning(
            "memory-pressure",
            rung=relief.rung.value,
            blocks=relief.num_blocks,
            request=relief.request_id,
            free_bytes=memory.free_bytes,
            floor_bytes=memory.floor_bytes,
        )

    def _set_timer(self, clock_ns: int | None) -> None:
        """A timer that is early does no harm: the log looks at its clocks, and asks for the next one."""
        if clock_ns is None or (self._timer_ns is not None and self._timer_ns <= clock_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = clock_ns
        wait_s = max(0, clock_ns - time.monotonic_ns()) / NS_PER_S
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_ns = None
        self.give(Clock())

    # Ranks.

    async def _listen(self, stream: RankStream) -> None:
        try:
            while True:
                self.give(_answer(stream, await stream.read()))
        except (RankLostError, CodecError) as error:
            self.give(RankGone(str(error)))

    # Flips.

    def _ask(self, question: Question, tasks: TaskGroup) -> None:
        if self._asking is not None:
            self._asking.withdraw()
        if question.entry is None:
            self.around.log.info("flip-asked", flip=question.flip_id, target=question.target.value)
        self._asking = MoverQuestion(self.around.peers.channel("mover"), question)
        tasks.start_soon(self.listen_to_mover, self._asking)

    async def listen_to_mover(self, question: MoverQuestion) -> None:
        """Takes the mover's words, until there are no more."""
        async for word in question.words():
            self.give(word)

    def _on_flip_ended(self, ended: FlipEnded) -> None:
        if ended.flip_id is not None:
            if self._asking is not None:
                self._asking.withdraw()
                self._asking = None
            in_a_row = self.log.flips.past.abandoned_in_a_row
            self.timeline.on_flip_ended(ended, in_a_row, self.around.log, self.around.meters)
        if ended.outcome is FlipOutcome.BROKEN or ended.ticket is None:
            # Whoever waits for what is broken hears that the generation has ended.
            return
        answer = self._waiting.get(ended.ticket)
        if answer is not None and not answer.done():
            answer.set_result(ended)

    async def _report(self, carry: Carry) -> None:
        """Tells the mover what a flip did to requests; its loss costs a trace, nothing else."""
        request = mover_service_pb2.ReportCarryRequest(
            fence=layout_pb2.Fence(generation=carry.fence[0], epoch=carry.fence[1]),
            flip_id=carry.flip_id,
            num_carried_requests=carry.num_requests,
            num_partly_prefilled=carry.num_partly_prefilled,
            num_live_blocks=carry.num_live_blocks,
            longest_token_gap_ns=carry.longest_gap_ns,
            written=outcome_to_proto(carry.outcome),
        )
        stub = MoverServiceStub(self.around.peers.channel("mover"))
        try:
            await unary(stub.ReportCarry, request, timeout_s=self.around.rpc_s)
        except MeshError as error:
            self.around.log.warning("flip-not-reported", flip=carry.flip_id, error=error)

    def _signal(self) -> policy_service_pb2.AdviseLayoutRequest:
        return signal_of(self.log, time.monotonic_ns())


def _answer(stream: RankStream, message: pb.ExecuteStepsResponse) -> Input:
    """What a rank's message is to the log."""
    match message.WhichOneof("message"):
        case "ready":
            ready = message.ready
            return RankReady(stream.rank, ready.rank, _fence(ready.fence), ready.num_blocks, ready.model_digest)
        case "reports":
            reports = tuple(report_from_proto(report) for report in message.reports.reports)
            return RankReports(stream.rank, _fence(message.reports.fence), reports)
        case other:
            return RankGone(f"rank {stream.rank} sent {other}, ready or reports expected")


def _fence(fence: layout_pb2.Fence) -> tuple[Generation, Epoch]:
    return Generation(fence.generation), Epoch(fence.epoch)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
