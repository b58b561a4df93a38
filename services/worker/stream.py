"""One log's way through this process: entries off the stream to the model thread, answers and at most one fault back.

Never executes and never decides; it keeps order and says how it ended. A fault is the last message. Whatever the end,
the data plane is aborted at once, so that no peer waits for this rank.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from kernels.cpu.collective_status import AbortReason, CollectiveError
from services.core.errors import ConfigurationError, GenerationEndedError
from services.core.ids import LogIndex
from services.core.log import ProtocolError
from services.core.step import FlipEntry, StepReport
from services.mesh.codec.common import CodecError
from services.mesh.codec.worker import entry_from_proto, report_to_proto
from services.mesh.debug.breakpoints import Holds
from services.worker.boot import RankRuntime
from services.worker.breakpoints import HeldRank
from services.worker.model_thread import Answer, Execution
from services.worker.participation import FlipAnswer, Participation
from services.worker.steps.reset import Opened

THREAD_END_S = 1.0
"""How long the model thread may take to end once the data plane is aborted: one kernel, not one step."""


class StepStream:
    """Serves one stream; made and used on the event loop."""

    def __init__(
        self, rig: RankRuntime, incarnation: int, on_report: Callable[[StepReport], None], holds: Holds | None = None
    ) -> None:
        self._rig, self._incarnation, self._on_report = rig, incarnation, on_report
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        rank = rig.runner if holds is None else HeldRank(rig.runner, holds, rig.runner.damage)
        self._execution = Execution(rank, self._notify)
        self.participation = Participation(rig.rank, self._execution.offer_work, self._execution.offer_look)
        self._fence = layout_pb2.Fence()
        self._closed = False
        self._refused: tuple[int, Exception] | None = None
        """(sequence, error) of an entry that could not even be handed over."""

    def _notify(self) -> None:
        """On the model thread: wakes the writer."""
        self._loop.call_soon_threadsafe(self._wake.set)

    async def responses(
        self, requests: AsyncIterator[pb.ExecuteStepsRequest]
    ) -> AsyncIterator[pb.ExecuteStepsResponse]:
        """Serves the stream: yields answers as they come, and ends after a fault or when the scheduler has closed."""
        self._execution.start()
        reader = asyncio.create_task(self._read(requests))
        try:
            async for response in self._answers():
                yield response
        finally:
            self.participation.stop_waiting()
            reader.cancel()

    def reason(self) -> Exception:
        """Why the process must go, once the stream has ended."""
        if (fault := self._fault()) is not None:
            return _exit_error(fault[1])
        return GenerationEndedError("the scheduler ended its log" if self._closed else "the scheduler's stream broke")

    def abort(self, reason: AbortReason) -> None:
        """Releases every wait of every rank."""
        self._rig.carrier.watch.abort(reason)

    def finish(self) -> bool:
        """Waits for the model thread, after `abort`; whether it ended. Blocks: not for the event loop."""
        return self._execution.finish(THREAD_END_S)

    async def _read(self, requests: AsyncIterator[pb.ExecuteStepsRequest]) -> None:
        async for message in requests:
            try:
                entry = entry_from_proto(message)
                self._execution.offer(entry)
            except (CodecError, ProtocolError) as error:
                self._refused = (message.sequence, error)
                self.abort(AbortReason.STEP_FAILED)
                self._wake.set()
                return
            self._fence = message.fence
            if isinstance(entry.entry, FlipEntry):
                self.participation.expect(entry.entry.flip_id, message.fence, partial(self._behind, entry.sequence))
        self._closed = True
        self._wake.set()

    def _behind(self, flip: LogIndex) -> str:
        return f"executing entry {self._rig.runner.follower.sequence}, the flip is entry {flip}"

    async def _answers(self) -> AsyncIterator[pb.ExecuteStepsResponse]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Read before the answers are taken: what was answered before the end is sent before it.
            fault, closed = self._fault(), self._closed
            answers = list(self._execution.take())
            self._tell_participation(answers)
            for message in self._messages(answers):
                yield message
            if fault is not None:
                yield self._fault_message(*fault)
            if fault is not None or closed:
                return

    def _messages(self, answers: list[Answer]) -> Iterator[pb.ExecuteStepsResponse]:
        """Readiness by itself, reports in one message."""
        reports = [answer for answer in answers if isinstance(answer, StepReport)]
        for answer in answers:
            if isinstance(answer, Opened):
                yield pb.ExecuteStepsResponse(ready=self._ready(answer))
        if reports:
            packed = pb.StepReports(fence=self._fence, reports=[report_to_proto(report) for report in reports])
            yield pb.ExecuteStepsResponse(reports=packed)
        for report in reports:
            self._on_report(report)

    def _tell_participation(self, answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, FlipAnswer):
                self.participation.on_answer(answer, self._fence)

    def _ready(self, opened: Opened) -> pb.WorkerReady:
        return pb.WorkerReady(
            fence=self._fence,
            rank=self._rig.rank,
            incarnation=self._incarnation,
            num_blocks=opened.num_blocks,
            model_digest=self._rig.files.digest,
        )

    def _fault(self) -> tuple[int, BaseException] | None:
        """(sequence, error) of the first thing that went wrong."""
        if self._refused is not None:
            return self._refused
        error = self._execution.error
        return None if error is None else (self._execution.failed_at, error)

    def _fault_message(self, sequence: int, error: BaseException) -> pb.ExecuteStepsResponse:
        fault = pb.WorkerFault(
            kind=_fault_kind(error), rank=self._rig.rank, sequence=sequence, message=f"{type(error).__name__}: {error}"
        )
        return pb.ExecuteStepsResponse(fault=fault)


def _fault_kind(error: BaseException) -> pb.FaultKind.ValueType:
    match error:
        case ProtocolError() | CodecError():
            return pb.FAULT_KIND_PROTOCOL
        case CollectiveError():
            return pb.FAULT_KIND_COLLECTIVE
        case ConfigurationError():
            return pb.FAULT_KIND_CONFIGURATION
        case _:
            return pb.FAULT_KIND_INTERNAL


def _exit_error(error: BaseException) -> Exception:
    """What the process ends with: a broken log or a lost peer is no fault of its own, the rest comes out as it is."""
    if isinstance(error, ProtocolError | CodecError | CollectiveError):
        return GenerationEndedError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else GenerationEndedError(repr(error))
