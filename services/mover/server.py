"""The mover's service: runs one attempt at a time for the scheduler and remembers how each went.

Owns no memory. Invariants: one attempt is open at a time; a message of an attempt that is not open is counted, and
kept for the case that the scheduler asks for it; an outcome once journalled is what every later question gets.
"""

import time
from collections.abc import AsyncIterator

import anyio
import grpc
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceServicer
from flipmesh.worker.v1 import worker_service_pb2
from opentelemetry.trace import Tracer

from services.core.flip.attempts import Coordination, OpenAttempt, Opened
from services.core.flip.messages import FlipDeadlines, FlipOutcome
from services.core.flip.records import Concluded, FlipKey
from services.core.ids import FlipId, Generation, Rank
from services.mesh.codec.flip import event_from_proto, outcome_to_proto
from services.mesh.debug.breakpoints import Holds
from services.mesh.flip_record import layout_name, state_name
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.telemetry.metrics import Metrics
from services.mover.attempts import Attempt
from services.mover.breakpoints import HeldAttempt
from services.mover.history import History, settle
from services.mover.journal import Journal
from services.mover.links import RankLinks
from services.mover.trace import emit

RunContext = grpc.aio.ServicerContext[pb.RunFlipRequest, pb.RunFlipResponse]
PAUSE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Mover(MoverServiceServicer):
    """Serves the scheduler of one group."""

    def __init__(
        self,
        num_ranks: int,
        deadlines: FlipDeadlines,
        journal: Journal,
        peers: Peers,
        log: Log,
        tracer: Tracer,
        metrics: Metrics,
        holds: Holds | None = None,
    ) -> None:
        self.links = RankLinks(num_ranks, peers, log, self._on_message, self._on_lost)
        self._num_ranks = num_ranks
        self._coordination = Coordination(num_ranks, deadlines, journal)
        self._holds = holds
        self.journal_failed = anyio.Event()
        """What was decided cannot be written down: this life of the mover is over, the next one reads what there is."""
        self._log = log
        self._tracer = tracer
        self._history = History()
        self._attempt: Attempt | None = None
        self._counts = dict.fromkeys(FlipOutcome, 0)
        self._last_abandon_reason = ""
        self._flips = metrics.counter(
            "flipmesh_flips", "Attempts at a flip, by how they ended.", ["direction", "outcome"]
        )
        self._pause = metrics.histogram(
            "flipmesh_flip_pause_seconds", "Last step before to first after.", PAUSE_BUCKETS_S
        )
        self._bytes = metrics.counter("flipmesh_flip_moved_bytes", "Bytes moved by flips.")
        self._rows = metrics.counter("flipmesh_flip_moved_rows", "KV rows moved by flips.")
        self._strays = metrics.counter("flipmesh_flip_stray_messages", "Messages of another generation or attempt.")

    async def RunFlip(  # noqa: N802 (the proto's name)
        self, request: pb.RunFlipRequest, context: RunContext
    ) -> AsyncIterator[pb.RunFlipResponse]:
        """One attempt to its outcome; asked again after a broken stream, it goes on or says what was decided."""
        key: FlipKey = (Generation(request.fence.generation), FlipId(request.flip_id))
        if (other := self._coordination.attempt) is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"flip {other.key[1]} is open, asked for flip {key[1]}: one attempt runs at a time",
            )
        answer = await self._ask(key, context)
        record = self._history.get(key) or self._history.open(key, request, self._num_ranks, time.time_ns())
        if isinstance(answer, Concluded):
            if not record.HasField("concluded_unix_ns"):
                settle(record, answer.outcome, answer.reason)
                self._count(record)
            yield pb.RunFlipResponse(flip_id=key[1], state=record.state, reason=record.reason)
            return
        attempt = self._attempt = self._made(request, record, answer)
        self._log.info("flip-armed", flip=key[1], target=layout_name(request.target), entry=request.entry_sequence)
        try:
            async for response in attempt.run():
                if attempt.has_ended:
                    # Before it is said: the scheduler may ask for the next flip at once.
                    self._close(answer.attempt, record)
                yield response
        except OSError as error:
            self._log.error("journal-failed", flip=key[1], error=str(error))
            self.journal_failed.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the mover cannot write its journal: {error}")
        finally:
            self._close(answer.attempt, record)

    async def _ask(self, key: FlipKey, context: RunContext) -> Concluded | Opened:
        try:
            return self._coordination.ask(key, time.monotonic_ns())
        except OSError as error:
            # Nothing was said to any rank: the attempt is as if it had not been asked for.
            self._log.error("journal-failed", flip=key[1], error=str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the mover cannot write its journal: {error}")
            raise AssertionError("abort raises") from error

    async def ReportCarry(  # noqa: N802 (the proto's name)
        self,
        request: pb.ReportCarryRequest,
        context: grpc.aio.ServicerContext[pb.ReportCarryRequest, pb.ReportCarryResponse],
    ) -> pb.ReportCarryResponse:
        """Completes the record and writes the flip's trace."""
        key: FlipKey = (Generation(request.fence.generation), FlipId(request.flip_id))
        record = self._history.report(key, request)
        if record is None:
            return pb.ReportCarryResponse()
        if record.HasField("pause_ns"):
            self._pause.observe(record.pause_ns * 1e-9)
        emit(self._tracer, record)
        return pb.ReportCarryResponse()

    async def ListFlips(  # noqa: N802 (the proto's name)
        self, request: pb.ListFlipsRequest, context: grpc.aio.ServicerContext[pb.ListFlipsRequest, pb.ListFlipsResponse]
    ) -> pb.ListFlipsResponse:
        """The last flips, newest first."""
        return pb.ListFlipsResponse(flips=self._history.newest(request.max_flips))

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """The mover's part of a status."""
        status.mover.num_committed_total = self._counts[FlipOutcome.COMMITTED]
        status.mover.num_abandoned_total = sum(self._counts.values()) - self._counts[FlipOutcome.COMMITTED]
        status.mover.last_abandon_reason = self._last_abandon_reason

    async def _on_message(self, rank: Rank, message: worker_service_pb2.JoinFlipResponse) -> None:
        if message.rank != rank:
            # A quorum is of ranks that are there: a number that was written wrongly must not stand for another's word.
            self._strays.inc()
            self._log.error("rank-misnamed", link=rank, says=message.rank, flip=message.flip_id)
            return
        key: FlipKey = (Generation(message.fence.generation), FlipId(message.flip_id))
        self._history.note(key, message)
        event = event_from_proto(message)
        if event is None:
            return
        if not self._coordination.is_heard(key, event):
            self._strays.inc()
            return
        assert self._attempt is not None
        await self._attempt.hear(event)

    async def _on_lost(self, rank: Rank, reason: str) -> None:
        lost = self._coordination.lose(rank, reason)
        if lost is not None:
            assert self._attempt is not None
            await self._attempt.hear(lost)

    def _made(self, request: pb.RunFlipRequest, record: pb.FlipRecord, opened: Opened) -> Attempt:
        if self._holds is not None:
            return HeldAttempt(request, record, opened, self.links.send, self._holds)
        return Attempt(request, record, opened, self.links.send)

    def _close(self, opened: OpenAttempt, record: pb.FlipRecord) -> None:
        """The attempt is over or its scheduler has left; once."""
        if self._coordination.close(opened):
            self._attempt = None
            self._count(record)

    def _count(self, record: pb.FlipRecord) -> None:
        """Once for each attempt, however it ended; an attempt whose scheduler left is counted when it is decided."""
        outcome = {outcome_to_proto(outcome): outcome for outcome in FlipOutcome}.get(record.state)
        if outcome is None:
            return
        self._counts[outcome] += 1
        direction = f"{layout_name(record.source)}->{layout_name(record.target)}".lower()
        self._flips.labels(direction, state_name(record.state)).inc()
        self._bytes.inc(record.bytes_moved)
        self._rows.inc(record.rows_moved)
        if outcome is not FlipOutcome.COMMITTED:
            self._last_abandon_reason = record.reason
            self._log.warning("flip-not-committed", flip=record.flip_id, outcome=outcome.value, reason=record.reason)
        else:
            self._log.info("flip-committed", flip=record.flip_id, direction=direction)
