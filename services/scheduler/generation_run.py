"""One generation at work: writes the log to every rank, hears their answers, commits, and issues the next steps.

Every entry is serialised once and the same bytes go to each rank. It decides nothing: `GenerationLog` does; nor does it
survive anything: whatever a rank does wrong, or does not do in time, ends it as `GenerationLostError`. Event
driven: with nothing to compute nothing runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import anyio
from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.blocks import PoolCensus
from services.core.flip.log_side import FlipBrokenError
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex, RequestId
from services.core.request import RequestEvent, Submission
from services.core.step import AbandonEntry, CommitEntry, LogEntry
from services.mesh.codec.common import CodecError
from services.mesh.codec.worker import entry_to_proto, report_from_proto
from services.mesh.settings.tables import DeadlineSettings
from services.scheduler.batch.batcher import Batcher, ResultError
from services.scheduler.batch.step_ledger import LogBrokenError, StepRecord
from services.scheduler.flips import Carry
from services.scheduler.log import GenerationLog
from services.scheduler.sizing import GroupSize
from services.scheduler.streams.rank_stream import RankLostError, RankStream
from services.scheduler.token_gaps import FlipGaps, TokenGaps

NS_PER_S = 1_000_000_000
STOOD_STILL_S = 0.5
"""A wait that lasts so much longer than asked: this process was stopped; and what it gives its peers' words then."""

Deliver = Callable[[list[RequestEvent]], None]


class GenerationLostError(Exception):
    """The generation is over; the message names the ranks and the sequence, and what they did or did not do."""


_ENDINGS = (GenerationLostError, RankLostError, LogBrokenError, ResultError, CodecError, FlipBrokenError)


def _nobody() -> None:
    """Where nobody wants to hear."""


