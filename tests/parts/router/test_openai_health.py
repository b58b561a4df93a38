"""What /health and /ready say: progress counts, output does not; silence counts whatever was said before."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from flipmesh.common.v1 import introspection_pb2 as pb

from services.core.ids import Epoch, Generation, LayoutKind, Rank
from services.mesh.settings.tables import DeadlineSettings, Settings
from services.mesh.shell import Shell
from services.router.admission import Admission
from services.router.health import SILENT_S, Health, ProcessWatch
from services.router.service import LOOK_S
from services.router.streams.scheduler_client import OpenGroup, SchedulerClient
from tests.support.router_stand import alphabet, eventually, stand
from tests.support.scripted_scheduler import shell_in

STEP_S = 10.0


class Clock:
    """Time as the test tells it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """Real parts; only what would come over the wire is told by hand."""

    def __init__(self, shell: Shell) -> None:
        self.clock, self.admission = Clock(), Admission(9, 9, 9)
        self.client = SchedulerClient(shell.peers.channel("scheduler"), shell.log, max_open=9, budget_s=9.0)
        self.client.group = OpenGroup(Generation(3), Epoch(1), LayoutKind.TP, 512)
        self.watch = ProcessWatch(shell.peers, 2, self.clock)
        self.health = Health(self.client, self.watch, self.admission, step_s=STEP_S)

    def hear_all(self, num_steps: int = 0, num_queued: int = 0, but: tuple[str, Rank | None] | None = None) -> None:
        status = pb.GetStatusResponse()
        status.scheduler.num_steps_total = num_steps
        status.scheduler.num_queued_requests = num_queued
        for place in self.watch.places:
            if place != but:
                self.watch.hear(place, status)

    def after(self, seconds: float) -> None:
        self.clock.now_s += seconds


@pytest_asyncio.fixture
async def at(tmp_path: Path) -> AsyncIterator[Bench]:
    async with shell_in(tmp_path, Settings(source=tmp_path / "mesh.toml")) as shell:
        bench = Bench(shell)
        bench.hear_all()
        yield bench


async def test_well_and_idle_for_long(at: Bench) -> None:
    for _ in range(1000):
        at.after(1.0)
        at.hear_all()
    assert at.health.verdict().is_good


@pytest.mark.parametrize("place", [("scheduler", None), ("worker", Rank(0)), ("worker", Rank(1))])
async def test_a_silent_process_is_named_in_time(at: Bench, place: tuple[str, Rank | None]) -> None:
    """P1.10"""
    for _ in range(4):
        at.after(1.0)
        at.hear_all(but=place)
    assert at.health.verdict().is_good, "one lost question is no death"
    at.after(SILENT_S - 4.0 + 0.1)
    at.hear_all(but=place)
    verdict = at.health.verdict()
    assert len(verdict.reasons) == 1
    assert place[0] in verdict.reasons[0]


async def test_long_prefills_are_life(at: Bench) -> None:
    """P1.11: no token for ten minutes, a step now and then."""
    for step in range(75):
        for _ in range(8):
            at.after(1.0)
            at.hear_all(num_steps=step, num_queued=64)
        assert at.health.verdict().is_good


async def test_work_without_a_step_is_not(at: Bench) -> None:
    at.hear_all(num_steps=5)
    for _ in range(11):
        at.after(1.0)
        at.hear_all(num_steps=5, num_queued=1)
    assert "no step has ended" in at.health.verdict().reasons[0]
    at.hear_all(num_steps=6, num_queued=1)
    assert at.health.verdict().is_good


async def test_no_group_says_what_is_waited_for(at: Bench) -> None:
    at.client.group = None
    assert at.health.verdict().reasons == ("waiting for the scheduler's stream",)


async def test_ready_is_of_one_generation_and_not_of_a_draining_router(at: Bench) -> None:
    assert at.health.readiness().reasons == ("generation 3 has not generated yet",)
    at.health.served_generation = Generation(2)
    assert not at.health.readiness().is_good
    at.health.served_generation = Generation(3)
    assert at.health.readiness().is_good
    at.admission.close("the server drains")
    assert at.health.readiness().reasons == ("the server drains",)
    assert at.health.verdict().is_good


async def test_a_pause_of_the_router_is_no_silence_of_the_scheduler(tmp_path: Path) -> None:
    deadlines = DeadlineSettings(scheduler_silence_s=1.2)
    async with stand(tmp_path, alphabet, deadlines=deadlines) as at:
        at.scheduler.gate_at = 2
        asked = asyncio.ensure_future(at.chat(stream=False))
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
        await eventually(lambda: at.router.watch.silence_s(("scheduler", None)) < 0.5)
        time.sleep(2 * LOOK_S + deadlines.scheduler_silence_s)  # noqa: ASYNC251 (the whole process stands still)
        await eventually(lambda: at.router.watch.silence_s(("scheduler", None)) < 0.5)
        at.scheduler.open_gate()
        assert (await asked).status_code == 200
        assert at.router.client.num_resubmitted == 0


async def test_a_scheduler_that_is_heard_on_its_stream_is_not_silent(tmp_path: Path) -> None:
    """One that goes on after a stop speaks there first."""
    deadlines = DeadlineSettings(scheduler_silence_s=1.6)
    async with stand(tmp_path, alphabet, deadlines=deadlines) as at:
        at.scheduler.is_stopped = True
        until_s = time.monotonic() + deadlines.scheduler_silence_s + 2 * LOOK_S
        while time.monotonic() < until_s:
            assert (await at.chat(stream=False)).status_code == 200
        assert at.router.watch.silence_s(("scheduler", None)) > deadlines.scheduler_silence_s
        at.scheduler.is_stopped = False
        assert at.scheduler.num_streams == 1


async def test_a_stopped_scheduler_holds_clients_no_longer_than_the_budget(tmp_path: Path) -> None:
    """P1.16: its stream never ends by itself."""
    deadlines = DeadlineSettings(scheduler_silence_s=1.6)
    async with stand(tmp_path, alphabet, deadlines=deadlines, resubmit_budget_s=0.0) as at:
        at.scheduler.gate_at = 2
        asked = asyncio.ensure_future(at.chat(stream=False))
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
        at.scheduler.is_stopped = True
        answer = await asked
        assert answer.status_code == 503
        at.scheduler.is_stopped = False
        at.scheduler.open_gate()
        await eventually(lambda: at.router.client.group is not None)
