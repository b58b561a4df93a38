"""The group over time: joins workers, runs one generation after another, and stands between it and the routers.

A generation that is lost takes every request with it: routers are told, and submit again what they hold. The next one
begins with fresh worker processes and an empty cache. Never decides what runs in a step.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb

from services.core.flip.log_side import FlipAttempts, is_advice
from services.core.ids import Epoch, Generation, LayoutKind, Rank
from services.core.request import Rejected, RejectReason, Submission
from services.mesh.codec.common import layout_to_proto
from services.mesh.debug.breakpoints import Holds
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.tables import DeadlineSettings
from services.mesh.telemetry.progress import Phase, Progress
from services.scheduler.batch.pressure import PressureLadder
from services.scheduler.batch.step_ledger import StepRecord
from services.scheduler.flips import FlipResult, Flips
from services.scheduler.generation_counter import GenerationCounter
from services.scheduler.generation_run import GenerationLostError, GenerationRun
from services.scheduler.meters import Meters
from services.scheduler.sizing import GroupSize
from services.scheduler.streams.advice import PolicyLink, since
from services.scheduler.streams.joining import WorkerFinder
from services.scheduler.streams.rank_stream import RankStream
from services.scheduler.streams.sessions import Session, Sessions

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
"""Between two generations that did not live long."""
LONG_LIFE_S = 10.0
"""A generation that served for so long is followed by the next one at once."""


@dataclass(slots=True)
class GroupLoop:
    """One group of ranks and the routers that it serves."""

    size: GroupSize
    kind: LayoutKind
    finder: WorkerFinder
    mint: GenerationCounter
    deadlines: DeadlineSettings
    progress: Progress
    meters: Meters
    log: Log
    set_serving: Callable[[bool], Awaitable[None]]
    sessions: Sessions
    peers: Peers
    ranks_meet_in_flips: bool = False
    """Whether a flip moves bytes between ranks."""
    holds: Holds | None = None
    pressure: PressureLadder | None = None
    """None: memory is not watched."""
    run: GenerationRun | None = None
    """The generation that serves; None between two."""
    flips: Flips | None = None
    """Its flips."""
    num_joined: int = 0
    """Ranks whose log is open."""

    async def serve(self) -> None:
        """Runs generations until cancelled."""
        backoff_s = BACKOFF_MIN_S
        while True:
            began_s = time.monotonic()
            reason = await self._one_generation()
            if time.monotonic() - began_s > LONG_LIFE_S:
                backoff_s = BACKOFF_MIN_S
            self.log.warning("generation-lost", reason=reason, again_in_s=backoff_s)
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    # What routers ask.

    def open_session(self) -> Session:
        """A router's stream has begun; it hears of the group first, as soon as there is one."""
        session = self.sessions.open()
        if self.run is not None:
            session.tell(self._opened(self.run))
        return session

    def close_session(self, session: Session) -> None:
        """A router's stream has ended: its requests are aborted."""
        self.sessions.close(session)
        if self.run is None:
            return
        mine = [request_id for request_id in self.run.batcher.open_request_ids if session.owns(request_id)]
        for request_id in mine:
            self.run.abort(request_id)
        self.log.info("router-left", session=session.number, aborted=len(mine))

    def submit(self, session: Session, submission: Submission) -> None:
        """A request of a router."""
        owned = session.owned(submission)
        if self.run is not None:
            self.run.submit(owned)
            return
        text = f"the group is not ready: {self.progress.mark.detail or 'between two generations'}; try again"
        self.sessions.deliver([Rejected(owned.request_id, RejectReason.UNAVAILABLE, "", text)])

    def abort(self, session: Session, request_id: str) -> None:
        """A router's client has gone."""
        if self.run is not None:
            self.run.abort(session.inside(request_id))

    def finish(self, session: Session, request_id: str, num_output_tokens: int) -> None:
        """A router matched a stop string."""
        if self.run is not None:
            self.run.finish(session.inside(request_id), num_output_tokens)

    async def flip(self, target: LayoutKind) -> FlipResult:
        """A flip by hand, to its end."""
        if self.flips is None:
            return FlipResult(None, None, "the group is not ready")
        try:
            return await self.flips.ask(target)
        except asyncio.CancelledError:
            await anyio.lowlevel.checkpoint_if_cancelled()
            return FlipResult(None, None, "the generation ended; its requests are submitted again")

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """Writes what only the scheduler has."""
        scheduler = status.scheduler
        scheduler.num_ranks = self.size.layouts[self.kind].num_ranks
        scheduler.num_ranks_joined = self.num_joined
        scheduler.num_total_blocks = self.size.limits.num_blocks
        if self.run is None:
            return
        load, tally = self.run.batcher.load(), self.run.batcher.tally
        scheduler.generation, scheduler.epoch = self.run.generation, self.run.epoch
        scheduler.layout = layout_to_proto(self.run.kind)
        scheduler.num_resident_requests = load.resident_requests
        scheduler.num_queued_requests = load.queued_requests
        scheduler.num_free_blocks, scheduler.num_cached_blocks = load.free_blocks, load.cached_blocks
        scheduler.num_steps_total = tally.num_steps
        scheduler.num_computed_tokens_total = tally.num_computed_tokens
        scheduler.num_cached_tokens_total = tally.num_cached_tokens
        scheduler.num_preemptions_total = tally.num_preemptions
        scheduler.uncomputed_prefill_tokens = load.uncomputed_prefill_tokens
        census = self.run.batcher.census()
        scheduler.num_held_blocks, scheduler.num_unaccounted_blocks = census.num_referenced, len(census.unaccounted)
        if self.flips is not None:
            self.flips.fill_status(scheduler)

    # A generation.

    async def _one_generation(self) -> str:
        """Joins, serves and loses one generation; returns why it ended."""
        channels = await self.finder.fresh(lambda missing: self.progress.enter(Phase.WAITING, missing))
        streams = [RankStream(Rank(rank), channel) for rank, channel in enumerate(channels)]
        self.num_joined = len(streams)
        run = GenerationRun(
            generation=self.mint.mint(),
            kind=self.kind,
            size=self.size,
            streams=streams,
            deadlines=self.deadlines,
            deliver=self.sessions.deliver,
            on_finished=self._on_finished,
        )
        if self.pressure is not None:
            run.relieve = partial(self.pressure.look, run.batcher)
        flips = self._flips_of(run)
        self.progress.enter(Phase.WORKING, "every rank to answer RESET", self.deadlines.boot_s)
        try:
            await run.run(partial(self._on_open, run, flips))
        except GenerationLostError as error:
            await self._on_lost(run, str(error))
            return str(error)
        finally:
            self.run, self.flips, self.num_joined = None, None, 0
            flips.end("the generation ended")
        raise AssertionError("a generation ends by its loss alone")

    def _flips_of(self, run: GenerationRun) -> Flips:
        """The generation's flips and its conversation with the policy, which run beside its log."""

        async def follow(wanted: LayoutKind, reason: str, fence: layout_pb2.Fence) -> None:
            asked, now = (Generation(fence.generation), Epoch(fence.epoch)), (run.generation, run.epoch)
            if is_advice(wanted, asked, run.kind, now):
                await flips.attempt(wanted, reason)

        link = PolicyLink(self.peers, self.log, lambda: _signal(run, flips), follow)
        attempts = FlipAttempts(self.ranks_meet_in_flips)
        flips = Flips(run, self.peers, self.deadlines, self.log, self.meters, link.touch, attempts, self.holds)
        run.on_change = link.touch
        run.background = (flips.serve, link.run)
        return flips

    async def _on_open(self, run: GenerationRun, flips: Flips) -> None:
        # No await between the two: a session that opens meanwhile would hear of the group twice.
        self.run, self.flips = run, flips
        self.sessions.tell_all(self._opened(run))
        self.progress.enter(Phase.READY)
        await self.set_serving(True)
        self.meters.publish(run.batcher)
        self.log.info("generation-opened", generation=run.generation, layout=run.kind.value)

    def _on_finished(self, record: StepRecord) -> None:
        self.progress.beat()
        if self.run is not None:
            self.meters.on_finished(record, self.run.batcher)

    async def _on_lost(self, run: GenerationRun, reason: str) -> None:
        if self.run is None:
            # Never opened: routers have not heard of it.
            return
        self.run = None
        self.meters.on_lost(run.batcher)
        self.sessions.tell_all(pb.ServeRequestsResponse(lost=pb.GroupLost(reason=reason)))
        await self.set_serving(False)

    def _opened(self, run: GenerationRun) -> pb.ServeRequestsResponse:
        return pb.ServeRequestsResponse(
            opened=pb.GroupOpened(
                fence=run.fence_message,
                layout=layout_to_proto(run.kind),
                max_context_tokens=self.size.limits.context_tokens,
            )
        )


def _signal(run: GenerationRun, flips: Flips) -> policy_service_pb2.AdviseLayoutRequest:
    """What the policy is told now."""
    load = run.batcher.load()
    return policy_service_pb2.AdviseLayoutRequest(
        fence=run.fence_message,
        layout=layout_to_proto(run.kind),
        uncomputed_prefill_tokens=load.uncomputed_prefill_tokens,
        decode_rows=load.decode_rows,
        queued_requests=load.queued_requests,
        free_blocks=load.free_blocks,
        since_flip_ns=since(flips.began_ns),
        since_attempt_ns=since(flips.attempted_ns),
        abandoned_in_a_row=flips.attempts.abandoned_in_a_row,
    )
