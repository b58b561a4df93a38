"""One log's way through this process: entries off the stream to the model thread, answers and at most one fault back.

Never executes and never decides; it keeps order and says how it ended. A fault is the last message. Whatever the end,
the data plane is aborted at once, so that no peer waits for this rank.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import grpc.aio
from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from kernels.collective_status import AbortReason, CollectiveError
from services.core.log_follower import ProtocolError
from services.core.step import StepReport
from services.mesh.codec.common import CodecError
from services.mesh.codec.worker import entry_from_proto, report_to_proto
from services.mesh.errors import ConfigurationError, GenerationEndedError
from services.worker.boot import Rig
from services.worker.execution import Answer, Execution
from services.worker.runner import Opened

THREAD_END_S = 1.0
"""How long the model thread may take to end once the data plane is aborted: one kernel, not one step."""

ExecuteContext = grpc.aio.ServicerContext[pb.ExecuteStepsRequest, pb.ExecuteStepsResponse]


class StepStream:
    """Serves one stream; made and used on the event loop."""

    def __init__(self, rig: Rig, incarnation: int, on_report: Callable[[StepReport], None]) -> None:
        self._rig, self._incarnation, self._on_report = rig, incarnation, on_report
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._execution = Execution(rig.runner, self._notify)
        self._fence = layout_pb2.Fence()
        self._closed = False
        self._refused: tuple[int, Exception] | None = None
        """(sequence, error) of an entry that could not even be handed over."""

    def _notify(self) -> None:
        """On the model thread: wakes the writer."""
        self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self, requests: AsyncIterator[pb.ExecuteStepsRequest], context: ExecuteContext) -> Exception:
        """Serves the stream until it ends or a fault is sent; returns why the process must go."""
        self._execution.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, requests)
            await self._write(context)
            tasks.cancel_scope.cancel()
        fault = self._fault()
        return _exit_error(fault[1]) if fault else GenerationEndedError("the scheduler ended its log")

    def abort(self, reason: AbortReason) -> None:
        """Releases every wait of every rank."""
        self._rig.carrier.abort(reason)

    def finish(self) -> bool:
        """Waits for the model thread, after `abort`; whether it ended. Blocks: not for the event loop."""
        return self._execution.finish(THREAD_END_S)

    async def _read(self, requests: AsyncIterator[pb.ExecuteStepsRequest]) -> None:
        async for message in requests:
            try:
                self._execution.offer(entry_from_proto(message))
            except (CodecError, ProtocolError) as error:
                self._refused = (message.sequence, error)
                self.abort(AbortReason.STEP_FAILED)
                break
            self._fence = message.fence
        self._closed = True
        self._wake.set()

    async def _write(self, context: ExecuteContext) -> None:
        """Sends answers as they come; ends after a fault, or when the scheduler has closed its side."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Read before the answers are taken: what was answered before the end is sent before it.
            fault, closed = self._fault(), self._closed
            for message in self._messages(list(self._execution.take())):
                await context.write(message)
            if fault is not None:
                await context.write(self._fault_message(*fault))
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
