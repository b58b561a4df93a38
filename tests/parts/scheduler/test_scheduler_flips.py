"""Flips as the scheduler makes them: the real loop and log over real streams, toy ranks, a mover by script.

What is held here: FLIP, then one outcome, in the log of every rank; nothing issued between; a mover or a policy that is
lost costs no request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
import pytest
from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as mover_pb
from flipmesh.mover.v1.mover_service_pb2_grpc import add_MoverServiceServicer_to_server
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceServicer, add_PolicyServiceServicer_to_server

from services.core.flip.messages import FlipOutcome
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, StepPlan
from services.mesh.codec.common import layout_to_proto
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from services.policy.decide import PolicyMode, PolicyRules
from services.policy.server import Policy
from services.scheduler import timeline
from services.scheduler.batch.batcher import Batcher
from services.scheduler.log import STOOD_STILL_NS
from tests.mesh.support.toy_group import WAIT_S, running_group
from tests.support.scripted_mover import (
    ABANDONED,
    BREAKS,
    BROKEN,
    COMMITTED,
    PP,
    PROMPT,
    SOON,
    STANDS,
    TP,
    ScriptedMover,
    asked,
    entries,
    flipping,
    go_on,
    hold,
    kinds,
    metric,
    serving,
)
from tests.support.toy_rank import answer, limits_of


async def test_a_commit_is_an_entry_and_the_log_goes_on_under_the_next_epoch(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, router):
        await hold(group, router)
        flip = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        go_on(group)
        ended = await flip
        assert (ended.outcome, ended.flip_id, ended.reason) == (FlipOutcome.COMMITTED, 1, "")
        await router.ended("held")
        assert router.output("held") == answer(PROMPT, 8)
        assert kinds(group) == [StepPlan, FlipEntry, CommitEntry, StepPlan]
        assert group.workers[0].entries == group.workers[1].entries
        commit = next(entry for entry in entries(group) if isinstance(entry.entry, CommitEntry))
        assert (commit.epoch, commit.entry.layout) == (1, PP)
        assert {entry.epoch for entry in entries(group) if entry.sequence > commit.sequence} == {2}
        [request] = mover.asked
        assert (request.flip_id, request.fence.epoch, request.entry_sequence) == (1, 1, 0), (
            "asked before FLIP is written"
        )
        report = await mover.report()
        assert (report.num_carried_requests, report.num_live_blocks) == (1, 3)
        status = await group.status()
        assert [span.layout for span in status.timeline] == [2, 1] and status.timeline[1].reason == "by hand"


async def test_commit_waits_for_the_last_acknowledgement(tmp_path: Path, log: Log) -> None:
    """Ranks verify to the mover and acknowledge to the scheduler: the first may be heard before the second."""
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, router):
        await hold(group, router)
        flip = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        while mover.script:
            await anyio.lowlevel.checkpoint()
        await router.submit("later", PROMPT[:20], 3)
        assert (await group.status()).pending_flip_id == 1
        assert (group.run.log.layout, group.run.log.fence.epoch, flip.done()) == (TP, 1, False)
        go_on(group)
        assert (await flip).outcome is FlipOutcome.COMMITTED
        await router.ended("held", "later")
        assert kinds(group) == [StepPlan, FlipEntry, CommitEntry, StepPlan]
        assert router.output("later") == answer(PROMPT[:20], 3)


async def test_an_abandonment_is_an_entry_and_counts(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MANY_ABANDONED", 2)
    mover = ScriptedMover(ABANDONED, ABANDONED, COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, router):
        for count in (1, 2):
            result = await group.loop.flip(PP)
            assert (result.outcome, result.flip_id) == (FlipOutcome.ABANDONED, count)
            status = await group.status()
            assert (status.num_abandoned_in_a_row, status.last_abandon_reason) == (count, "rank 1 refuses: a test")
            assert status.epoch == 1
            assert metric(group, "flipmesh_scheduler_flips_abandoned_in_a_row") == count
        await router.submit("a", PROMPT, 5)
        await router.ended("a")
        assert (await group.loop.flip(PP)).outcome is FlipOutcome.COMMITTED
        assert (await group.status()).num_abandoned_in_a_row == 0
        assert metric(group, "flipmesh_scheduler_flips_abandoned_in_a_row") == 0
        assert metric(group, "flipmesh_scheduler_unsound_censuses") == 0
        await router.submit("b", PROMPT, 5)
        await router.ended("b")
        flip_entries = [entry.entry for entry in entries(group) if isinstance(entry.entry, FlipEntry)]
        assert [entry.flip_id for entry in flip_entries] == [1, 2, 3], "never used again"
        assert kinds(group)[:5] == [FlipEntry, AbandonEntry, FlipEntry, AbandonEntry, StepPlan]
    written = StatePaths(tmp_path).log_file("router").read_text()
    assert written.count("flips-do-not-commit") == 1


async def test_a_broken_answer_is_asked_for_again(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(BREAKS, BREAKS, COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, _):
        assert (await group.loop.flip(PP)).outcome is FlipOutcome.COMMITTED
        assert [request.entry_sequence > 0 for request in mover.asked] == [False, True, True]
        assert {request.flip_id for request in mover.asked} == {1}


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_mover_that_says_nothing_is_given_up(tmp_path: Path, log: Log, is_there: bool) -> None:
    mover = ScriptedMover(STANDS)
    async with running_group(tmp_path, log, deadlines=SOON) as group:
        router = await group.joined()
        async with contextlib.AsyncExitStack() as stack:
            if is_there:
                mover_there = serving(group, "mover", add_MoverServiceServicer_to_server, mover, mover_pb.DESCRIPTOR)
                await stack.enter_async_context(mover_there)
            await hold(group, router)
            go_on(group)
            result = await group.loop.flip(PP)
            assert result.outcome is (FlipOutcome.ABANDONED if is_there else None)
            assert "no mover for 0.2 s" in result.reason
            await router.ended("held")
            assert router.output("held") == answer(PROMPT, 8)
            assert kinds(group) == [StepPlan, *([FlipEntry, AbandonEntry, StepPlan] if is_there else [])]
            assert (await group.status()).num_abandoned_in_a_row == 1


async def test_a_pause_of_this_process_is_no_silence_of_the_mover(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover, deadlines=SOON) as (group, _):
        mover.may_answer.clear()
        flip = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        time.sleep(2e-9 * STOOD_STILL_NS + 2 * SOON.mover_silence_s)  # noqa: ASYNC251 (the whole process stands still)
        mover.may_answer.set()
        assert (await flip).outcome is FlipOutcome.COMMITTED


async def test_without_a_mover_ranks_that_may_have_met_end_with_their_generation(tmp_path: Path, log: Log) -> None:
    async with flipping(tmp_path, log, ScriptedMover(STANDS), deadlines=SOON, ranks_meet=True) as (group, router):
        result = await group.loop.flip(PP)
        assert result.outcome is None and "the generation ended" in result.reason
        assert "no mover for 0.2 s" in (await router.until("lost")).lost.reason


async def test_a_broken_flip_ends_the_generation_and_its_asker_hears(tmp_path: Path, log: Log) -> None:
    async with flipping(tmp_path, log, ScriptedMover(BROKEN)) as (group, router):
        result = await group.loop.flip(PP)
        assert result.outcome is None and "the generation ended" in result.reason
        assert "flip 1: rank 1 refuses: a test" in (await router.until("lost")).lost.reason


async def test_a_generation_lost_under_a_flip_tells_who_waits(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(STANDS)
    async with flipping(tmp_path, log, mover) as (group, router):
        flip = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        group.workers[0].end.set()
        assert "the generation ended" in (await flip).reason
        await router.until("lost")
        await group.start_workers()
        assert (await router.until("opened")).opened.fence.epoch == 1
        mover.script = [COMMITTED]
        assert (await group.loop.flip(PP)).outcome is FlipOutcome.COMMITTED


async def test_one_flip_at_a_time(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, _):
        mover.may_answer.clear()
        first = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        second = await group.loop.flip(PP)
        assert (second.outcome, second.flip_id, second.reason) == (None, None, "flip 1 is under way: one at a time")
        mover.may_answer.set()
        assert (await first).outcome is FlipOutcome.COMMITTED
        assert (await group.loop.flip(PP)).reason == "the layout is PP already"


async def test_an_abort_under_a_flip_frees_after_it(tmp_path: Path, log: Log) -> None:
    """Z6"""
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, router):
        await hold(group, router)
        flip = asyncio.create_task(group.loop.flip(PP))
        await asked(mover)
        router.call.cancel()
        batcher = group.run.log.batcher
        with anyio.fail_after(WAIT_S):
            while batcher.open_request_ids:
                await anyio.lowlevel.checkpoint()
        assert batcher.census().num_referenced == 3, "frozen: its blocks are its own until the outcome"
        go_on(group)
        assert (await flip).outcome is FlipOutcome.COMMITTED
        status = await group.status()
        assert (status.num_held_blocks, status.num_unaccounted_blocks, status.num_unsound_censuses) == (0, 0, 0)


async def test_a_flip_of_nobody_reports_no_gap(tmp_path: Path, log: Log) -> None:
    mover = ScriptedMover(COMMITTED)
    async with flipping(tmp_path, log, mover) as (group, _):
        await group.loop.flip(PP)
        report = await mover.report()
        assert (report.num_carried_requests, report.HasField("longest_token_gap_ns")) == (0, False)


async def test_advice_is_followed_and_a_lost_policy_costs_nothing(tmp_path: Path, log: Log) -> None:
    """Its stream breaks while there is something to signal; requests run on, and the next policy is heard."""
    rules = PolicyRules(20, 10, min_dwell_s=0.0, rest_s=1000.0, resting_layout=TP)
    mover = ScriptedMover(*[COMMITTED] * 100)
    async with flipping(tmp_path, log, mover, limits=limits_of(num_blocks=512)) as (group, router):
        for life in range(3):
            mover.was_asked.clear()
            policy = Policy(PolicyMode.AUTO, rules, log)
            file = policy_service_pb2.DESCRIPTOR
            async with serving(group, "policy", add_PolicyServiceServicer_to_server, policy, file):
                await hold(group, router, f"r{life}", life, 100)
                await asked(mover)
            go_on(group)
            await router.ended(f"r{life}")
            assert router.output(f"r{life}") == answer([life, *PROMPT[1:]], 100)
            status = await group.status()
            assert status.timeline[-1].layout == layout_to_proto(PP)
            assert status.timeline[-1].reason.startswith("prefill: ")
            assert (await group.loop.flip(TP)).outcome is FlipOutcome.COMMITTED
        assert (await group.status()).generation == entries(group)[0].generation, "one generation throughout"


class ScriptedPolicy(PolicyServiceServicer):
    """Answers each signal with the other layout, in the name of the epoch it is given."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.num_said = 0

    async def AdviseLayout(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[policy_service_pb2.AdviseLayoutResponse]:
        async for signal in request_iterator:
            fence = layout_pb2.Fence(generation=signal.fence.generation, epoch=self.epoch)
            yield policy_service_pb2.AdviseLayoutResponse(advised=layout_to_proto(PP), reason="a test", fence=fence)
            self.num_said += 1


@pytest.mark.parametrize(("epoch", "is_followed"), [(1, True), (2, False)])
async def test_advice_about_another_epoch_is_not_followed(
    tmp_path: Path, log: Log, epoch: int, is_followed: bool
) -> None:
    """Advice that crossed a flip: it may say to stay, in the layout that was left."""
    mover, policy = ScriptedMover(COMMITTED), ScriptedPolicy(epoch)
    async with (
        flipping(tmp_path, log, mover) as (group, router),
        serving(group, "policy", add_PolicyServiceServicer_to_server, policy, policy_service_pb2.DESCRIPTOR),
    ):
        for number in range(3):
            await router.submit(f"r{number}", [number, *PROMPT], 3)
            await router.ended(f"r{number}")
            with anyio.fail_after(WAIT_S):
                while policy.num_said <= number:
                    await anyio.lowlevel.checkpoint()
        assert [span.reason for span in (await group.status()).timeline][1:] == (["a test"] if is_followed else [])


class MumblingPolicy(PolicyServiceServicer):
    """Its first advice names no layout."""

    async def AdviseLayout(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[policy_service_pb2.AdviseLayoutResponse]:
        async for signal in request_iterator:
            yield policy_service_pb2.AdviseLayoutResponse(reason="mumbled", fence=signal.fence)
            yield policy_service_pb2.AdviseLayoutResponse(
                advised=layout_to_proto(PP), reason="said", fence=signal.fence
            )


async def test_advice_that_cannot_be_read_is_dropped_and_counted(tmp_path: Path, log: Log) -> None:
    """A9: the next one is followed, in the same generation."""
    mover = ScriptedMover(COMMITTED)
    async with (
        flipping(tmp_path, log, mover) as (group, router),
        serving(group, "policy", add_PolicyServiceServicer_to_server, MumblingPolicy(), policy_service_pb2.DESCRIPTOR),
    ):
        await asked(mover)
        await router.submit("a", PROMPT, 3)
        await router.ended("a")
        status = await group.status()
        assert [span.reason for span in status.timeline][1:] == ["said"]
        assert status.generation == entries(group)[0].generation
        assert metric(group, "flipmesh_scheduler_dropped_advice") >= 1
    assert "mumbled" in StatePaths(tmp_path).log_file("router").read_text()


async def test_a_fault_on_the_way_of_a_request_ends_the_generation(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: nobody waits for a log that nobody knows the state of, and the next one serves."""
    async with running_group(tmp_path, log) as group:
        router = await group.joined()
        with monkeypatch.context() as patched:

            def fails(*_: object) -> None:
                raise AssertionError("a block too many")

            patched.setattr(Batcher, "submit", fails)
            await router.submit("a", PROMPT, 3)
            reason = (await router.until("lost")).lost.reason
        assert reason == "a fault of the scheduler: AssertionError: a block too many"
        await group.start_workers()
        await router.until("opened")
        await router.submit("a", PROMPT, 3)
        await router.ended("a")
        assert router.output("a") == answer(PROMPT, 3)
    assert "generation-failed" in StatePaths(tmp_path).log_file("router").read_text()


async def test_a_leak_is_said_and_serving_goes_on(tmp_path: Path, log: Log) -> None:
    async with flipping(tmp_path, log, ScriptedMover(COMMITTED)) as (group, router):
        assert group.run.log.batcher._tables.pool.take() is not None
        await group.loop.flip(PP)
        status = await group.status()
        assert (status.num_unaccounted_blocks, status.num_unsound_censuses) == (1, 1)
        assert metric(group, "flipmesh_scheduler_unsound_censuses") == 1
        await router.submit("a", PROMPT, 5)
        await router.ended("a")
        assert router.output("a") == answer(PROMPT, 5)
