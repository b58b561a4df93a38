"""Flips of one generation, as the scheduler sees them: one attempt at a time, from the FLIP entry to COMMIT or ABANDON.

The mover decides the outcome; this writes it into the log. It asks a lost mover again, because the outcome is in the
mover's journal, and gives it up after a while. What follows from what is `FlipAttempts`'s to say. Never touches a
request.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.blocks import PoolCensus
from services.core.errors import MeshError
from services.core.flip.log_side import FlipAttempts
from services.core.flip.messages import FlipOutcome
from services.core.ids import BlockId, FlipId, LayoutKind, LogIndex
from services.core.step import AbandonEntry, CommitEntry
from services.mesh.codec.common import layout_to_proto
from services.mesh.codec.flip import outcome_to_proto
from services.mesh.debug.breakpoints import HoldPoint, Holds
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers, unary
from services.mesh.settings.tables import DeadlineSettings
from services.scheduler.meters import Meters
from services.scheduler.streams.mover_question import MoverQuestion
from services.scheduler.token_gaps import FlipGaps

ASK_AGAIN_S = 0.05
REPORT_WITHIN_S = 10.0
"""After an outcome, how long the requests that were decoding may take to get their next token before the flip's record
is closed without them."""
MANY_ABANDONED = 3
"""In a row: from then on it is an error, so that a server cannot stop flipping silently."""
MAX_ASKED = 8
"""Flips by hand that may wait: each is refused anyway once the one before it has led there."""
MAX_TIMELINE = 32
"""Layouts kept for `status`."""

Runs = tuple[tuple[BlockId, int], ...]


@dataclass(frozen=True, slots=True)
class FlipResult:
    """How an attempt ended; `outcome` None: it was not armed."""

    outcome: FlipOutcome | None
    flip_id: FlipId | None
    reason: str


@dataclass(frozen=True, slots=True)
class Carry:
    """What was resident when a flip was armed."""

    num_requests: int
    num_partly_prefilled: int
    live_runs: Runs


@dataclass(frozen=True, slots=True)
class LayoutSpan:
    """One layout of this generation, from when, and why."""

    kind: LayoutKind
    began_unix_ns: int
    reason: str


class FlippableLog(Protocol):
    """What a flip needs of the generation's log."""

    @property
    def kind(self) -> LayoutKind:
        """The layout now."""

    @property
    def fence_message(self) -> layout_pb2.Fence:
        """Generation and epoch now."""

    def arm(self, flip_id: FlipId, target: LayoutKind) -> tuple[LogIndex, Carry]:
        """Freezes the batch and writes FLIP."""

    async def parked(self) -> None:
        """Waits until every step before FLIP is acknowledged."""

    @property
    def is_parked(self) -> bool:
        """Whether they are."""

    def conclude(self, entry: CommitEntry | AbandonEntry) -> FlipGaps:
        """Writes a flip's outcome and goes on; COMMIT only after `parked`."""

    async def carried_on(self, gaps: FlipGaps, within_s: float) -> int | None:
        """Waits until every request that was decoding has gone on; the longest gap, None where none was decoding."""

    def census(self) -> PoolCensus:
        """Counts every block by its owners."""


@dataclass(frozen=True, slots=True)
class _FlipRequest:
    """A flip by hand, and who waits for its end."""

    target: LayoutKind
    answer: "asyncio.Future[FlipResult]"


