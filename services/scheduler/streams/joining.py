"""Finds worker processes that have not had a log yet: each serves one in its life, and is replaced after it.

Waits for ever, with backoff: start order does not matter. Never opens a log.
"""

from collections.abc import Callable

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub

from services.core.errors import MeshError
from services.core.ids import Rank
from services.mesh.rpc import Peers, unary

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
"""How often a worker that still has its old log is looked at: its supervisor needs a second or more to replace it."""


class WorkerFinder:
    """The workers of one group, over its generations."""

    def __init__(self, peers: Peers, num_ranks: int, rpc_s: float) -> None:
        self._peers, self._rpc_s = peers, rpc_s
        self._ranks = tuple(Rank(rank) for rank in range(num_ranks))
        self._used: dict[Rank, str] = {}
        """Incarnations that were given out."""

    async def fresh(self, on_waiting: Callable[[str], None]) -> list[grpc.aio.Channel]:
        """Channels to workers that can take a log, by rank; `on_waiting` hears which are missing as that changes."""
        found: dict[Rank, tuple[grpc.aio.Channel, str]] = {}

        def tell() -> None:
            missing = [f"worker-{rank}" for rank in self._ranks if rank not in found]
            if missing:
                on_waiting(", ".join(missing))

        async def find(rank: Rank) -> None:
            found[rank] = await self._find(rank)
            tell()

        tell()
        async with anyio.create_task_group() as tasks:
            for rank in self._ranks:
                tasks.start_soon(find, rank)
        for rank, (_, incarnation) in found.items():
            self._used[rank] = incarnation
        return [found[rank][0] for rank in self._ranks]

    async def _find(self, rank: Rank) -> tuple[grpc.aio.Channel, str]:
        backoff_s = BACKOFF_MIN_S
        while True:
            channel = await self._peers.reach("worker", rank)
            try:
                status = await unary(
                    IntrospectionServiceStub(channel).GetStatus,
                    introspection_pb2.GetStatusRequest(),
                    timeout_s=self._rpc_s,
                )
            except MeshError:
                # Gone again between two calls; the next look finds its successor.
                status = introspection_pb2.GetStatusResponse()
            incarnation = status.identity.incarnation
            if incarnation and incarnation != self._used.get(rank) and not status.worker.generation:
                return channel, incarnation
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
