"""The question that a flip puts to the mover: asked again when the answer breaks off, given up after a long silence.

A mover that works says so every second or two, so silence means that it is gone or stopped, however long a flip may
take. Never decides what a silence leads to.
"""

import asyncio
import time

import anyio
import grpc.aio
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.flip.messages import FlipOutcome
from services.mesh.codec.flip import outcome_from_proto
from services.mesh.rpc import Peers
from services.mesh.settings.tables import DeadlineSettings

LOOK_S = 0.5
"""Silence is counted in pieces of so much, and not those in which this process stood still."""
MAX_HEARD = 64
"""Responses that wait; one attempt has a handful, and its beats are taken as they come."""

Call = grpc.aio.UnaryStreamCall[pb.RunFlipRequest, pb.RunFlipResponse]
Heard = asyncio.Queue[pb.RunFlipResponse | str]


class MoverQuestion:
    """One attempt's question; `left_s` counts down from the mover's last word."""

    def __init__(self, peers: Peers, deadlines: DeadlineSettings, request: pb.RunFlipRequest) -> None:
        self._peers = peers
        self._request = request
        self._bound_s = deadlines.park_s + deadlines.presence_s + deadlines.flip_data_plane_s + deadlines.rpc_s
        self.silence_s = deadlines.mover_silence_s
        """How long serving stands still for a mover that says nothing: its supervisor restarts it within a second or
        two."""
        self._heard_s = time.monotonic()

    @property
    def left_s(self) -> float:
        """Until the mover counts as gone."""
        return max(0.0, self._heard_s + self.silence_s - time.monotonic())

    async def ask(self) -> tuple[FlipOutcome | None, str]:
        """The outcome and its reason; None and why there is no answer."""
        call = MoverServiceStub(self._peers.channel("mover")).RunFlip(self._request, timeout=self._bound_s)
        heard: Heard = asyncio.Queue(MAX_HEARD)
        # A task of its own: grpc's cancellation of a read and anyio's of a wait do not know each other.
        reader = asyncio.create_task(_read(call, heard))
        try:
            return await self._listen(heard)
        finally:
            call.cancel()
            reader.cancel()

    async def _listen(self, heard: Heard) -> tuple[FlipOutcome | None, str]:
        while True:
            response = await self._next(heard)
            if isinstance(response, str):
                return None, response
            self._heard_s = time.monotonic()
            if (outcome := outcome_from_proto(response.state)) is not None:
                return outcome, response.reason

    async def _next(self, heard: Heard) -> pb.RunFlipResponse | str:
        while (left_s := self.left_s) > 0:
            wait_s, began_s = min(left_s, LOOK_S), time.monotonic()
            with anyio.move_on_after(wait_s):
                return await heard.get()
            waited_s = time.monotonic() - began_s
            if waited_s > wait_s + LOOK_S:
                # This process stood still and could not have heard: that is no silence of the mover.
                self._heard_s += waited_s
        return f"it said nothing for {self.silence_s:g} s"


async def _read(call: Call, heard: Heard) -> None:
    """Puts responses, then why they ended."""
    try:
        async for response in call:
            await heard.put(response)
    except grpc.aio.AioRpcError as error:
        await heard.put(f"{error.code().name}: {error.details()}")
    else:
        await heard.put("the mover ended its stream without an outcome")
