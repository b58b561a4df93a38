"""The service by which tests hold this process at points of a flip, or damage rows; refused unless `[debug] enabled`.

A call is a hold: it ends with the call, so that nothing stays held by a test that has died. Never holds by itself.
"""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
from flipmesh.common.v1 import debug_pb2 as pb
from flipmesh.common.v1.debug_pb2_grpc import DebugServiceServicer

from services.mesh.debug.breakpoints import MAX_HELD_MS, Hold, HoldPoint, Holds
from services.mesh.debug.damage import DamageKind, NothingToDamageError

DISABLED = (
    "debug.enabled = false: this process cannot be held or damaged; set it in the deployment's TOML and start again"
)
DamageContext = grpc.aio.ServicerContext[pb.DamageRowsRequest, pb.DamageRowsResponse]
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

    async def DamageRows(  # noqa: N802 (the proto's name)
        self, request: pb.DamageRowsRequest, context: DamageContext
    ) -> pb.DamageRowsResponse:
        """One damage, when the model thread has done it."""
        if self._holds is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, DISABLED)
        kinds = {kind.value: kind for kind in DamageKind}
        if self._service != "worker" or request.kind not in kinds or not 1 <= request.bound_ms <= MAX_HELD_MS:
            known = ", ".join(kind.name for kind in DamageKind)
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"kind {request.kind} within {request.bound_ms} ms of the {self._service}: one of {known} within 1 to "
                f"{MAX_HELD_MS} ms expected, of a worker",
            )
        try:
            what = await self._holds.damage.order(kinds[request.kind], request.seed, request.bound_ms * 1e-3)
        except NothingToDamageError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"no step came within {request.bound_ms} ms: have a request decode"
            )
        return pb.DamageRowsResponse(what=what)

    async def _set(self, request: pb.HoldProcessRequest, context: HoldContext) -> tuple[Holds, Hold]:
        if self._holds is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, DISABLED)
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
