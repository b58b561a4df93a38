"""One cell of the matrix on a living mesh: streams, a flip held at its point, the fault, and the client's view of it.

Raises `AssertionError` or `TimeoutError` where something is not as documented; what was seen is returned else.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from flipmesh.scheduler.v1 import scheduler_service_pb2
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from services.core.errors import MeshError
from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from services.mesh.debug.breakpoints import HoldPoint
from services.mesh.rpc import unary
from tests.faults.fault_mesh import FaultMesh, Holdings
from tests.faults.matrix import ABANDONED, COMMITTED, LOST, NONE, REFUSED, Cell, Expected, expected
from tests.faults.strike import LOOK_AGAIN_S, holding, strike, until_nothing_is_named
from tests.mesh.support.flipping import Bench
from tools.load.load import Heard, Load
from tools.mesh_client import NotRunningError
from tools.oracle.asks import asks_of
from tools.oracle.compare import first_difference, judge

CELL_S = 100.0
"""A cell that takes longer hangs."""
READY_S = 45.0
FLIP_S = 30.0
STREAMS_S = 60.0
ASKS = tuple(asks_of(4, 40))
GOES_WITHIN_S = 10.0
NUM_FIRST = 8
"""Tokens of all streams that are out when the flip is asked for."""
BROKEN_STREAM = ("UNAVAILABLE", "CANCELLED", "UNKNOWN: Stream removed")
"""How gRPC tells a client that its server's process has gone."""


@dataclass(slots=True)
class Seen:
    """What clients and operators saw of one cell."""

    flip: str = NONE
    reason: str = ""
    streams: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    """The longest time between two tokens, of each stream."""
    named_s: float | None = None
    """Until the sentinel named the stopped rank."""
    took_s: float = 0.0


async def ask_flip(bench: Bench, target: LayoutKind) -> tuple[str, str]:
    """What becomes of a flip, and why; asked of the scheduler itself, so that the router may go meanwhile."""
    request = scheduler_service_pb2.RequestFlipRequest(target=layout_to_proto(target))
    try:
        stub = SchedulerServiceStub(bench.client.channel("scheduler"))
        answer = await unary(stub.RequestFlip, request, timeout_s=FLIP_S)
    except (MeshError, NotRunningError) as error:
        return LOST, str(error)
    match answer.outcome:
        case scheduler_service_pb2.FLIP_OUTCOME_COMMITTED:
            return COMMITTED, answer.reason
        case scheduler_service_pb2.FLIP_OUTCOME_ABANDONED | scheduler_service_pb2.FLIP_OUTCOME_RESTORED:
            return ABANDONED, answer.reason
        case _:
            return LOST if "generation ended" in answer.reason else REFUSED, answer.reason


async def flip_for_sure(bench: Bench, target: LayoutKind) -> None:
    """A flip with nothing wrong must commit; one that is under way (the router proves layouts) is waited for."""
    with anyio.fail_after(FLIP_S):
        while True:
            outcome, reason = await ask_flip(bench, target)
            if outcome == COMMITTED or "already" in reason:
                return
            assert "under way" in reason, f"a flip after the fault: {outcome}: {reason}"
            await anyio.sleep(LOOK_AGAIN_S)


async def calm(bench: Bench) -> None:
    """Ready, nothing open, every block in its place."""
    await asyncio.to_thread(bench.mesh.wait_ready, READY_S)
    await bench.settled()


