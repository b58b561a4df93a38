"""The stream to the policy: the group's signal out, on change and at most 20 times a second; advice in.

It forwards, it does not decide: what an advice leads to is an attempt like one by hand. A policy that is gone is waited
for; serving goes on without it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import anyio
import grpc.aio
from flipmesh.common.v1 import layout_pb2
from flipmesh.policy.v1 import policy_service_pb2 as pb
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_from_proto
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers

MIN_INTERVAL_S = 0.05
RECONNECT_S = 0.5

Signal = Callable[[], pb.AdviseLayoutRequest]
OnAdvice = Callable[[LayoutKind, str, layout_pb2.Fence], Awaitable[None]]
"""The layout, the reason, and the fence of the signal that is answered."""


class PolicyLink:
    """One generation's conversation with the policy."""

    def __init__(self, peers: Peers, log: Log, signal: Signal, on_advice: OnAdvice) -> None:
        self._peers = peers
        self._log = log
        self._signal = signal
        self._on_advice = on_advice
        self._changed = anyio.Event()

    def touch(self) -> None:
        """Something the signal is made of may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Keeps the conversation until cancelled."""
        while True:
            channel = await self._peers.reach("policy")
            call = PolicyServiceStub(channel).AdviseLayout()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._tell, call)
                    await self._listen(call)
                    tasks.cancel_scope.cancel()
            finally:
                call.cancel()
            self._log.info("policy-left", again_in_s=RECONNECT_S)
            await anyio.sleep(RECONNECT_S)

    async def _tell(self, call: "grpc.aio.StreamStreamCall[pb.AdviseLayoutRequest, pb.AdviseLayoutResponse]") -> None:
        said = b""
        while True:
            self._changed = anyio.Event()
            message = self._signal()
            if (told := _without_ages(message)) != said:
                said = told
                try:
                    await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # The reader of the same call sees its end and says so.
                    return
            await anyio.sleep(MIN_INTERVAL_S)
            await self._changed.wait()

    async def _listen(self, call: "grpc.aio.StreamStreamCall[pb.AdviseLayoutRequest, pb.AdviseLayoutResponse]") -> None:
        try:
            async for advice in call:
                await self._on_advice(layout_from_proto(advice.advised, "advised"), advice.reason, advice.fence)
        except grpc.aio.AioRpcError as error:
            self._log.debug("policy-stream-broke", error=error.details())


def _without_ages(message: pb.AdviseLayoutRequest) -> bytes:
    """What changes by time alone is no change."""
    bare = pb.AdviseLayoutRequest()
    bare.CopyFrom(message)
    bare.ClearField("since_flip_ns")
    bare.ClearField("since_attempt_ns")
    return bare.SerializeToString()


def since(began_ns: int) -> int:
    """Nanoseconds since a monotonic time."""
    return max(0, time.monotonic_ns() - began_ns)
