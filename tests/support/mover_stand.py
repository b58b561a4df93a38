"""A real mover and two scripted ranks with real participations, over real streams, in one process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub, add_MoverServiceServicer_to_server
from flipmesh.worker.v1 import worker_service_pb2 as worker_pb
from flipmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.core.flip.messages import FlipDeadlines
from services.core.flip.records import FlipKey
from services.core.ids import FlipId, Generation, Rank
from services.mesh.debug.breakpoints import Holds
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import identify
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from services.mover.journal import Journal
from services.mover.server import Mover
from services.worker.participation import Parked, Participation, Resumed, Switched, Worked

WAIT_S = 10.0
S = 1_000_000_000
KEY: FlipKey = (Generation(9), FlipId(7))
OTHER: FlipKey = (Generation(9), FlipId(8))
FENCE = layout_pb2.Fence(generation=9, epoch=4)


class ScriptedRank(WorkerServiceServicer):
    """One rank: the real participation behind a real stream; its model thread is the test."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.started: asyncio.Queue[FlipId] = asyncio.Queue()
        self.participation = Participation(rank, self.started.put_nowait, lambda flip_id: None)

    async def JoinFlip(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb.JoinFlipRequest],
        context: grpc.aio.ServicerContext[worker_pb.JoinFlipRequest, worker_pb.JoinFlipResponse],
    ) -> AsyncIterator[worker_pb.JoinFlipResponse]:
        async for response in self.participation.responses(request_iterator):
            yield response

    def park(self, key: FlipKey = KEY, *, fits: bool = True, plan_hash: int = 0, at_ns: int = 1000) -> None:
        refusal = "" if fits else "4 rows too many"
        parked = Parked(key[1], at_ns - 10 - self.rank, at_ns, fits, refusal, plan_hash)
        self.participation.on_answer(parked, layout_pb2.Fence(generation=key[0], epoch=4))

    async def work(self) -> None:
        """Waits for ENTER and does its part."""
        flip_id = await self.started.get()
        self.participation.on_answer(Worked(flip_id, 2000, 1, 0, 2, 3, bytes_moved=5, rows_moved=2), FENCE)

    def switch(self, flip_id: FlipId, *, is_committed: bool = True) -> None:
        self.participation.on_answer(Switched(flip_id, is_committed), FENCE)
        self.participation.on_answer(Resumed(flip_id, 3000, 3100 + self.rank), FENCE)


class Stand:
    """Two ranks, and a mover that may die and come back over the same journal."""

    def __init__(self, root: Path, log: Log, deadlines: FlipDeadlines) -> None:
        self.paths, self.log, self.deadlines = StatePaths(root), log, deadlines
        self.peers = Peers(self.paths, log)
        self.ranks = [ScriptedRank(Rank(rank)) for rank in range(2)]
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._tracer = provider.get_tracer("test")

    @contextlib.asynccontextmanager
    async def rank(self, rank: int) -> AsyncIterator[None]:
        server = GrpcServer(self.paths.socket("worker", Rank(rank)), introspection("worker", Rank(rank)), self.log)
        descriptor = worker_pb.DESCRIPTOR.services_by_name["WorkerService"]
        server.add(add_WorkerServiceServicer_to_server, self.ranks[rank], descriptor)
        async with server.running():
            yield

    @contextlib.asynccontextmanager
    async def mover(self, holds: Holds | None = None) -> AsyncIterator[Mover]:
        """One life of the mover."""
        journal, peers = Journal(self.paths.root / "journal"), Peers(self.paths, self.log)
        mover = Mover(2, self.deadlines, journal, peers, self.log, self._tracer, Metrics(), holds)
        server = GrpcServer(self.paths.socket("mover"), introspection("mover", None), self.log)
        server.add(add_MoverServiceServicer_to_server, mover, pb.DESCRIPTOR.services_by_name["MoverService"])
        async with anyio.create_task_group() as tasks, server.running():
            tasks.start_soon(mover.links.run)
            yield mover
            tasks.cancel_scope.cancel()
        await peers.close()
        journal.close()

    def ask(self, key: FlipKey = KEY) -> "Question":
        return Question(MoverServiceStub(self.peers.channel("mover")), key)

    async def flips(self) -> list[pb.FlipRecord]:
        answer = await MoverServiceStub(self.peers.channel("mover")).ListFlips(pb.ListFlipsRequest(), timeout=WAIT_S)
        return list(answer.flips)


class Question:
    """One RunFlip call."""

    def __init__(self, stub: MoverServiceStub, key: FlipKey) -> None:
        fence = layout_pb2.Fence(generation=key[0], epoch=4)
        source, target = layout_pb2.LAYOUT_KIND_TP, layout_pb2.LAYOUT_KIND_PP
        self.call = stub.RunFlip(
            pb.RunFlipRequest(fence=fence, flip_id=key[1], source=source, target=target, entry_sequence=12),
            wait_for_ready=True,
            timeout=WAIT_S,
        )

    async def until(self, state: "pb.FlipState.ValueType") -> pb.RunFlipResponse:
        async for response in self.call:
            if response.state == state:
                return response
        raise AssertionError(f"the stream ended before {pb.FlipState.Name(state)}")


def introspection(service: str, rank: Rank | None) -> Introspection:
    identity = identify(service, rank)
    return Introspection(identity, Progress(identity.name), Metrics())


def deadlines(park_ns: int = 30 * S, presence_ns: int = 30 * S, data_plane_ns: int = 30 * S) -> FlipDeadlines:
    return FlipDeadlines(park_ns, presence_ns, data_plane_ns)


MakeStand = Callable[[FlipDeadlines], Awaitable[Stand]]


def status_of(mover: Mover) -> introspection_pb2.MoverStatus:
    status = introspection_pb2.GetStatusResponse()
    mover.fill_status(status)
    return status.mover
