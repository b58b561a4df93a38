"""The group over time: joins workers, runs one generation after another, and stands between it and the routers.

A generation that is lost takes every request with it: routers are told, and submit again what they hold. The next one
begins with fresh worker processes and an empty cache, and knows how flips went before it. Never decides what runs in a
step.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb

from services.core.flip.log_side import FlipAttempts, FlipClocks, PastAttempts
from services.core.ids import LayoutKind, Rank
from services.core.request import Rejected, RejectReason
from services.mesh.codec.common import layout_to_proto
from services.mesh.debug.breakpoints import Holds
from services.mesh.settings.tables import DeadlineSettings
from services.mesh.telemetry.progress import Phase
from services.scheduler.batch.batcher import Batcher
from services.scheduler.breakpoints import HeldGeneration
from services.scheduler.generation import NS_PER_S, GenerationLostError, GenerationRun, Surroundings
from services.scheduler.generation_counter import GenerationCounter
from services.scheduler.inputs import Abort, Finish, FlipEnded, RouterGone, Submit
from services.scheduler.log import GenerationLog, LogDeadlines
from services.scheduler.sizing import GroupSize
from services.scheduler.streams.joining import WorkerFinder
from services.scheduler.streams.rank_stream import RankStream
from services.scheduler.streams.sessions import Session

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
"""Between two generations that did not live long."""
LONG_LIFE_S = 10.0
"""A generation that served for so long is followed by the next one at once."""


@dataclass(slots=True)
class Group:
    """One group of ranks and the routers that it serves."""

    size: GroupSize
    layout: LayoutKind
    """At the start of each generation."""
    finder: WorkerFinder
    counter: GenerationCounter
    deadlines: DeadlineSettings
    around: Surroundings
    set_serving: Callable[[bool], Awaitable[None]]
    ranks_meet_in_flips: bool = False
    """Whether a flip moves bytes between ranks."""
    holds: Holds | None = None
    generation: GenerationRun | None = None
    """The one that serves; None between two."""
    num_joined: int = 0
    """Ranks whose log is open."""
    past_flips: PastAttempts | None = None
    """Of the generations before."""

    async def serve(self) -> None:
        """Runs generations until cancelled."""
        backoff_s = BACKOFF_MIN_S
        while True:
            began_s = time.monotonic()
            reason = await self._one_generation()
            if time.monotonic() - began_s > LONG_LIFE_S:
                backoff_s = BACKOFF_MIN_S
            self.around.log.warning("generation-lost", reason=reason, again_in_s=backoff_s)
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    # What routers and people ask.

    def open_session(self) -> Session:
        """A router's stream has begun; it hears of the group first, as soon as there is one."""
        session = self.around.sessions.open()
        if self.generation is not None:
            session.tell(self._opened(self.generation))
        return session

    def close_session(self, session: Session) -> None:
        """A router's stream has ended: its requests are aborted."""
        self.around.sessions.close(session)
        self.around.log.info("router-left", session=session.number)
        if self.generation is not None:
            self.generation.give(RouterGone(session.prefix))

    def give(self, given: Submit | Abort | Finish) -> None:
        """What a router wants, to the generation that serves; without one, nothing new is taken."""
        if self.generation is not None:
            self.generation.give(given)
        elif isinstance(given, Submit):
            detail = self.around.progress.mark.detail or "between two generations"
            text = f"the group is not ready: {detail}; try again"
            rejected = Rejected(given.submission.request_id, RejectReason.UNAVAILABLE, "", text)
            self.around.sessions.deliver([rejected])

    async def flip(self, target: LayoutKind) -> FlipEnded:
        """A flip by hand, to its end."""
        if self.generation is None:
            return FlipEnded(None, None, "the group is not ready", target, "by hand")
        return await self.generation.flip(target)

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """Writes what only the scheduler has."""
        scheduler = status.scheduler
        scheduler.num_ranks = self.size.layouts[self.layout].num_ranks
        scheduler.num_ranks_joined = self.num_joined
        scheduler.num_total_blocks = self.size.limits.num_blocks
        if self.generation is not None:
            _fill_log(scheduler, self.generation.log)
            self.generation.timeline.fill_status(scheduler)

    # A generation.

    async def _one_generation(self) -> str:
        """Joins, serves and loses one generation; returns why it ended."""
        progress = self.around.progress
        channels = await self.finder.fresh(lambda missing: progress.enter(Phase.WAITING, missing))
        streams = [RankStream(Rank(rank), channel) for rank, channel in enumerate(channels)]
        self.num_joined = len(streams)
        generation = self._generation(streams)
        progress.enter(Phase.WORKING, "every rank to answer RESET", self.deadlines.boot_s)
        try:
            await generation.run(partial(self._on_open, generation))
        except GenerationLostError as error:
            self.past_flips = generation.log.flips.past
            await self._on_lost(generation, str(error))
            return str(error)
        finally:
            self.generation, self.num_joined = None, 0
        raise AssertionError("a generation ends by its loss alone")

    def _generation(self, streams: list[RankStream]) -> GenerationRun:
        deadlines, size = self.deadlines, self.size
        flips = FlipAttempts(flip_clocks(deadlines), ranks_meet=self.ranks_meet_in_flips, past=self.past_flips)
        log = GenerationLog(
            generation=self.counter.next(),
            batcher=Batcher(size.limits, size.layouts[self.layout]),
            layouts=size.layouts,
            layout=self.layout,
            deadlines=LogDeadlines(int(deadlines.boot_s * NS_PER_S), int(deadlines.step_s * NS_PER_S)),
            flips=flips,
            now_ns=time.monotonic_ns(),
        )
        if self.holds is not None:
            return HeldGeneration(log, streams, self.around, self.holds)
        return GenerationRun(log, streams, self.around)

    async def _on_open(self, generation: GenerationRun) -> None:
        # No await between the two: a session that opens meanwhile would hear of the group twice.
        self.generation = generation
        self.around.sessions.tell_all(self._opened(generation))
        self.around.progress.enter(Phase.READY)
        await self.set_serving(True)
        self.around.meters.publish(generation.log.batcher)
        log = generation.log
        self.around.log.info("generation-opened", generation=log.fence.generation, layout=log.layout.value)

    async def _on_lost(self, generation: GenerationRun, reason: str) -> None:
        if self.generation is None:
            # Never opened: routers have not heard of it.
            return
        self.generation = None
        self.around.meters.on_lost(generation.log.batcher)
        self.around.sessions.tell_all(pb.ServeRequestsResponse(lost=pb.GroupLost(reason=reason)))
        await self.set_serving(False)

    def _opened(self, generation: GenerationRun) -> pb.ServeRequestsResponse:
        return pb.ServeRequestsResponse(
            opened=pb.GroupOpened(
                fence=fence_message(generation.log),
                layout=layout_to_proto(generation.log.layout),
                max_context_tokens=self.size.limits.context_tokens,
            )
        )


