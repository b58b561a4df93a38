"""The mover's attempts against real participants over real streams, and over lives of the mover."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import grpc.aio
import pytest
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub, add_MoverServiceServicer_to_server
from flipmesh.worker.v1 import worker_service_pb2 as worker_pb
from flipmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.core.flip.messages import FlipDeadlines
from services.core.flip.records import Concluded, FlipKey, Record
from services.core.ids import FlipId, Generation, Rank
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import identify
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from services.mover import attempts as attempts_module
from services.mover.journal import Journal
from services.mover.server import Mover
from services.worker import participation as participation_module
from services.worker.participation import Parked, Participation, Resumed, Switched, Worked, WorkLost
from tests.support.scripted_scheduler import open_log

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
    async def mover(self) -> AsyncIterator[Mover]:
        """One life of the mover."""
        journal, peers = Journal(self.paths.root / "journal"), Peers(self.paths, self.log)
        mover = Mover(2, self.deadlines, journal, peers, self.log, self._tracer, Metrics())
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


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    paths = StatePaths(tmp_path)
    paths.create()
    with open_log(paths) as log:
        yield log


MakeStand = Callable[[FlipDeadlines], Awaitable[Stand]]


@pytest.fixture
async def make_stand(tmp_path: Path, log: Log) -> AsyncIterator[MakeStand]:
    """Both ranks are there until the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(bounds: FlipDeadlines) -> Stand:
            stand = Stand(tmp_path, log, bounds)
            for rank in range(2):
                await stack.enter_async_context(stand.rank(rank))
            stack.push_async_callback(stand.peers.close)
            return stand

        yield make


def status_of(mover: Mover) -> introspection_pb2.MoverStatus:
    status = introspection_pb2.GetStatusResponse()
    mover.fill_status(status)
    return status.mover


