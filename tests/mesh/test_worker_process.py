"""A worker as a process: one log over its socket, and however that ends, the process leaves with the right code."""

import asyncio
import signal
from pathlib import Path

import gguf
import grpc
import pytest
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.ids import BlockId, LayoutKind, RequestId, RequestIndex, TokenId
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, ResetEntry, StepPlan
from services.mesh.limits import EX_CONFIG, EX_GENERATION_ENDED
from tests.mesh.support.worker_process import ANSWER_S, Log, Workers, channels_to, step_log, workers
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

pytestmark = pytest.mark.timeout(180)
PROMPT = [(7 * i * i + 3 * i) % 131 for i in range(40)]
RESET = ResetEntry(LayoutKind.TP, num_blocks=16, max_resident_requests=4, max_context_tokens=256)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return path, write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q4_1)


def prefill() -> StepPlan:
    request = AdmittedRequest(
        request_id=RequestId("one"),
        request_index=RequestIndex(2),
        token_ids=tuple(map(TokenId, PROMPT)),
        num_prompt_tokens=len(PROMPT),
        block_ids=(BlockId(7), BlockId(3), BlockId(9)),
        sampling=SamplingParams(),
        num_logprobs=3,
    )
    return StepPlan(
        admitted=[request],
        row_request_index=[RequestIndex(2)],
        row_start=[0],
        row_num_tokens=[len(PROMPT)],
        sampled_row=[0],
    )


def decode(position: int, tokens_through: int) -> StepPlan:
    return StepPlan(
        row_request_index=[RequestIndex(2)],
        row_start=[position],
        row_num_tokens=[1],
        sampled_row=[0],
        tokens_through=tokens_through,  # type: ignore[arg-type]
    )


async def open_log(log: Log) -> None:
    await log.write(RESET)
    ready = await log.ready()
    assert [message.rank for message in ready] == list(range(len(ready)))
    assert len({message.model_digest for message in ready}) == 1
    assert len({message.incarnation for message in ready}) == len(ready)
    assert all(message.num_blocks == RESET.num_blocks for message in ready)


async def test_a_log_is_executed_and_its_end_is_the_end_of_the_process(
    tiny: tuple[Path, TinyLlama], tmp_path: Path
) -> None:
    path, model = tiny
    with workers(tmp_path, path, 2) as group:
        async with step_log(group) as log:
            await open_log(log)
            await log.write(prefill())
            for offset in range(7):
                await log.write(decode(len(PROMPT) + offset, log.sequence))
            by_rank = [await log.reports(rank, 8) for rank in range(2)]
            assert [report.digest for report in by_rank[0]] == [report.digest for report in by_rank[1]]
            assert not any(report.HasField("tokens") for report in by_rank[0])
            ids = PROMPT + [report.tokens.token_ids[0] for report in by_rank[1]]
            assert model.logits(ids[:-1])[len(PROMPT) - 1 :].argmax(-1).tolist() == ids[len(PROMPT) :]
            logprobs = by_rank[1][0].tokens.logprobs[0]
            assert logprobs.top_token_ids[0] == ids[len(PROMPT)]
            assert logprobs.sampled == pytest.approx(logprobs.top_logprobs[0])
            for stream in log.streams:
                await stream.done_writing()
            assert group.exit_codes() == [EX_GENERATION_ENDED] * 2


async def test_a_stream_that_breaks_ends_the_process(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 1) as group:
        async with step_log(group) as log:
            await open_log(log)
        assert await asyncio.to_thread(group.exit_codes) == [EX_GENERATION_ENDED]


async def test_a_broken_log_is_answered_by_a_fault(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 1) as group:
        async with step_log(group) as log:
            await open_log(log)
            await log.write(prefill(), sequence=9)
            fault = (await log.read(0)).fault
            assert fault.kind == pb.FAULT_KIND_PROTOCOL
            assert (fault.rank, fault.sequence) == (0, 9)
            assert "sequence 2 expected, got 9" in fault.message
        assert await asyncio.to_thread(group.exit_codes) == [EX_GENERATION_ENDED]


async def test_a_killed_peer_is_a_fault_of_the_others(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 2, extra="[deadlines]\nstall_s = 0.5\ncollective_s = 1.0\n") as group:
        async with step_log(group) as log:
            await open_log(log)
            group.processes[0].send_signal(signal.SIGKILL)
            group.processes[0].wait()
            with pytest.raises(grpc.aio.AioRpcError):
                await log.streams[0].read()
            await Log(log.streams[1:], log.sequence).write(prefill())
            fault = (await log.read(1)).fault
            assert fault.kind == pb.FAULT_KIND_COLLECTIVE
            assert "rank 0" in fault.message
            assert await asyncio.to_thread(group.processes[1].wait, 10) == EX_GENERATION_ENDED


async def stopped(group: Workers) -> list[int]:
    for process in group.processes:
        process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(group.exit_codes)


async def test_a_worker_without_a_log_stops_at_once(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 1) as group:
        async with channels_to(group):
            assert await stopped(group) == [0]


async def test_a_worker_has_one_log_and_waits_for_its_end(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 1) as group:
        async with step_log(group) as log, step_log(group) as second:
            await open_log(log)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.streams[0].read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            group.processes[0].send_signal(signal.SIGTERM)
            await log.write(prefill())
            assert len(await log.reports(0, 1)) == 1
            await log.streams[0].done_writing()
            assert await asyncio.to_thread(group.exit_codes) == [0]


async def test_a_layout_that_cannot_be_is_a_configuration_error(tiny: tuple[Path, TinyLlama], tmp_path: Path) -> None:
    with workers(tmp_path, tiny[0], 1, group="pp_layers = [3]") as group:
        assert await asyncio.to_thread(group.processes[0].wait, ANSWER_S) == EX_CONFIG
        assert "pp_layers sums to 3, the model has 4 layers" in group.log(0)