def flip_clocks(deadlines: DeadlineSettings) -> FlipClocks:
    """Bounds of one attempt; a standstill lasts as long as the mover's clocks and its next life may take."""
    mover_s = deadlines.park_s + deadlines.presence_s + deadlines.flip_data_plane_s
    silence_s = deadlines.mover_silence_s
    return FlipClocks(int(silence_s * NS_PER_S), int((mover_s + silence_s) * NS_PER_S))


def fence_message(log: GenerationLog) -> layout_pb2.Fence:
    """Generation and epoch now, as they travel."""
    return layout_pb2.Fence(generation=log.fence.generation, epoch=log.fence.epoch)


def _fill_log(status: introspection_pb2.SchedulerStatus, log: GenerationLog) -> None:
    load, tally, census = log.batcher.load(), log.batcher.tally, log.batcher.census()
    status.generation, status.epoch = log.fence.generation, log.fence.epoch
    status.layout = layout_to_proto(log.layout)
    status.num_resident_requests = load.running_requests
    status.num_queued_requests = load.queued_requests
    status.num_free_blocks, status.num_cached_blocks = load.free_blocks, load.cached_blocks
    status.num_steps_total = tally.num_steps
    status.num_computed_tokens_total = tally.num_computed_tokens
    status.num_cached_tokens_total = tally.num_cached_tokens
    status.num_preemptions_total = tally.num_preemptions
    status.uncomputed_prefill_tokens = load.uncomputed_prefill_tokens
    status.num_held_blocks, status.num_unaccounted_blocks = census.num_referenced, len(census.unaccounted)
    if log.flips.attempt is not None:
        status.pending_flip_id = log.flips.attempt.flip_id
    status.num_abandoned_in_a_row = log.flips.past.abandoned_in_a_row
    status.last_abandon_reason = log.flips.past.last_abandon_reason
