"""One rank's end of the step log: bytes out in order, answers in. IO only; what answers mean is the caller's.

The log's entries wait here, at most a window of them, while the connection takes them. Whatever ends the stream comes
out as `RankLostError` naming the rank.
"""

import asyncio
from collections import deque

import anyio.lowlevel
import grpc.aio
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.ids import Rank
from services.mesh.rpc import stream_of_bytes, translate

EXECUTE_STEPS = "/flipmesh.worker.v1.WorkerService/ExecuteSteps"

MAX_UNSENT_ENTRIES = 2_048
"""Entries that may wait for one connection: above the widest window of unacknowledged steps, one for each stage."""


class RankLostError(Exception):
    """A rank's stream has ended, or it said that it cannot go on: the generation is over."""


class RankStream:
    """The log's stream to one rank; opened with its first entry, closed by `close`."""

    def __init__(self, rank: Rank, channel: grpc.aio.Channel) -> None:
        self.rank = rank
        self._call = stream_of_bytes(channel, EXECUTE_STEPS, pb.ExecuteStepsResponse)()
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()

    def put(self, entry: bytes) -> None:
        """Queues one serialised entry behind the ones before it."""
        assert len(self._unsent) < MAX_UNSENT_ENTRIES, f"rank {self.rank} does not take the log's entries"
        self._unsent.append(entry)
        self._has_unsent.set()

    async def write_all(self) -> None:
        """Sends entries as they come, until cancelled or the stream is over; why it is, `read` says."""
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent:
                try:
                    await self._guarded(self._call.write(self._unsent.popleft()))
                except RankLostError:
                    return

    async def read(self) -> pb.ExecuteStepsResponse:
        """The rank's next answer.

        Raises:
            RankLostError: the stream has ended, or the answer is the rank's fault, its last one.
        """
        answer = await self._guarded(self._call.read())
        if not isinstance(answer, pb.ExecuteStepsResponse):
            raise RankLostError(f"rank {self.rank} ended its stream: {await self._ending()}")
        if answer.HasField("fault"):
            fault = answer.fault
            kind = pb.FaultKind.Name(fault.kind)
            raise RankLostError(f"rank {self.rank} at entry {fault.sequence}: {kind}: {fault.message}")
        return answer

    def close(self) -> None:
        """Ends the stream, whatever it is at: the rank's process ends with it."""
        self._call.cancel()

    async def _ending(self) -> str:
        code, details = await self._call.code(), await self._call.details()
        return f"{code.name}: {details or 'no details'}; its log says why"

    async def _guarded(self, operation: object) -> object:
        """Awaits one read or write; gives a cancellation back in anyio's own form, which grpc drops."""
        try:
            return await operation  # type: ignore[misc]
        except asyncio.CancelledError:
            self._call.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise RankLostError(f"rank {self.rank}: its stream was cancelled") from None
        except grpc.aio.AioRpcError as error:
            raise RankLostError(f"rank {self.rank}: {translate(error, 'the step log')}") from error
        except asyncio.InvalidStateError as error:
            raise RankLostError(f"rank {self.rank}: its stream is closed: {await self._ending()}") from error
