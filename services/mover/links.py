"""The mover's streams to the ranks: one each, opened when the rank is there, opened again when it is lost.

Carries messages, decides nothing. An idle link costs nothing; what is said to a rank that is not connected is dropped,
and the rank's own state is said again when it is back. A link writes in a task of its own: whoever is cancelled while
he speaks (a scheduler that leaves takes its attempt with it) would cancel grpc's stream, and with it the link.
"""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import grpc.aio
from flipmesh.worker.v1 import worker_service_pb2 as pb
from flipmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub

from services.core.ids import Rank
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers

RECONNECT_S = 0.1
"""Between a stream's end and the next try; the try itself waits for the rank without polling."""
MAX_UNSENT = 64
"""Messages that wait for one rank: a handful is said in each attempt, and to a stopped one only the newest matter."""

OnMessage = Callable[[Rank, pb.JoinFlipResponse], Awaitable[None]]
"""With the rank that the link leads to."""
OnLost = Callable[[Rank, str], Awaitable[None]]
Call = grpc.aio.StreamStreamCall[pb.JoinFlipRequest, pb.JoinFlipResponse]
Unsent = asyncio.Queue[pb.JoinFlipRequest]


class RankLinks:
    """One stream to each rank of the group."""

    def __init__(self, num_ranks: int, peers: Peers, log: Log, on_message: OnMessage, on_lost: OnLost) -> None:
        self._num_ranks = num_ranks
        self._peers = peers
        self._log = log
        self._on_message = on_message
        self._on_lost = on_lost
        self._unsent: dict[Rank, Unsent] = {}

    @property
    def num_connected(self) -> int:
        """Ranks that hear what is sent now."""
        return len(self._unsent)

    async def run(self) -> None:
        """Keeps every link until cancelled."""
        async with anyio.create_task_group() as tasks:
            for rank in range(self._num_ranks):
                tasks.start_soon(self._keep, Rank(rank))

    def send(self, message: pb.JoinFlipRequest) -> None:
        """To every rank that is connected, in order; never waits."""
        for unsent in self._unsent.values():
            if unsent.full():
                unsent.get_nowait()
            unsent.put_nowait(message)

    async def _keep(self, rank: Rank) -> None:
        while True:
            channel = await self._peers.reach("worker", rank)
            reason = await self._follow(rank, channel)
            await self._on_lost(rank, reason)
            await anyio.sleep(RECONNECT_S)

    async def _follow(self, rank: Rank, channel: grpc.aio.Channel) -> str:
        """Reads one stream to its end and says why it ended."""
        call = WorkerServiceStub(channel).JoinFlip()
        unsent = self._unsent[rank] = asyncio.Queue(MAX_UNSENT)
        writer = asyncio.create_task(self._write_all(rank, call, unsent))
        try:
            async for message in call:
                await self._on_message(rank, message)
        except grpc.aio.AioRpcError as error:
            return f"its stream broke: {error.details()}"
        finally:
            del self._unsent[rank]
            writer.cancel()
            call.cancel()
        return "it ended its stream"

    async def _write_all(self, rank: Rank, call: Call, unsent: Unsent) -> None:
        while True:
            try:
                await call.write(await unsent.get())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                # Its reader sees the end of the stream too and says that the rank is lost.
                self._log.debug("rank-not-told", rank=rank, error=str(error))
                return