async def run_cell(cell: Cell, struck: FaultMesh, bench: Bench, control: Sequence[Heard]) -> Seen:
    """Runs one cell.

    Raises:
        AssertionError: something was not as documented.
        TimeoutError: something hung.
    """
    began_s = time.monotonic()
    with anyio.fail_after(CELL_S):
        await calm(bench)
        await flip_for_sure(bench, cell.target.other)
        before = struck.holdings()
        generation = (await bench.scheduler()).generation
        num_resubmitted = (await bench.status("router")).router.num_resubmitted_total
        seen, load, wanted = Seen(), bench.load(ASKS), expected(cell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await load.until(NUM_FIRST)
            await _strike_at_point(cell, struck, bench, seen)
            await until_ended(load)
        await calm(bench)
        _hold_flip(seen, wanted)
        status = await bench.scheduler()
        assert (status.generation > generation) == wanted.is_lost, f"generation {generation}, then {status.generation}"
        if not wanted.breaks_streams:
            num_resubmitted = (await bench.status("router")).router.num_resubmitted_total - num_resubmitted
            assert bool(num_resubmitted) <= wanted.is_resubmitted, f"{num_resubmitted} requests were submitted again"
        hold_streams(seen, wanted, control, load.heard, num_resubmitted)
        await until_nothing_is_named(bench)
        await flip_for_sure(bench, (await bench.layout()).other)
        await bench.settled()
        await without_leaks(struck, before)
    seen.took_s = time.monotonic() - began_s
    return seen


async def _strike_at_point(cell: Cell, struck: FaultMesh, bench: Bench, seen: Seen) -> None:
    pid = await bench.pid(cell.victim.service, cell.victim.rank)
    struck.note(cell.victim, cell.fault)
    if cell.point is None or cell.holder is None:
        seen.named_s = await strike(bench, cell.victim, cell.fault, pid, lambda: None)
        return
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(holding(bench, cell.holder, cell.point))
        flip = asyncio.create_task(ask_flip(bench, cell.target))
        stack.callback(flip.cancel)
        await held.reached()
        if cell.point is HoldPoint.WORKER_PARKED:
            await _until_armed(bench)
        seen.named_s = await strike(bench, cell.victim, cell.fault, pid, held.release)
        seen.flip, seen.reason = await flip


async def _until_armed(bench: Bench) -> None:
    """A rank may park before the mover has been asked: until it has."""
    flip_id = await bench.until_pending()
    generation = (await bench.scheduler()).generation
    with anyio.fail_after(FLIP_S):
        while not any((r.fence.generation, r.flip_id) == (generation, flip_id) for r in await bench.records()):
            pass


async def until_ended(load: Load) -> None:
    """Until every stream has ended, whichever way."""
    with anyio.fail_after(STREAMS_S):
        while not load.has_ended:
            await load.until(load.num_tokens + 1)


def _hold_flip(seen: Seen, wanted: Expected) -> None:
    assert seen.flip in wanted.flips, f"the flip: {seen.flip} ({seen.reason}), {sorted(wanted.flips)} expected"
    if seen.flip == ABANDONED:
        assert wanted.reason in seen.reason, f"abandoned: {seen.reason!r}, {wanted.reason!r} expected in it"


def hold_streams(
    seen: Seen, wanted: Expected, control: Sequence[Heard], heard: Sequence[Heard], num_resubmitted: int
) -> None:
    """Every stream ended, with the control's answer, or with the one error that is documented for this cell."""
    differences = []
    for stream, (one, other) in enumerate(zip(control, heard, strict=True)):
        seen.gaps_s.append(other.longest_gap_ns() * 1e-9)
        if other.error:
            assert wanted.breaks_streams and other.error.startswith(BROKEN_STREAM), f"stream {stream}: {other.error}"
            seen.streams[f"error {other.error.partition(':')[0]}"] += 1
            continue
        if (difference := first_difference(stream, one, other)) is not None:
            differences.append(difference)
    failures, _ = judge(differences, [0] * len(heard))
    assert not failures, failures
    num_answered = len(heard) - seen.streams.total()
    again = 0 if wanted.breaks_streams else min(num_resubmitted, num_answered)
    seen.streams["answered again"] += again
    seen.streams["unchanged"] += num_answered - again


async def without_leaks(struck: FaultMesh, before: Holdings) -> None:
    """What a cell leaves goes within a moment, or is a leak."""
    deadline_s = time.monotonic() + GOES_WITHIN_S
    while leaks := before.leaks(struck.holdings()):
        assert time.monotonic() < deadline_s, leaks
        await anyio.sleep(LOOK_AGAIN_S)
