"""The stream to the policy: the group's signal out, on change and at most 20 times a second; advice in.

It forwards, it does not decide: what an advice leads to is an attempt like one by hand. A policy that is gone is waited
for, and what it says wrongly is dropped; serving goes on without it.
"""

import asyncio
from collections.abc import Callable

import anyio
import grpc.aio
from flipmesh.common.v1 import layout_pb2
from flipmesh.policy.v1 import policy_service_pb2 as pb
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub

from services.core.ids import Epoch, Generation
from services.mesh.codec.common import CodecError, layout_from_proto, layout_to_proto
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.scheduler.inputs import FlipWanted, fence_of
from services.scheduler.log import GenerationLog
from services.scheduler.meters import Meters

MIN_INTERVAL_S = 0.05
RECONNECT_S = 0.5

AdviceCall = grpc.aio.StreamStreamCall[pb.AdviseLayoutRequest, pb.AdviseLayoutResponse]


class PolicyLink:
    """One generation's conversation with the policy."""

    def __init__(self, peers: Peers, log: Log, meters: Meters, signal: Callable[[], pb.AdviseLayoutRequest]) -> None:
        self._peers, self._log, self._meters = peers, log, meters
        self._signal = signal
        self._changed = anyio.Event()

    def touch(self) -> None:
        """Something the signal is made of may have changed."""
        self._changed.set()

    async def run(self, follow: Callable[[FlipWanted], None]) -> None:
        """Keeps the conversation until cancelled; `follow` takes each advice."""
        while True:
            channel = await self._peers.reach("policy")
            call = PolicyServiceStub(channel).AdviseLayout()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._tell, call)
                    await self._listen(call, follow)
                    tasks.cancel_scope.cancel()
            finally:
                call.cancel()
            self._log.info("policy-left", again_in_s=RECONNECT_S)
            await anyio.sleep(RECONNECT_S)

    async def _tell(self, call: AdviceCall) -> None:
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

    async def _listen(self, call: AdviceCall, follow: Callable[[FlipWanted], None]) -> None:
        try:
            async for advice in call:
                try:
                    follow(_advice(advice))
                except CodecError as error:
                    self._meters.on_dropped_advice()
                    self._log.warning("advice-dropped", error=str(error), reason=advice.reason)
        except grpc.aio.AioRpcError as error:
            self._log.debug("policy-stream-broke", error=error.details())


def _advice(advice: pb.AdviseLayoutResponse) -> FlipWanted:
    fence = Generation(advice.fence.generation), Epoch(advice.fence.epoch)
    return FlipWanted(layout_from_proto(advice.advised, "advised"), advice.reason, fence)


def signal_of(log: GenerationLog, now_ns: int) -> pb.AdviseLayoutRequest:
    """What the policy is told now."""
    load, past = log.batcher.load(), log.flips.past
    generation, epoch = fence_of(log.fence)
    attempted_ns = log.began_ns if past.ended_ns is None else past.ended_ns
    return pb.AdviseLayoutRequest(
        fence=layout_pb2.Fence(generation=generation, epoch=epoch),
        layout=layout_to_proto(log.layout),
        uncomputed_prefill_tokens=load.uncomputed_prefill_tokens,
        decode_rows=load.decode_rows,
        queued_requests=load.queued_requests,
        free_blocks=load.free_blocks,
        since_flip_ns=max(0, now_ns - log.began_ns),
        since_attempt_ns=max(0, now_ns - attempted_ns),
        abandoned_in_a_row=past.abandoned_in_a_row,
    )


def _without_ages(message: pb.AdviseLayoutRequest) -> bytes:
    """What changes by time alone is no change."""
    bare = pb.AdviseLayoutRequest()
    bare.CopyFrom(message)
    bare.ClearField("since_flip_ns")
    bare.ClearField("since_attempt_ns")
    return bare.SerializeToString()
