"""A mesh that flips, under test: streams, flips by hand, what the mover and the scheduler say, and the control."""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub
from flipmesh.router.v1 import inference_service_pb2

from services.core.errors import MeshError
from services.core.ids import LayoutKind, Rank
from services.mesh.codec.common import layout_from_proto
from services.mesh.codec.policy import mode_to_proto
from services.mesh.rpc import unary
from tests.mesh.support.meshes import Mesh
from tools.control import flip_by_hand
from tools.load.load import Ask, Heard, Load
from tools.mesh_client import CALL_S, MeshClient, NotRunningError, mesh_client
from tools.oracle.compare import first_difference, judge

PP, TP = LayoutKind.PP, LayoutKind.TP
WAIT_S = 60.0
OPENINGS = (
    "Once upon a time",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "The capital of France is",
    "def fib(n):",
    "The sea was",
    "To bake bread",
    "Physics is",
    "A cat and a dog",
)
ASKS = tuple(Ask(opening, 60) for opening in OPENINGS)
LONG_TOKENS = 1200


class Bench:
    """One client of a mesh, and what it asks the mesh's processes directly."""

    def __init__(self, mesh: Mesh, client: MeshClient) -> None:
        self.mesh = mesh
        self.client = client

    def load(self, asks: Sequence[Ask]) -> Load:
        return Load(self.client.channel("router"), asks)

    async def ask(self, asks: Sequence[Ask]) -> list[Heard]:
        return await self.load(asks).run()

    async def flip(self, target: LayoutKind) -> inference_service_pb2.FlipResponse:
        return await flip_by_hand(self.client, target)

    async def flip_to(self, target: LayoutKind) -> None:
        """Until the layout is `target`, whatever it was."""
        if await self.layout() is not target:
            answer = await self.flip(target)
            assert answer.committed, answer.reason

    async def records(self) -> list[mover_service_pb2.FlipRecord]:
        """The mover's records, newest first."""
        stub = MoverServiceStub(self.client.channel("mover"))
        answer = await unary(stub.ListFlips, mover_service_pb2.ListFlipsRequest(), timeout_s=CALL_S)
        return list(answer.flips)

    async def record(self, flip_id: int) -> mover_service_pb2.FlipRecord:
        """The record of this generation's flip once the scheduler has reported what it carried."""
        generation = (await self.scheduler()).generation
        with anyio.fail_after(WAIT_S):
            while True:
                for record in await self.records():
                    is_meant = record.fence.generation == generation and record.flip_id == flip_id
                    if is_meant and record.num_live_blocks:
                        return record

    async def status(self, service: str, rank: Rank | None = None) -> introspection_pb2.GetStatusResponse:
        stub = IntrospectionServiceStub(self.client.channel(service, rank))
        return await unary(stub.GetStatus, introspection_pb2.GetStatusRequest(), timeout_s=CALL_S)

    async def scheduler(self) -> introspection_pb2.SchedulerStatus:
        return (await self.status("scheduler")).scheduler

    async def layout(self) -> LayoutKind:
        return layout_from_proto((await self.scheduler()).layout, "layout")

    async def policy(self, mode: str) -> None:
        request = policy_service_pb2.SetModeRequest(mode=mode_to_proto(mode))
        await unary(PolicyServiceStub(self.client.channel("policy")).SetMode, request, timeout_s=CALL_S)

    async def until_layout(self, kind: LayoutKind) -> None:
        with anyio.fail_after(WAIT_S):
            while await self.layout() is not kind:
                pass

    async def until_pending(self) -> int:
        """Until a flip is armed; its number."""
        with anyio.fail_after(WAIT_S):
            while not (status := await self.scheduler()).HasField("pending_flip_id"):
                pass
        return status.pending_flip_id

    async def until_open(self, num_requests: int) -> None:
        """Until the router has so many requests."""
        with anyio.fail_after(WAIT_S):
            while (await self.status("router")).router.num_open_requests != num_requests:
                pass

    async def settled(self) -> introspection_pb2.SchedulerStatus:
        """Until nothing is open; then every block must have its place."""
        with anyio.fail_after(WAIT_S):
            while (status := await self.scheduler()).num_resident_requests or status.num_queued_requests:
                pass
        assert status.num_free_blocks + status.num_cached_blocks == status.num_total_blocks
        assert (status.num_held_blocks, status.num_unaccounted_blocks, status.num_unsound_censuses) == (0, 0, 0)
        return status

    async def pid(self, service: str, rank: Rank | None = None) -> int:
        return int((await self.status(service, rank)).identity.pid)

    async def until_reborn(self, service: str, old_pid: int, rank: Rank | None = None) -> None:
        """Until another process of this name answers."""
        with anyio.fail_after(WAIT_S):
            while True:
                try:
                    if await self.pid(service, rank) != old_pid:
                        return
                except (MeshError, NotRunningError):
                    await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def streaming(self, asks: Sequence[Ask], num_first: int) -> AsyncIterator[Load]:
        """Streams at work, `num_first` tokens out; on the way out all have ended."""
        load = self.load(asks)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await load.until(num_first)
            yield load


@asynccontextmanager
async def bench_of(mesh: Mesh) -> AsyncIterator[Bench]:
    """A bench, and the mesh in TP with nothing open and flips by hand alone, before and after."""
    async with mesh_client(mesh.config) as client:
        bench = Bench(mesh, client)
        await bench.policy("manual")
        await bench.flip_to(TP)
        yield bench
        await bench.policy("manual")
        await bench.settled()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile, unless it is killed meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def hold_answers(control: Sequence[Heard], heard: Sequence[Heard]) -> None:
    """Every answer is the control's, but for near ties, few of them."""
    assert [one.error for one in heard] == [""] * len(heard)
    differences = [
        difference
        for stream, (one, other) in enumerate(zip(control, heard, strict=True))
        if (difference := first_difference(stream, one, other)) is not None
    ]
    failures, _ = judge(differences, [0] * len(heard))
    assert not failures


async def flip_until_ended(bench: Bench, load: Load) -> list[int]:
    """Flips to and fro while the streams run; the numbers of the flips that committed."""
    committed = []
    deadline_s = time.monotonic() + WAIT_S
    while not load.has_ended:
        assert time.monotonic() < deadline_s
        answer = await bench.flip((await bench.layout()).other)
        assert answer.committed, answer.reason
        committed.append(answer.flip_id)
    return committed


def long_ask(first: int, max_tokens: int = 8, *, num_tokens: int = LONG_TOKENS) -> Ask:
    """A prompt of `num_tokens` or more, unlike any other `first`'s from its first block on."""
    return Ask(" ".join(f"{number}" for number in range(first, first + num_tokens // 4)), max_tokens)
