"""Processes of a real mesh killed and stopped around a flip: streams go on with the right words, and flips work after.

A state is held by stopping a process, never by waiting for a while: a stopped mover keeps an armed flip armed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.sentinel.v1 import sentinel_service_pb2
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import SentinelServiceStub

from services.core.ids import Rank
from services.mesh.rpc import unary
from tests.mesh.flipping import ASKS, PP, WAIT_S, Bench, bench_of, flip_until_ended, hold_answers, stopped
from tests.mesh.meshes import Mesh, started
from tools.load import Heard
from tools.mesh_client import CALL_S

NAMED_WITHIN_S = 5.0
COLLECTIVE_S = 6.0


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    deadlines = {"stall_s": 2.0, "collective_s": COLLECTIVE_S}
    with started(tmp_path_factory.mktemp("frail"), policy={"mode": "manual"}, deadlines=deadlines) as mesh:
        yield mesh


@pytest.fixture
async def bench(frail: Mesh) -> AsyncIterator[Bench]:
    """Well before and after: ready, and able to flip there and back."""
    frail.wait_ready()
    async with bench_of(frail) as bench:
        yield bench
        await asyncio.to_thread(frail.wait_ready)
        for _ in range(2):
            assert (await bench.flip((await bench.layout()).other)).committed


async def kill(bench: Bench, service: str, rank: Rank | None = None) -> None:
    """SIGKILL, and until the next life of it answers."""
    pid = await bench.pid(service, rank)
    os.kill(pid, signal.SIGKILL)
    await bench.until_reborn(service, pid, rank)


async def test_a_mover_killed_while_ranks_are_parked(bench: Bench, control: list[Heard]) -> None:
    """The next one is asked again, hears what ranks say again, and commits."""
    async with bench.streaming(ASKS, 16) as load:
        pid = await bench.pid("mover")
        with stopped(pid):
            flip = asyncio.create_task(bench.flip(PP))
            flip_id = await bench.until_pending()
            os.kill(pid, signal.SIGKILL)
        answer = await flip
        assert (answer.committed, answer.flip_id) == (True, flip_id)
    hold_answers(control, load.heard)
    assert (await bench.record(flip_id)).state == mover_service_pb2.FLIP_STATE_COMMITTED


async def test_a_mover_killed_after_it_was_armed_abandons(bench: Bench, control: list[Heard]) -> None:
    """H: marks of presence given to an earlier life of the mover open no gate."""
    async with bench.streaming(ASKS, 16) as load:
        with stopped(await bench.pid("worker", Rank(1))):
            flip = asyncio.create_task(bench.flip(PP))
            flip_id = await bench.until_pending()
            with anyio.fail_after(WAIT_S):
                while (await bench.records())[0].flip_id != flip_id:
                    pass
            await kill(bench, "mover")
            answer = await flip
        assert not answer.committed
        assert "asked for again before ENTER" in answer.reason
    hold_answers(control, load.heard)
    status = await bench.scheduler()
    assert (status.num_abandoned_in_a_row, status.last_abandon_reason) == (1, answer.reason)


@pytest.mark.slow
async def test_a_mover_that_stands_still_is_given_up(bench: Bench, control: list[Heard]) -> None:
    async with bench.streaming(ASKS, 16) as load:
        with stopped(await bench.pid("mover")):
            answer = await bench.flip(PP)
            assert not answer.committed
            assert "no mover for 10 s" in answer.reason
            with anyio.fail_after(WAIT_S):
                while not load.has_ended:
                    await load.until(load.num_tokens + 1)
    hold_answers(control, load.heard)


@pytest.mark.parametrize("service", ["policy", "sentinel"])
async def test_an_adviser_killed_while_a_flip_is_pending(bench: Bench, control: list[Heard], service: str) -> None:
    generation = (await bench.scheduler()).generation
    async with bench.streaming(ASKS, 16) as load:
        with stopped(await bench.pid("mover")):
            flip = asyncio.create_task(bench.flip(PP))
            await bench.until_pending()
            await kill(bench, service)
        assert (await flip).committed
        committed = await flip_until_ended(bench, load)
    hold_answers(control, load.heard)
    assert committed
    assert (await bench.scheduler()).generation == generation


SLOW = pytest.mark.slow
VICTIMS = [
    ("worker", Rank(1), "during"),
    ("scheduler", None, "during"),
    *(pytest.param("worker", Rank(rank), when, marks=SLOW) for rank in range(2) for when in ("before", "after")),
    *(pytest.param("scheduler", None, when, marks=SLOW) for when in ("before", "after")),
]


@pytest.mark.parametrize(("service", "rank", "when"), VICTIMS)
async def test_a_killed_generation_is_not_seen_by_clients(
    bench: Bench, control: list[Heard], service: str, rank: Rank | None, when: str
) -> None:
    status = await bench.scheduler()
    async with bench.streaming(ASKS, 16) as load:
        pid = await bench.pid(service, rank)
        mover = await bench.pid("mover")
        if when == "during":
            with stopped(mover):
                flip = asyncio.create_task(bench.flip(PP))
                await bench.until_pending()
                os.kill(pid, signal.SIGKILL)
                await bench.until_reborn(service, pid, rank)
            assert not await committed(flip)
        else:
            if when == "after":
                assert (await bench.flip(PP)).committed
            os.kill(pid, signal.SIGKILL)
            if when == "before":
                assert not await committed(asyncio.create_task(bench.flip(PP)))
    hold_answers(control, load.heard)
    await asyncio.to_thread(bench.mesh.wait_ready)
    assert (await bench.scheduler()).generation > status.generation


async def test_a_stopped_rank_is_named_and_the_mesh_recovers(bench: Bench, control: list[Heard]) -> None:
    """P1.16"""
    async with bench.streaming(ASKS, 16) as load:
        with stopped(await bench.pid("worker", Rank(1))):
            with anyio.fail_after(NAMED_WITHIN_S):
                while not (verdicts := await standing(bench)):
                    pass
            assert [(verdict.kind, verdict.rank) for verdict in verdicts] == [
                (sentinel_service_pb2.VERDICT_KIND_STOPPED, 1)
            ]
            assert "rank 1 is stopped" in verdicts[0].statement
    hold_answers(control, load.heard)
    with anyio.fail_after(WAIT_S):
        while await standing(bench):
            pass


@pytest.mark.slow
async def test_a_rank_that_stays_stopped_costs_a_generation_and_no_stream(bench: Bench, control: list[Heard]) -> None:
    generation = (await bench.scheduler()).generation
    async with bench.streaming(ASKS, 16) as load:
        pid = await bench.pid("worker", Rank(1))
        os.kill(pid, signal.SIGSTOP)
    hold_answers(control, load.heard)
    await asyncio.to_thread(bench.mesh.wait_ready)
    assert (await bench.scheduler()).generation > generation
    assert await bench.pid("worker", Rank(1)) != pid


async def committed(flip: "asyncio.Task[object]") -> bool:
    """Whether it did; the scheduler's death while it is asked is no commit either."""
    try:
        answer = await flip
    except Exception:
        return False
    return bool(getattr(answer, "committed", False))


async def standing(bench: Bench) -> list[sentinel_service_pb2.Verdict]:
    stub = SentinelServiceStub(bench.client.channel("sentinel"))
    answer = await unary(stub.ListVerdicts, sentinel_service_pb2.ListVerdictsRequest(), timeout_s=CALL_S)
    return list(answer.verdicts)
