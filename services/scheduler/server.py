"""The scheduler's service: one stream for each router, and flips by hand.

A stream that ends, whichever way, takes its requests with it. Never holds up the loop: what a router is slow to read
waits in its session's bounded outbox.
"""

import asyncio
from collections.abc import AsyncIterator

import anyio
import grpc
import grpc.aio
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer

from services.core.flip.messages import FlipOutcome
from services.mesh.codec.common import CodecError, layout_from_proto, layout_to_proto
from services.mesh.codec.scheduler import submission_from_proto
from services.scheduler.group import Group, fence_message
from services.scheduler.inputs import Abort, Finish, Submit
from services.scheduler.streams.sessions import Session

ServeContext = grpc.aio.ServicerContext[pb.ServeRequestsRequest, pb.ServeRequestsResponse]
FlipContext = grpc.aio.ServicerContext[pb.RequestFlipRequest, pb.RequestFlipResponse]


_OUTCOMES = {
    FlipOutcome.COMMITTED: pb.FLIP_OUTCOME_COMMITTED,
    FlipOutcome.ABANDONED: pb.FLIP_OUTCOME_ABANDONED,
    FlipOutcome.RESTORED: pb.FLIP_OUTCOME_RESTORED,
    None: pb.FLIP_OUTCOME_REFUSED,
}
"""A broken flip ends the generation and is answered as refused, with that reason."""


class SchedulerServer(SchedulerServiceServicer):
    """Serves routers for one group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    # Writes through the context, which may be given up at any time; the stubs only know of generators.
    async def ServeRequests(  # type: ignore[override]  # noqa: N802 (the proto's name)
        self, request_iterator: AsyncIterator[pb.ServeRequestsRequest], context: ServeContext
    ) -> None:
        """All requests of one router, until its stream ends or it is cut."""
        session = self._group.open_session()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, request_iterator, session)
                tasks.start_soon(self._write, session, context)
                await session.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._group.close_session(session)
        if session.cut_reason is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, session.cut_reason)

    async def RequestFlip(  # noqa: N802 (the proto's name)
        self, request: pb.RequestFlipRequest, context: FlipContext
    ) -> pb.RequestFlipResponse:
        """One flip to its end, or why it was not armed; with the layout as it is then."""
        try:
            target = layout_from_proto(request.target, "target")
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        result = await self._group.flip(target)
        response = pb.RequestFlipResponse(outcome=_OUTCOMES[result.outcome], reason=result.reason)
        if result.flip_id is not None:
            response.flip_id = result.flip_id
        generation = self._group.generation
        if generation is not None:
            response.layout = layout_to_proto(generation.log.layout)
            response.fence.CopyFrom(fence_message(generation.log))
        return response

    async def _read(self, requests: AsyncIterator[pb.ServeRequestsRequest], session: Session) -> None:
        try:
            async for message in requests:
                self._take(message, session)
        finally:
            session.ended.set()

    def _take(self, message: pb.ServeRequestsRequest, session: Session) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._group.give(Submit(session.owned(submission_from_proto(message.submit))))
            case "abort":
                self._group.give(Abort(session.inside(message.abort.request_id)))
            case "finish":
                finish = message.finish
                self._group.give(Finish(session.inside(finish.request_id), finish.num_output_tokens))
            case None:
                session.cut("message: a submit, abort or finish expected, the router's message is empty")

    async def _write(self, session: Session, context: ServeContext) -> None:
        try:
            while True:
                await session.wake.wait()
                for response in session.take():
                    await context.write(response)
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            # The router has gone in the middle of a message; its side of the stream ends as well.
            session.ended.set()