class GenerationRun:
    """The log of one generation, from RESET to its loss or the end of the process."""

    def __init__(
        self,
        generation: Generation,
        kind: LayoutKind,
        size: GroupSize,
        streams: Sequence[RankStream],
        deadlines: DeadlineSettings,
        deliver: Deliver,
        on_finished: Callable[[StepRecord], None],
    ) -> None:
        self.gaps = TokenGaps()
        self.background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
        """What runs beside the log once it is open, and ends with it."""
        self.batcher = Batcher(size.limits, size.layouts[kind])
        self._log = GenerationLog(generation, self.batcher, size.layouts, kind)
        self._log.write = self._write
        self.ledger = self._log.ledger
        self._streams, self._deadlines = streams, deadlines
        self._deliver_to_routers, self._on_finished = deliver, on_finished
        self.on_change: Callable[[], None] = _nobody
        """Hears that requests, blocks or the layout may have changed."""
        self.relieve: Callable[[], None] = _nobody
        """Asked before steps are issued: looks at memory, not each time, and has blocks given back."""
        self._has_steps = asyncio.Event()
        self._parked, self._went_on = asyncio.Event(), asyncio.Event()
        self._is_open = False
        self._will_pump = False

    @property
    def generation(self) -> Generation:
        """This run's number."""
        return self._log.fence.generation

    @property
    def epoch(self) -> Epoch:
        """The layout's version now."""
        return self._log.fence.epoch

    @property
    def kind(self) -> LayoutKind:
        """The layout now."""
        return self._log.kind

    @property
    def fence_message(self) -> layout_pb2.Fence:
        """Generation and epoch now, as they travel."""
        return layout_pb2.Fence(generation=self.generation, epoch=self.epoch)

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
                await self._open()
                await on_open()
                for stream in self._streams:
                    tasks.start_soon(self._listen, stream)
                tasks.start_soon(self._watch)
                for background in self.background:
                    tasks.start_soon(background)
        except* _ENDINGS as group:
            reasons = [str(error) for error in _leaves(group)]
        finally:
            self._is_open = False
            for stream in self._streams:
                stream.close()
        raise GenerationLostError("; ".join(reasons))

    # Requests: events go to `deliver`.

    def submit(self, submission: Submission) -> None:
        """Takes a request, or tells why not."""
        self._deliver(self.batcher.submit(submission, time.monotonic_ns()))
        self._pump_soon()

    def abort(self, request_id: RequestId) -> None:
        """Ends a request for its client."""
        self._deliver(self.batcher.abort(request_id))
        self._pump_soon()

    def finish(self, request_id: RequestId, num_output_tokens: int) -> None:
        """Ends a request where the router matched a stop string."""
        self._deliver(self.batcher.finish(request_id, num_output_tokens))
        self._pump_soon()

    # Flips.

    def arm(self, flip_id: FlipId, target: LayoutKind) -> tuple[LogIndex, Carry]:
        """Freezes the batch and writes FLIP; returns its place in the log and what is carried."""
        self._parked = asyncio.Event()
        num_partly = self.batcher.num_partly_prefilled
        entry = self._log.arm(flip_id, target)
        self._note_parked()
        return self._log.sequence, Carry(self.batcher.load().resident_requests, num_partly, entry.live_runs)

    @property
    def is_parked(self) -> bool:
        """Whether every step before FLIP is acknowledged."""
        return self._log.is_parked

    async def parked(self) -> None:
        """Waits until every step before FLIP is acknowledged: ranks say so by another way than they verify a flip."""
        await self._parked.wait()

    def conclude(self, entry: CommitEntry | AbandonEntry) -> FlipGaps:
        """Writes a flip's outcome and goes on, after a COMMIT under the next epoch."""
        gaps = self.gaps.begin()
        self._log.conclude(entry)
        self._pump_soon()
        return gaps

    async def carried_on(self, gaps: FlipGaps, within_s: float) -> int | None:
        """Waits until every request that was decoding has gone on, or so long; the longest gap of those that did."""
        with anyio.move_on_after(within_s):
            while not gaps.is_closed:
                await self._went_on.wait()
        return gaps.longest_ns

    def census(self) -> PoolCensus:
        """Counts every block by its owners."""
        return self.batcher.census()

    def _note_parked(self) -> None:
        if self.is_parked:
            self._parked.set()

    # The log.

    async def _open(self) -> None:
        self._log.open()
        ready: list[pb.WorkerReady] = []
        with anyio.move_on_after(self._deadlines.boot_s):
            for stream in self._streams:
                ready.append(self._checked(stream, await stream.read()))
        if len(ready) < len(self._streams):
            late = self._streams[len(ready)].rank
            raise GenerationLostError(
                f"rank {late} did not answer RESET within {self._deadlines.boot_s:g} s; see its log"
            )
        digests = {f"rank {message.rank}: {message.model_digest}" for message in ready}
        if len({message.model_digest for message in ready}) > 1:
            raise GenerationLostError(f"the ranks hold different models ({', '.join(sorted(digests))}): use one file")
        self._is_open = True

    def _checked(self, stream: RankStream, answer: pb.ExecuteStepsResponse) -> pb.WorkerReady:
        ready, limits = answer.ready, self.batcher.limits
        if not answer.HasField("ready"):
            raise GenerationLostError(
                f"rank {stream.rank} answers RESET with {answer.WhichOneof('message')}, not ready"
            )
        self._admit(stream, ready.fence.generation, ready.fence.epoch)
        if ready.rank != stream.rank:
            raise GenerationLostError(
                f"rank {stream.rank}'s socket is served by rank {ready.rank}: check the ranks' start"
            )
        if ready.num_blocks < limits.num_blocks:
            raise GenerationLostError(
                f"rank {ready.rank} holds {ready.num_blocks} blocks, the allocator issues {limits.num_blocks}: "
                "lower pool.num_blocks"
            )
        return ready

    def _write(self, entry: LogEntry) -> None:
        message = entry_to_proto(entry).SerializeToString()
        for stream in self._streams:
            stream.put(message)

    def _pump_soon(self) -> None:
        """With the loop's next turn, so that requests that come together start together."""
        if not self._will_pump:
            self._will_pump = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _deliver(self, events: list[RequestEvent]) -> None:
        if self.gaps.note(events, time.monotonic_ns()):
            self._went_on.set()
            self._went_on = asyncio.Event()
        self._deliver_to_routers(events)

    def _pump(self) -> None:
        self._will_pump = False
        self.on_change()
        if not self._is_open:
            return
        self.relieve()
        if self._log.issue(time.monotonic_ns()):
            self._has_steps.set()
        self._deliver(self.batcher.take_events())

    # Answers.

    async def _listen(self, stream: RankStream) -> None:
        while True:
            answer = await stream.read()
            if not answer.HasField("reports"):
                raise GenerationLostError(f"rank {stream.rank} sent {answer.WhichOneof('message')}, reports expected")
            self._admit(stream, answer.reports.fence.generation, answer.reports.fence.epoch)
            for report in answer.reports.reports:
                self._hear(stream, report)
            self._note_parked()
            self._pump()

    def _hear(self, stream: RankStream, message: pb.StepReport) -> None:
        answered = self._log.hear(stream.rank, report_from_proto(message), time.monotonic_ns())
        self._deliver(answered.events)
        if answered.finished is not None:
            self._on_finished(answered.finished)

    def _admit(self, stream: RankStream, generation: int, epoch: int) -> None:
        refusal = self._log.admit(stream.rank, generation, epoch)
        if refusal is not None:
            raise GenerationLostError(refusal)

    async def _watch(self) -> None:
        """Ends the generation when a step is unanswered for too long; asleep while none is."""
        limit_ns = int(self._deadlines.step_s * NS_PER_S)
        while True:
            oldest_ns = self.ledger.oldest_issued_ns
            if oldest_ns is None:
                self._has_steps.clear()
                await self._has_steps.wait()
                continue
            if (reason := self.ledger.overdue(time.monotonic_ns(), limit_ns)) is not None:
                raise GenerationLostError(reason)
            wait_s, began_s = max(0, oldest_ns + limit_ns - time.monotonic_ns()) / NS_PER_S, time.monotonic()
            await anyio.sleep(wait_s)
            if time.monotonic() - began_s > wait_s + STOOD_STILL_S:
                # What came while this process stood still is heard before the clock that ran out meanwhile.
                await anyio.sleep(STOOD_STILL_S)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