async def test_a_flip_commits_and_its_record_is_whole(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        for rank in stand.ranks:
            await rank.work()
        done = await asked.until(pb.FLIP_STATE_COMMITTED)
        assert (done.flip_id, done.bytes_moved, done.rows_moved) == (7, 10, 4)
        for rank in stand.ranks:
            rank.switch(KEY[1])
        with anyio.fail_after(WAIT_S):
            while not all(steps.HasField("first_step_unix_ns") for steps in (await stand.flips())[0].ranks):
                pass
        report = pb.ReportCarryRequest(
            fence=FENCE, flip_id=7, num_carried_requests=3, num_partly_prefilled=1, longest_token_gap_ns=77
        )
        await MoverServiceStub(stand.peers.channel("mover")).ReportCarry(report, timeout=WAIT_S)
        [record] = await stand.flips()
        assert record.state == pb.FLIP_STATE_COMMITTED
        assert record.pause_ns == 3100 - 990, "last step before on any rank, first step after on any rank"
        assert (record.num_carried_requests, record.longest_token_gap_ns) == (3, 77)
        assert status_of(mover).num_committed_total == 1
    names = [span.name for span in stand.spans.get_finished_spans()]
    assert names.count("flip") == 1 and {"rank 0", "rank 1"} <= set(names)


async def test_one_refusal_abandons_for_all(make_stand: MakeStand) -> None:
    """Y"""
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        asked = stand.ask()
        stand.ranks[0].park()
        stand.ranks[1].park(fits=False)
        assert (await asked.until(pb.FLIP_STATE_ABANDONED)).reason == "rank 1 refuses: 4 rows too many"
        assert all(rank.started.empty() for rank in stand.ranks)
        status = status_of(mover)
        assert (status.num_abandoned_total, status.last_abandon_reason) == (1, "rank 1 refuses: 4 rows too many")
        for rank in stand.ranks:
            rank.participation.on_answer(Switched(KEY[1], is_committed=False), FENCE)
            rank.park(OTHER)
        asked = stand.ask(OTHER)
        for rank in stand.ranks:
            await rank.work()
        await asked.until(pb.FLIP_STATE_COMMITTED)


async def test_a_rank_that_gives_anothers_number_is_not_heard(make_stand: MakeStand) -> None:
    """A8: ranks 0 and 7 committed a flip of two."""
    stand = await make_stand(deadlines(park_ns=S // 2))
    stand.ranks[1].participation = ScriptedRank(Rank(7)).participation
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        reason = (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
        assert reason.startswith("not parked in time: rank 1"), reason
        assert all(rank.started.empty() for rank in stand.ranks)


async def test_an_outcome_that_cannot_be_written_ends_the_mover_and_is_decided_in_its_next_life(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: the disk is full at the outcome; a mover that goes on from memory would be asked for ever."""
    stand = await make_stand(deadlines())
    append = Journal.append

    def full(journal: Journal, record: Record) -> None:
        if isinstance(record, Concluded):
            raise OSError("no space left")
        append(journal, record)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        async with stand.mover() as mover:
            asked = stand.ask()
            for rank in stand.ranks:
                rank.park()
            for rank in stand.ranks:
                await rank.work()
            with pytest.raises(grpc.aio.AioRpcError, match="cannot write its journal: no space left"):
                await asked.until(pb.FLIP_STATE_COMMITTED)
            with anyio.fail_after(WAIT_S):
                await mover.journal_failed.wait()
    async with stand.mover():
        await stand.ask().until(pb.FLIP_STATE_COMMITTED)


async def test_plans_that_differ_abandon(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park(plan_hash=rank.rank)
        assert "plans differ" in (await asked.until(pb.FLIP_STATE_ABANDONED)).reason


async def test_a_rank_that_never_parks_is_named_with_its_own_reason(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participation_module, "NOT_READY_EVERY_S", 0.01)
    stand = await make_stand(deadlines(park_ns=S // 2))
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        stand.ranks[0].park()
        late = stand.ranks[1].participation
        late.expect(KEY[1], FENCE, lambda: "executing entry 9, the flip is entry 12")
        reason = (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
        late.stop_waiting()
        assert reason == "not parked in time: rank 1 (executing entry 9, the flip is entry 12)"
        assert (await stand.flips())[0].ranks[1].not_ready == "executing entry 9, the flip is entry 12"


async def test_a_rank_lost_before_enter_abandons(tmp_path: Path, log: Log) -> None:
    stand = Stand(tmp_path, log, deadlines())
    async with stand.rank(0), stand.mover() as mover:
        async with stand.rank(1):
            asked = stand.ask()
            with anyio.fail_after(WAIT_S):
                while mover.links.num_connected < 2:
                    await anyio.lowlevel.checkpoint()
            stand.ranks[0].park()
            await asked.until(pb.FLIP_STATE_ARMED)
        assert "rank 1 lost" in (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
    await stand.peers.close()


async def test_work_that_fails_and_is_undone_restores(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        await stand.ranks[0].work()
        await stand.ranks[1].started.get()
        stand.ranks[1].participation.on_answer(WorkLost(KEY[1], "checksum", restored=True), FENCE)
        assert (await asked.until(pb.FLIP_STATE_RESTORED)).reason == "rank 1 failed: checksum"


@pytest.mark.parametrize("has_worked", [False, True])
async def test_a_mover_that_dies_after_enter_commits_in_its_next_life(make_stand: MakeStand, has_worked: bool) -> None:
    """What ranks have verified they say again, and those that missed ENTER are told again."""
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        if has_worked:
            await stand.ranks[0].work()
    async with stand.mover() as mover:
        with pytest.raises(grpc.aio.AioRpcError):
            await asked.until(pb.FLIP_STATE_COMMITTED)
        again = stand.ask()
        await again.until(pb.FLIP_STATE_ENTERED)
        for rank in stand.ranks[has_worked:]:
            await rank.work()
        await again.until(pb.FLIP_STATE_COMMITTED)
        third = await stand.ask().until(pb.FLIP_STATE_COMMITTED)
        assert third.flip_id == 7
        assert status_of(mover).num_committed_total == 1, "counted once, however often it is asked for"
        assert all(rank.started.empty() for rank in stand.ranks), "nobody works twice"


async def test_a_mover_that_dies_before_enter_abandons_in_its_next_life(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        stand.ranks[0].park()
    async with stand.mover() as mover:
        stand.ranks[1].park()
        abandoned = await stand.ask().until(pb.FLIP_STATE_ABANDONED)
        assert "asked for again before ENTER" in abandoned.reason
        assert all(rank.started.empty() for rank in stand.ranks)
        assert status_of(mover).num_abandoned_total == 1


async def test_two_attempts_are_not_open_at_once(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        with pytest.raises(grpc.aio.AioRpcError, match="flip 7 is open, asked for flip 8"):
            await stand.ask(OTHER).until(pb.FLIP_STATE_ARMED)


async def test_the_next_flip_may_be_asked_for_at_once(make_stand: MakeStand) -> None:
    """An outcome that is heard is the end of its attempt: nobody is told to ask again."""
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        for number in range(1, 31):
            key: FlipKey = (Generation(9), FlipId(number))
            asked = stand.ask(key)
            for rank in stand.ranks:
                rank.park(key)
            for rank in stand.ranks:
                await rank.work()
            await asked.until(pb.FLIP_STATE_COMMITTED)
            assert status_of(mover).num_committed_total == number
            for rank in stand.ranks:
                rank.switch(key[1])


async def test_a_scheduler_that_leaves_at_any_moment_leaves_the_links_whole(make_stand: MakeStand) -> None:
    """Its call is cancelled wherever the attempt is, also in the middle of a word to a rank."""
    stand = await make_stand(deadlines())
    async with stand.mover():
        for number in range(1, 40):
            key: FlipKey = (Generation(9), FlipId(number))
            asked = stand.ask(key)
            await asked.until(pb.FLIP_STATE_ARMED)
            for rank in stand.ranks:
                rank.park(key)
            for _ in range(number):
                await anyio.lowlevel.checkpoint()
            asked.call.cancel()
            for rank in stand.ranks:
                rank.participation.on_answer(Switched(key[1], is_committed=False), FENCE)
        asked = stand.ask(last := (Generation(9), FlipId(40)))
        for rank in stand.ranks:
            while not rank.started.empty():
                rank.started.get_nowait()
            rank.park(last)
        for rank in stand.ranks:
            await rank.work()
        await asked.until(pb.FLIP_STATE_COMMITTED)


async def test_an_attempt_that_waits_says_so(make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "BEAT_S", 0.02)
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for _ in range(3):
            await asked.until(pb.FLIP_STATE_ARMED)
