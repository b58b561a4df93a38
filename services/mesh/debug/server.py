"""The service by which a test holds this process at a point of a flip; refused unless `[debug] enabled` says otherwise.

A call is a hold: it ends with the call, so that nothing stays held by a test that has died. Never holds by itself.
"""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
from flipmesh.common.v1 import debug_pb2 as pb
from flipmesh.common.v1.debug_pb2_grpc import DebugServiceServicer

from services.mesh.debug.breakpoints import MAX_HELD_MS, Hold, HoldPoint, Holds

HoldContext = grpc.aio.ServicerContext[pb.HoldProcessRequest, pb.HoldProcessResponse]


class DebugServer(DebugServiceServicer):
    """Serves the holds of one process; `holds` None: they are not enabled."""

    def __init__(self, service: str, holds: Holds | None) -> None:
        self._service, self._holds = service, holds

    async def HoldProcess(  # noqa: N802 (the proto's name)
        self, request: pb.HoldProcessRequest, context: HoldContext
    ) -> AsyncIterator[pb.HoldProcessResponse]:
        """One hold, from its setting to its end."""
        holds, hold = await self._set(request, context)
        # However the call ends: one that breaks while a response is being sent is not seen by a generator.
        context.add_done_callback(lambda _: holds.release(hold))  # type: ignore[arg-type]  # as in worker/server.py
        yield pb.HoldProcessResponse(state=pb.HOLD_STATE_SET)
        await hold.reached.wait()
        yield pb.HoldProcessResponse(state=pb.HOLD_STATE_HELD)
        await hold.over.wait()
        yield pb.HoldProcessResponse(state=pb.HOLD_STATE_EXPIRED)

    async def _set(self, request: pb.HoldProcessRequest, context: HoldContext) -> tuple[Holds, Hold]:
        if self._holds is None:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "debug.enabled = false: this process cannot be held; set it in the deployment's TOML and start again",
            )
        points = {point.value: point for point in HoldPoint if point.service == self._service}
        point = points.get(request.point)
        if point is None or not 1 <= request.bound_ms <= MAX_HELD_MS:
            known = ", ".join(point.name for point in points.values())
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"point {request.point} for {request.bound_ms} ms: one of {known} and 1 to {MAX_HELD_MS} ms expected",
            )
        hold = self._holds.set(point, request.bound_ms * 1e-3)
        if hold is None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"a hold is set at {point.name}: end that call first")
        return self._holds, hold
