"""Holds: one arrival at one point, on the loop or off it, until released or its bound is over; off by default."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import grpc.aio
import pytest
from flipmesh.common.v1 import debug_pb2 as pb
from flipmesh.common.v1.debug_pb2_grpc import DebugServiceStub, add_DebugServiceServicer_to_server

from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry
from services.mesh.debug.breakpoints import Hold, HoldPoint, Holds
from services.mesh.debug.server import DebugServer
from services.worker.breakpoints import HeldRank
from services.worker.participation import FlipAnswer, Parked, Worked

WAIT_S = 10.0
AT = HoldPoint.MOVER_ENTERED


@contextlib.asynccontextmanager
async def served(folder: Path, holds: Holds | None) -> AsyncIterator[DebugServiceStub]:
    server = grpc.aio.server()
    add_DebugServiceServicer_to_server(DebugServer("mover", holds), server)
    server.add_insecure_port(f"unix:{folder}/mover.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/mover.sock") as channel:
        yield DebugServiceStub(channel)
    await server.stop(None)


def asked(stub: DebugServiceStub, point: int = AT.value, bound_ms: int = 60_000) -> "grpc.aio.UnaryStreamCall":
    return stub.HoldProcess(pb.HoldProcessRequest(point=point, bound_ms=bound_ms), timeout=WAIT_S)


async def states(call: "grpc.aio.UnaryStreamCall", count: int) -> list[int]:
    return [(await call.read()).state for _ in range(count)]


def test_points_are_the_protos_and_begin_with_their_service() -> None:
    named = {name: number for name, number in pb.HoldPoint.items() if number}
    assert named == {f"HOLD_POINT_{point.name}": point.value for point in HoldPoint}
    assert {point.service for point in HoldPoint} == {"scheduler", "mover", "worker"}


async def test_the_next_arrival_stands_until_the_call_ends(tmp_path: Path) -> None:
    holds = Holds()
    async with served(tmp_path, holds) as stub:
        call = asked(stub)
        assert await states(call, 1) == [pb.HOLD_STATE_SET]
        await holds.passing(HoldPoint.MOVER_ARMED)
        arrival = asyncio.create_task(holds.passing(AT))
        assert await states(call, 1) == [pb.HOLD_STATE_HELD]
        assert not arrival.done()
        await holds.passing(AT)
        call.cancel()
        with anyio.fail_after(WAIT_S):
            await arrival


async def test_a_hold_that_nothing_reached_ends_with_its_call(tmp_path: Path) -> None:
    holds = Holds()
    async with served(tmp_path, holds) as stub:
        first = asked(stub)
        assert await states(first, 1) == [pb.HOLD_STATE_SET]
        second = asked(stub)
        with pytest.raises(grpc.aio.AioRpcError, match="a hold is set at MOVER_ENTERED"):
            await states(second, 1)
        first.cancel()
        with anyio.fail_after(WAIT_S):
            while (again := holds.set(AT, 1.0)) is None:
                await anyio.lowlevel.checkpoint()
        holds.release(again)
        await holds.passing(AT)


@pytest.mark.parametrize("on_loop", [True, False])
async def test_a_bound_ends_a_hold_and_says_so(tmp_path: Path, on_loop: bool) -> None:
    holds = Holds()
    async with served(tmp_path, holds) as stub:
        call = asked(stub, bound_ms=50)
        assert await states(call, 1) == [pb.HOLD_STATE_SET]
        with anyio.fail_after(WAIT_S):
            await (holds.passing(AT) if on_loop else asyncio.to_thread(holds.passing_in_thread, AT))
        assert await states(call, 2) == [pb.HOLD_STATE_HELD, pb.HOLD_STATE_EXPIRED]


@pytest.mark.parametrize(
    ("enabled", "point", "bound_ms", "why"),
    [
        (False, AT.value, 1000, "debug.enabled = false"),
        (True, HoldPoint.WORKER_PARKED.value, 1000, "one of MOVER_ARMED"),
        (True, 0, 1000, "one of MOVER_ARMED"),
        (True, AT.value, 0, "1 to 600000 ms expected"),
        (True, AT.value, 600_001, "1 to 600000 ms expected"),
    ],
)
async def test_what_cannot_be_held_is_refused(
    tmp_path: Path, enabled: bool, point: int, bound_ms: int, why: str
) -> None:
    async with served(tmp_path, Holds() if enabled else None) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=why):
            await states(asked(stub, point, bound_ms), 1)


class Bare:
    """A rank that notes what it was asked, in order."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.notice = self.seen.append

    def execute(self, entry: LogEntry) -> None:
        self.seen.append(type(entry.entry))
        if isinstance(entry.entry, FlipEntry):
            self.notice(Parked(FlipId(1), None, 1, fits=True, refusal="", plan_hash=0))

    def work(self, flip_id: FlipId) -> FlipAnswer:
        self.seen.append("work")
        return Worked(flip_id, 0, 0, 0, 0, 0, 0, 0)


FLIP = FlipEntry(FlipId(1), LayoutKind.PP, ())
COMMIT = CommitEntry(FlipId(1), LayoutKind.PP)


@pytest.mark.parametrize(
    ("point", "entries", "before", "after"),
    [
        (HoldPoint.WORKER_PARKED, [FLIP], [FlipEntry], [FlipEntry, Parked]),
        (HoldPoint.WORKER_ENTERED, ["work"], [], ["work"]),
        (HoldPoint.WORKER_VERIFIED, ["work"], ["work"], ["work"]),
        (HoldPoint.WORKER_OUTCOME, [COMMIT], [], [CommitEntry]),
        (HoldPoint.WORKER_OUTCOME, [AbandonEntry(FlipId(1), "")], [], [AbandonEntry]),
        (HoldPoint.WORKER_SWITCHED, [COMMIT], [CommitEntry], [CommitEntry]),
    ],
)
async def test_a_rank_is_held_before_or_after_what_the_point_says(
    point: HoldPoint, entries: list[object], before: list[object], after: list[object]
) -> None:
    bare, holds = Bare(), Holds()
    rank = HeldRank(bare, holds, lambda kind, seed: "")
    rank.notice = lambda answer: bare.seen.append(type(answer))

    def drive() -> None:
        for place, entry in enumerate(entries, 2):
            if isinstance(entry, str):
                rank.work(FlipId(1))
            else:
                rank.execute(LogEntry(Generation(1), Epoch(1), LogIndex(place), entry))

    hold = holds.set(point, WAIT_S)
    assert isinstance(hold, Hold)
    driven = asyncio.create_task(asyncio.to_thread(drive))
    with anyio.fail_after(WAIT_S):
        await hold.reached.wait()
    assert (bare.seen, driven.done()) == (before, False)
    holds.release(hold)
    with anyio.fail_after(WAIT_S):
        await driven
    assert bare.seen == after