@dataclass(slots=True)
class Flips:
    """The attempts of one generation."""

    run: FlippableLog
    peers: Peers
    deadlines: DeadlineSettings
    log: Log
    meters: Meters
    on_change: Callable[[], None]
    attempts: FlipAttempts = field(default_factory=FlipAttempts)
    holds: Holds | None = None
    timeline: list[LayoutSpan] = field(default_factory=list)
    num_unsound_censuses: int = 0
    began_ns: int = field(default_factory=time.monotonic_ns)
    """Of the layout now: the last commit, or the generation's start."""
    attempted_ns: int = field(default_factory=time.monotonic_ns)
    """End of the last attempt, or the generation's start."""
    _tasks: TaskGroup | None = None
    _asked: "asyncio.Queue[_FlipRequest]" = field(default_factory=lambda: asyncio.Queue(MAX_ASKED))

    def __post_init__(self) -> None:
        self.timeline.append(LayoutSpan(self.run.kind, time.time_ns(), "start of the generation"))

    async def serve(self) -> None:
        """Makes the attempts that are asked for by hand, until the generation ends.

        Raises:
            FlipBrokenError: the generation must end.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    await self._answer(await self._asked.get())
        finally:
            self._tasks = None

    async def _answer(self, asked: _FlipRequest) -> None:
        try:
            result = await self.attempt(asked.target, "by hand")
        except BaseException:
            asked.answer.cancel()
            raise
        if not asked.answer.done():
            asked.answer.set_result(result)

    async def ask(self, target: LayoutKind) -> FlipResult:
        """A flip by hand, from whatever task; refused while another one is under way."""
        if self.attempts.pending is not None:
            return FlipResult(None, None, self.attempts.busy)
        asked = _FlipRequest(target, asyncio.get_running_loop().create_future())
        try:
            self._asked.put_nowait(asked)
        except asyncio.QueueFull:
            return FlipResult(None, None, f"{MAX_ASKED} flips are asked for already")
        return await asked.answer

    def fill_status(self, status: introspection_pb2.SchedulerStatus) -> None:
        """The flips' part of a status."""
        attempts = self.attempts
        if attempts.pending is not None:
            status.pending_flip_id = attempts.pending
        status.num_unsound_censuses = self.num_unsound_censuses
        status.num_abandoned_in_a_row = attempts.abandoned_in_a_row
        status.last_abandon_reason = attempts.last_abandon_reason
        for span in self.timeline:
            status.timeline.add(layout=layout_to_proto(span.kind), began_unix_ns=span.began_unix_ns, reason=span.reason)

    def end(self, reason: str) -> None:
        """The generation is over: nobody waits any longer."""
        while not self._asked.empty():
            self._asked.get_nowait().answer.cancel(reason)

    async def attempt(self, target: LayoutKind, cause: str) -> FlipResult:
        """One flip to `target`.

        Raises:
            FlipBrokenError: the generation must end.
        """
        if (refusal := self.attempts.refusal(target, self.run.kind)) is not None:
            return FlipResult(None, None, refusal)
        flip_id = self.attempts.begin(target)
        try:
            return await self._attempt(flip_id, target, cause)
        finally:
            self.attempts.end()
            self.attempted_ns = time.monotonic_ns()
            self.on_change()

    async def _attempt(self, flip_id: FlipId, target: LayoutKind, cause: str) -> FlipResult:
        await self._passing(HoldPoint.SCHEDULER_ARMING)
        source, fence = self.run.kind, self.run.fence_message
        entry, carry = self.run.arm(flip_id, target)
        self.log.info("flip-armed", flip=flip_id, target=target.value, cause=cause, requests=carry.num_requests)
        request = pb.RunFlipRequest(
            fence=fence,
            flip_id=flip_id,
            source=layout_to_proto(source),
            target=layout_to_proto(target),
            entry_sequence=entry,
            live_run_begin=[begin for begin, _ in carry.live_runs],
            live_run_length=[length for _, length in carry.live_runs],
        )
        await self._passing(HoldPoint.SCHEDULER_ASKING)
        outcome, reason = await self._outcome(request)
        await self._passing(HoldPoint.SCHEDULER_OUTCOME)
        gaps = await self._write(outcome, reason, cause)
        self.log.info("flip-ended", flip=flip_id, outcome=outcome.value, reason=reason)
        self._take_census(flip_id)
        assert self._tasks is not None, "attempts are made while serve() runs"
        self._tasks.start_soon(self._report, fence, flip_id, outcome, carry, gaps)
        return FlipResult(outcome, flip_id, reason)

    async def _passing(self, point: HoldPoint) -> None:
        if self.holds is not None:
            await self.holds.passing(point)

    async def _write(self, outcome: FlipOutcome, reason: str, cause: str) -> FlipGaps:
        entry = self.attempts.entry_for(outcome, reason, is_parked=self.run.is_parked)
        if entry is None:
            await self.run.parked()
            entry = self.attempts.entry_for(outcome, reason, is_parked=self.run.is_parked)
        assert entry is not None, "every step before FLIP is acknowledged"
        gaps = self.run.conclude(entry)
        if isinstance(entry, CommitEntry):
            self.began_ns = time.monotonic_ns()
            self.timeline.append(LayoutSpan(entry.layout, time.time_ns(), cause))
            del self.timeline[:-MAX_TIMELINE]
        elif (in_a_row := self.attempts.abandoned_in_a_row) >= MANY_ABANDONED:
            self.log.error("flips-do-not-commit", in_a_row=in_a_row, reason=reason)
        return gaps

    def _take_census(self, flip_id: FlipId) -> None:
        """After the outcome is written, so that it lengthens no pause; an imbalance is said, and serving goes on."""
        census = self.run.census()
        self.meters.on_flip(self.attempts.abandoned_in_a_row, is_sound=census.is_sound)
        if not census.is_sound:
            self.num_unsound_censuses += 1
            self.log.error("census-unsound", flip=flip_id, census=census)

    async def _outcome(self, request: pb.RunFlipRequest) -> tuple[FlipOutcome, str]:
        """The mover's word, asked for again when its stream breaks, until it has been silent for too long."""
        mover = MoverQuestion(self.peers, self.deadlines, request)
        while True:
            outcome, reason = await mover.ask()
            if outcome is not None:
                return outcome, reason
            self.log.warning("mover-silent", flip=request.flip_id, left_s=mover.left_s, reason=reason)
            if mover.left_s == 0:
                return self.attempts.without_mover, f"no mover for {mover.silence_s:g} s: {reason}"
            await anyio.sleep(ASK_AGAIN_S)
            try:
                await self.peers.reach("mover", timeout_s=max(mover.left_s, ASK_AGAIN_S))
            except MeshError as error:
                return self.attempts.without_mover, f"no mover for {mover.silence_s:g} s: {error}"

    async def _report(
        self, fence: layout_pb2.Fence, flip_id: FlipId, outcome: FlipOutcome, carry: Carry, gaps: FlipGaps
    ) -> None:
        """Tells the mover what the flip did to requests; its loss costs a trace, nothing else."""
        gap_ns = await self.run.carried_on(gaps, REPORT_WITHIN_S)
        request = pb.ReportCarryRequest(
            fence=fence,
            flip_id=flip_id,
            num_carried_requests=carry.num_requests,
            num_partly_prefilled=carry.num_partly_prefilled,
            num_live_blocks=sum(length for _, length in carry.live_runs),
            longest_token_gap_ns=gap_ns,
            written=outcome_to_proto(outcome),
        )
        try:
            await unary(
                MoverServiceStub(self.peers.channel("mover")).ReportCarry, request, timeout_s=self.deadlines.rpc_s
            )
        except MeshError as error:
            self.log.warning("flip-not-reported", flip=flip_id, error=error)
