"""Holding a process at a point, and what is done to one there: signals, and how long until they have their effect."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.to_thread
import grpc.aio
from flipmesh.common.v1 import debug_pb2 as pb
from flipmesh.common.v1.debug_pb2_grpc import DebugServiceStub
from flipmesh.sentinel.v1 import sentinel_service_pb2
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import SentinelServiceStub

from services.core.errors import MeshError
from services.mesh.debug.breakpoints import HoldPoint
from services.mesh.rpc import unary
from tests.faults.matrix import Fault, Victim
from tests.mesh.support.flipping import Bench
from tests.mesh.support.running import gone, open_pid
from tools.mesh_client import CALL_S, NotRunningError

HELD_S = 60.0
"""The bound of a hold: no cell needs it."""
REACHED_S = 15.0
LOOK_AGAIN_S = 0.03
PAUSE_S = 1.0
"""Below every deadline that watches a process, in `fault_mesh.DEADLINES`."""
BEYOND_S = 1.5
"""How far a stop goes beyond the deadline that watches the process."""
NAMED_WITHIN_S = 5.0
GONE_S = 40.0


class Held:
    """One hold, set and perhaps reached."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[pb.HoldProcessRequest, pb.HoldProcessResponse]") -> None:
        self._call = call

    async def reached(self) -> None:
        """Until the process stands there."""
        with anyio.fail_after(REACHED_S):
            response = await self._call.read()
        assert isinstance(response, pb.HoldProcessResponse)
        assert response.state == pb.HOLD_STATE_HELD

    def release(self) -> None:
        """It goes on; a stopped process hears it when it is continued."""
        self._call.cancel()


@asynccontextmanager
async def holding(bench: Bench, victim: Victim, point: HoldPoint) -> AsyncIterator[Held]:
    """A hold for the process's next arrival at the point, released at the latest on the way out."""
    stub = DebugServiceStub(bench.client.channel(victim.service, victim.rank))
    call = stub.HoldProcess(pb.HoldProcessRequest(point=point.value, bound_ms=int(HELD_S * 1000)))
    try:
        response = await call.read()
        assert isinstance(response, pb.HoldProcessResponse)
        assert response.state == pb.HOLD_STATE_SET
        yield Held(call)
    finally:
        call.cancel()


async def strike(bench: Bench, victim: Victim, fault: Fault, pid: int, release: Callable[[], None]) -> float | None:
    """Does it to the process, lets who stands at the point go on, and returns when the effect is there.

    Returns the seconds until the sentinel named a stopped rank, where one stayed stopped.
    """
    pidfd = open_pid(pid)
    os.kill(pid, signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
    named_s = None
    try:
        release()
        match fault, victim.service:
            case Fault.KILL, _:
                pass
            case Fault.PAUSE, _:
                await anyio.sleep(PAUSE_S)
            case _, "worker":
                named_s = await until_named(bench, victim)
                assert await anyio.to_thread.run_sync(gone, os.dup(pidfd), GONE_S), f"{victim.name} is still stopped"
            case _, _:
                deadlines = bench.client.settings.deadlines
                # A router that was stopped must not take its own silence for the scheduler's.
                watched_s = deadlines.mover_silence_s if victim.service == "mover" else deadlines.scheduler_silence_s
                await anyio.sleep(watched_s + BEYOND_S)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)
    if fault is Fault.KILL or (victim.service == "worker" and fault is Fault.STOP):
        await until_reborn(bench, victim, pid)
    return named_s


async def until_named(bench: Bench, victim: Victim) -> float:
    """Until the sentinel says that this rank is stopped; seconds."""
    began_s = time.monotonic()
    named = (sentinel_service_pb2.VERDICT_KIND_STOPPED, victim.rank)
    with anyio.fail_after(NAMED_WITHIN_S):
        while named not in await verdicts(bench):
            pass
    return time.monotonic() - began_s


async def until_nothing_is_named(bench: Bench) -> None:
    """Until the sentinel finds nothing wrong with any rank; it may have to start first."""
    with anyio.fail_after(GONE_S):
        while True:
            with suppress(MeshError, NotRunningError):
                if not await verdicts(bench):
                    return
            await anyio.sleep(LOOK_AGAIN_S)


async def verdicts(bench: Bench) -> list[tuple[int, int]]:
    """What the sentinel says now: kinds and ranks."""
    stub = SentinelServiceStub(bench.client.channel("sentinel"))
    answer = await unary(stub.ListVerdicts, sentinel_service_pb2.ListVerdictsRequest(), timeout_s=CALL_S)
    return [(verdict.kind, verdict.rank) for verdict in answer.verdicts]


async def until_reborn(bench: Bench, victim: Victim, pid: int) -> None:
    """Until another process of this name answers."""
    with anyio.fail_after(GONE_S):
        while True:
            with suppress(MeshError, NotRunningError):
                if await bench.pid(victim.service, victim.rank) != pid:
                    return
            await anyio.sleep(LOOK_AGAIN_S)
