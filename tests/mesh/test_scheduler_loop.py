"""The scheduler's loop over real gRPC: one log to every rank, generations that end and begin, routers' streams."""

import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import grpc
import pytest
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.core.ids import LayoutKind
from services.core.request import Finished, FinishReason, Rejected, RejectReason
from services.mesh.codec.common import layout_to_proto
from services.mesh.logs.files import PatientOutput
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import DeadlineSettings
from services.scheduler.generation import GenerationLostError
from services.scheduler.log import STOOD_STILL_NS
from services.scheduler.streams import sessions
from tests.mesh.support.toy_group import WAIT_S, ToyGroup, running_group
from tests.support.toy_rank import answer, limits_of

PROMPT = list(range(40))
BOTH = pytest.mark.parametrize("kind", list(LayoutKind))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    StatePaths(tmp_path).create()
    with (tmp_path / "out").open("wb") as output:
        log = Log("test", Level.DEBUG, None, PatientOutput(output.fileno()))
        yield log
        log.close()


async def is_serving(group: ToyGroup) -> bool:
    stub = health_pb2_grpc.HealthStub(group.peers.channel("scheduler"))
    response = await stub.Check(health_pb2.HealthCheckRequest())
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def turns_serving(group: ToyGroup) -> None:
    stub = health_pb2_grpc.HealthStub(group.peers.channel("scheduler"))
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    with anyio.fail_after(WAIT_S):
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
    watch.cancel()


@BOTH
async def test_requests_are_answered_through_ranks_that_get_the_same_bytes(
    tmp_path: Path, log: Log, kind: LayoutKind
) -> None:
    async with running_group(tmp_path, log, kind) as group:
        router = group.router()
        opened = (await router.next()).opened
        assert opened.max_context_tokens == 512 and opened.fence.epoch == 1 and opened.fence.generation > 0
        await turns_serving(group)
        for number in range(20):
            await router.submit(f"r{number}", [number, *PROMPT], 1 + number)
        await router.ended(*(f"r{number}" for number in range(20)))
        for number in range(20):
            assert router.output(f"r{number}") == answer([number, *PROMPT], 1 + number)
            assert isinstance(router.events[f"r{number}"][-1], Finished)
        assert group.workers[0].entries == group.workers[1].entries
        status = await group.status()
        assert status.num_ranks_joined == 2 and status.generation == opened.fence.generation
        assert status.num_steps_total == len(group.workers[0].plans)
        assert status.num_free_blocks + status.num_cached_blocks == status.num_total_blocks == 64
        assert len(group.run.log.ledger.records) == len(group.workers[0].plans)


