"""The page that a Prometheus scrapes: the counts of every process of the mesh, gathered when it is asked for.

Never fails: a process that does not answer in time loses its gauges and keeps its counters.
"""

import anyio
from flipmesh.common.v1 import introspection_pb2 as pb
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub

from services.core.errors import MeshError
from services.core.ids import Rank
from services.mesh.rpc import Peers, unary
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import MetricsAggregator

ASK_TIMEOUT_S = 1.0
"""A scrape waits so long for the slowest process: far below a scraper's own 10 s."""
SINGLE_SERVICES = ("scheduler", "policy", "mover", "sentinel")


class MetricsPage:
    """Gathers and renders."""

    def __init__(self, introspection: Introspection, peers: Peers, num_ranks: int) -> None:
        self._own, self._peers = introspection, peers
        self._aggregator = MetricsAggregator()
        workers: list[tuple[str, Rank | None]] = [("worker", Rank(rank)) for rank in range(num_ranks)]
        self._places = [*((service, None) for service in SINGLE_SERVICES), *workers]

    async def render(self) -> bytes:
        """The page now."""
        async with anyio.create_task_group() as tasks:
            for service, rank in self._places:
                tasks.start_soon(self._ask, service, rank)
        self._aggregator.fold(self._own.metrics_now())
        return self._aggregator.render()

    async def _ask(self, service: str, rank: Rank | None) -> None:
        stub = IntrospectionServiceStub(self._peers.channel(service, rank))
        try:
            self._aggregator.fold(await unary(stub.GetMetrics, pb.GetMetricsRequest(), timeout_s=ASK_TIMEOUT_S))
        except MeshError:
            self._aggregator.lose(service, rank)