async def test_what_routers_call_alike_is_kept_apart(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        first, second = await group.joined(), await group.joined()
        await first.submit("same", [1, *PROMPT], 5)
        await second.submit("same", [2, *PROMPT], 5)
        await first.ended("same")
        await second.ended("same")
        assert first.output("same") == answer([1, *PROMPT], 5)
        assert second.output("same") == answer([2, *PROMPT], 5)


async def test_a_router_that_leaves_takes_its_requests_with_it(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        router, other = await group.joined(), await group.joined()
        for worker in group.workers:
            worker.may_answer.clear()
        await router.submit("a", PROMPT, 400)
        with anyio.fail_after(WAIT_S):
            await group.workers[0].has_plan.wait()
        router.call.cancel()
        await other.submit("b", [9, *PROMPT], 3)
        for worker in group.workers:
            worker.may_answer.set()
        await other.ended("b")
        assert group.run.log.batcher.open_request_ids == ()
        assert group.run.log.batcher.tally.num_finished[FinishReason.ABORT] == 1


async def test_aborts_and_stop_strings_travel(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        router = await group.joined()
        await router.submit("gone", PROMPT, 400)
        await router.submit("stopped", [5, *PROMPT], 400)
        await router.call.write(pb.ServeRequestsRequest(abort=pb.AbortRequest(request_id="gone")))
        while len(router.output("stopped")) < 3:
            await router.next()
        finish = pb.FinishRequest(request_id="stopped", num_output_tokens=2)
        await router.call.write(pb.ServeRequestsRequest(finish=finish))
        await router.ended("gone", "stopped")
        gone, stopped = router.events["gone"][-1], router.events["stopped"][-1]
        assert isinstance(gone, Finished) and gone.reason is FinishReason.ABORT
        assert isinstance(stopped, Finished) and stopped.reason is FinishReason.STOP and stopped.num_output_tokens == 2


async def test_a_lost_rank_ends_the_generation_and_the_next_one_serves(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        router = group.router()
        before = (await router.until("opened")).opened.fence.generation
        await turns_serving(group)
        group.workers[0].may_answer.clear()
        await router.submit("a", PROMPT, 5)
        with anyio.fail_after(WAIT_S):
            await group.workers[0].has_plan.wait()
        group.workers[0].fault = "out of paper"
        group.workers[0].end.set()
        lost = (await router.until("lost")).lost
        assert "rank 0" in lost.reason and "out of paper" in lost.reason
        await router.submit("early", PROMPT, 5)
        await router.ended("early")
        early = router.events["early"][-1]
        assert isinstance(early, Rejected) and early.reason is RejectReason.UNAVAILABLE
        assert not await is_serving(group)
        await group.start_workers()
        assert (await router.until("opened")).opened.fence.generation > before
        await router.submit("a", PROMPT, 5)
        await router.ended("a")
        assert router.output("a") == answer(PROMPT, 5)


async def test_ranks_that_disagree_end_the_generation_by_name(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        router = await group.joined()
        group.workers[1].digest_offset = 1
        await router.submit("a", PROMPT, 5)
        reason = (await router.until("lost")).lost.reason
        assert (
            "step 2" in reason
            and "rank 0" in reason
            and "rank 1" in reason
            and "did not execute the same log" in reason
        )


async def test_a_pause_of_this_process_is_no_silence_of_its_ranks(tmp_path: Path, log: Log) -> None:
    deadlines = DeadlineSettings(step_s=0.3)
    async with running_group(tmp_path, log, deadlines=deadlines) as group:
        router = await group.joined()
        group.workers[1].may_answer.clear()
        await router.submit("a", PROMPT, 5)
        await group.workers[1].has_plan.wait()
        time.sleep(deadlines.step_s + 2e-9 * STOOD_STILL_NS)  # noqa: ASYNC251 (the whole process stands still)
        group.workers[1].may_answer.set()
        await router.ended("a")
        assert router.output("a") == answer(PROMPT, 5)


async def test_a_step_that_nobody_answers_ends_the_generation(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log, deadlines=DeadlineSettings(step_s=0.3)) as group:
        router = await group.joined()
        group.workers[1].may_answer.clear()
        await router.submit("a", PROMPT, 5)
        reason = (await router.until("lost")).lost.reason
        assert (
            "step 2 is unanswered" in reason and "rank 1 (last acknowledged: none)" in reason and "rank 0" not in reason
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_digest": "other"}, r"different models \(rank 0: toy, rank 1: other\)"),
        ({"num_blocks": 63}, "rank 1 holds 63 blocks, the allocator issues 64"),
        ({"claimed_rank": 7}, "rank 1's socket is served by rank 7"),
    ],
)
async def test_a_rank_that_does_not_fit_is_refused(
    tmp_path: Path, log: Log, change: dict[str, object], reason: str
) -> None:
    group = ToyGroup(tmp_path, log, LayoutKind.TP, limits_of(), DeadlineSettings())
    await group.start_workers()
    for name, value in change.items():
        setattr(group.workers[1], name, value)
    run = group.generation_run()

    async def never() -> None:
        raise AssertionError("the group must not open")

    with anyio.fail_after(WAIT_S), pytest.raises(GenerationLostError, match=reason):
        await run.run(never)
    await group.close()


async def test_a_rank_that_never_gets_ready_is_named(tmp_path: Path, log: Log) -> None:
    group = ToyGroup(tmp_path, log, LayoutKind.TP, limits_of(), DeadlineSettings(boot_s=0.2))
    await group.start_workers()
    group.workers[1].is_ready = False

    async def never() -> None:
        raise AssertionError("the group must not open")

    with (
        anyio.fail_after(WAIT_S),
        pytest.raises(GenerationLostError, match=r"rank 1 did not answer RESET within 0\.2 s"),
    ):
        await group.generation_run().run(never)
    await group.close()


async def test_a_worker_that_has_had_its_log_is_not_given_another(tmp_path: Path, log: Log) -> None:
    group = ToyGroup(tmp_path, log, LayoutKind.TP, limits_of(), DeadlineSettings())
    await group.start_workers()
    finder, told = group.loop.finder, []
    with anyio.fail_after(WAIT_S):
        await finder.fresh(told.append)
        old = group.workers
        found = anyio.Event()

        async def find_again() -> None:
            await finder.fresh(told.append)
            found.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(find_again)
            for worker in old:
                worker.was_asked = anyio.Event()
                await worker.was_asked.wait()
                worker.was_asked = anyio.Event()
                await worker.was_asked.wait()
            assert not found.is_set(), "asked twice, and still not taken"
            await group.start_workers()
            await found.wait()
    assert told[0] == "worker-0, worker-1" and told.count(told[0]) == 2
    await group.close()


async def test_a_worker_with_another_schedulers_log_is_not_given_another(tmp_path: Path, log: Log) -> None:
    group = ToyGroup(tmp_path, log, LayoutKind.TP, limits_of(), DeadlineSettings())
    await group.start_workers()
    group.workers[1].generation = 5
    with anyio.move_on_after(0.5) as scope:
        await group.loop.finder.fresh(lambda _: None)
    assert scope.cancelled_caught
    await group.close()


async def test_a_router_that_does_not_read_is_cut(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_OUTBOX_EVENTS", 50)
    async with running_group(tmp_path, log, limits=limits_of(num_blocks=512, max_context_tokens=4096)) as group:
        deaf, other = await group.joined(), await group.joined()
        session = group.loop.around.sessions._open[1]
        # As when the connection takes nothing: the writer is stuck in a write, and the outbox fills.
        session.wake = NeverSet()  # type: ignore[assignment]
        await deaf.submit("a", PROMPT, 400)
        with pytest.raises(grpc.aio.AioRpcError) as ending:
            while (await deaf.call.read()) is not grpc.aio.EOF:
                pass
            raise AssertionError(await deaf.call.details())
        assert ending.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has not read" in (ending.value.details() or "")
        await other.submit("b", PROMPT, 5)
        await other.ended("b")
        assert other.output("b") == answer(PROMPT, 5)


async def test_a_flip_to_the_layout_already_there_is_refused_with_the_layout_as_it_is(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        await group.joined()
        stub = SchedulerServiceStub(group.peers.channel("scheduler"))
        kind = layout_to_proto(group.loop.layout)
        response = await stub.RequestFlip(pb.RequestFlipRequest(target=kind))
        assert (response.outcome, response.layout, response.fence.epoch) == (pb.FLIP_OUTCOME_REFUSED, kind, 1)
        assert "already" in response.reason
        with pytest.raises(grpc.aio.AioRpcError, match="target: layout number 0"):
            await stub.RequestFlip(pb.RequestFlipRequest())


async def test_metrics_count_what_was_done(tmp_path: Path, log: Log) -> None:
    async with running_group(tmp_path, log) as group:
        router = await group.joined()
        await router.submit("a", PROMPT, 5)
        await router.ended("a")
        await router.submit("b", PROMPT, 5)
        await router.ended("b")
        samples = {
            family.name + sample.suffix + "".join(label.value for label in sample.labels): sample.value
            for family in group.metrics.families()
            for sample in family.samples
        }
        assert samples["flipmesh_scheduler_emitted_tokens_total"] == 10
        assert samples["flipmesh_scheduler_prompt_tokens_total"] == 80
        assert samples["flipmesh_scheduler_cached_tokens_total"] == 32
        assert samples["flipmesh_scheduler_finished_requests_totallength"] == 2
        assert samples["flipmesh_scheduler_step_seconds_count"] == samples["flipmesh_scheduler_steps_total"] > 0
        assert samples["flipmesh_scheduler_rank_compute_seconds_total1"] > 0
        assert samples["flipmesh_scheduler_blocksfree"] + samples["flipmesh_scheduler_blockscached"] == 64


class NeverSet:
    """An event that nobody hears."""

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass

    async def wait(self) -> None:
        await anyio.sleep_forever()
