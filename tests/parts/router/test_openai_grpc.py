"""The gRPC front: the same requests, the same refusals, over the private socket and a public address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from flipmesh.common.v1 import introspection_pb2, layout_pb2, request_pb2
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from flipmesh.router.v1 import inference_service_pb2 as pb
from flipmesh.router.v1.inference_service_pb2_grpc import AdminServiceStub, InferenceServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from services.mesh.rpc import CHANNEL_OPTIONS
from services.router.grpc_requests import parse_generate
from services.router.openai.refusal import RefusalError
from services.router.openai.wanted import Endpoint, RequestBounds
from tests.support.router_stand import ALPHABET, Stand, alphabet, eventually, stand
from tests.support.scripted_scheduler import MODEL, WINDOW

BOUNDS = RequestBounds(vocabulary_size=258, max_context_tokens=WINDOW)


@pytest_asyncio.fixture
async def at(tmp_path: Path) -> AsyncIterator[Stand]:
    async with stand(tmp_path, alphabet, api_key="sesame") as found:
        yield found


@pytest_asyncio.fixture
async def channel(at: Stand) -> AsyncIterator[grpc.aio.Channel]:
    target = f"unix:{at.shell.paths.socket('router')}"
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as found:
        yield found


async def test_generate_text(channel: grpc.aio.Channel) -> None:
    request = pb.GenerateTextRequest(prompt="abc", num_choices=2, stop=["E"], num_logprobs=1, seed=4)
    messages = [message async for message in InferenceServiceStub(channel).GenerateText(request)]
    for index in (0, 1):
        mine = [message for message in messages if message.choice_index == index]
        assert "".join(message.text for message in mine) == "ABCD"
        assert [message.finish_reason for message in mine if message.HasField("finish_reason")] == [
            request_pb2.FINISH_REASON_STOP
        ]
        assert sum(len(message.logprobs) for message in mine) == 5
        assert [token for message in mine for token in message.token_ids] == list(ALPHABET[:5])
    assert [message.HasField("usage") for message in messages].count(True) == 1
    usage = messages[-1].usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens) == (3, 10, 3)


async def test_chat_and_token_ids(channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    chat = pb.GenerateTextRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")]))
    assert "".join([message.text async for message in stub.GenerateText(chat)]) == ALPHABET.decode()
    ids = pb.GenerateTextRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2]), max_output_tokens=2)
    assert "".join([message.text async for message in stub.GenerateText(ids)]) == "AB"


async def test_models(channel: grpc.aio.Channel) -> None:
    listed = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
    assert [(model.id, model.max_context_tokens) for model in listed.models] == [(MODEL, WINDOW)]


async def test_refusals_name_the_field(channel: grpc.aio.Channel) -> None:
    stub = InferenceServiceStub(channel)
    for request, code, words in (
        (pb.GenerateTextRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (pb.GenerateTextRequest(prompt="x", temperature=9), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (pb.GenerateTextRequest(prompt="x" * WINDOW), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateTextRequest(prompt="x", model="other"), grpc.StatusCode.NOT_FOUND, "model"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.GenerateText(request):
                pass
        assert refused.value.code() is code
        assert words in (refused.value.details() or "")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateTextRequest(prompt="x", num_choices=99), "num_choices"),
        (pb.GenerateTextRequest(prompt="x", max_output_tokens=0), "max_output_tokens"),
        (pb.GenerateTextRequest(prompt="x", num_logprobs=21), "num_logprobs"),
        (pb.GenerateTextRequest(chat=pb.ChatMessages()), "chat"),
        (pb.GenerateTextRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="x")])), "chat[0].role"),
        (pb.GenerateTextRequest(prompt_token_ids=pb.TokenIds(ids=[1, 999])), "prompt[0][1]"),
        (pb.GenerateTextRequest(prompt="x", stop_token_ids=[999]), "stop_token_ids"),
    ],
)
def test_fields_have_the_protos_names(request_: pb.GenerateTextRequest, field: str) -> None:
    with pytest.raises(RefusalError) as refused:
        parse_generate(request_, BOUNDS)
    assert refused.value.field == field
    assert refused.value.message.startswith(field)


def test_what_is_absent_has_the_same_defaults() -> None:
    asked = parse_generate(pb.GenerateTextRequest(prompt="x"), BOUNDS)
    assert (asked.endpoint, asked.max_output_tokens, asked.num_choices) == (Endpoint.COMPLETIONS, 16, 1)
    assert (asked.sampling.temperature, asked.sampling.seed, asked.num_logprobs) == (1.0, None, None)
    zero = parse_generate(pb.GenerateTextRequest(prompt="x", temperature=0, seed=0), BOUNDS)
    assert (zero.sampling.temperature, zero.sampling.seed) == (0.0, 0)


async def test_a_cancelled_call_aborts(at: Stand, channel: grpc.aio.Channel) -> None:
    at.scheduler.gate_at = 2
    call = InferenceServiceStub(channel).GenerateText(pb.GenerateTextRequest(prompt="x"))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    call.cancel()
    await at.scheduler.until(lambda: len(at.scheduler.aborted) == 1)
    assert at.router.client.num_open == 0
    await eventually(lambda: at.router.admission.num_open_requests == 0)


async def test_operators_flip_and_drain(at: Stand, channel: grpc.aio.Channel) -> None:
    stub = AdminServiceStub(channel)
    flipped = await stub.Flip(pb.FlipRequest(target=layout_pb2.LAYOUT_KIND_PP))
    assert (flipped.committed, flipped.flip_id, flipped.epoch) == (True, 7, 2)
    assert flipped.layout == layout_pb2.LAYOUT_KIND_PP
    at.scheduler.gate_at = 2
    open_request = asyncio.create_task(at.complete_with("sesame", prompt="x", max_tokens=4))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    drained = await stub.Drain(pb.DrainRequest())
    assert drained.num_open_requests == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in InferenceServiceStub(channel).GenerateText(pb.GenerateTextRequest(prompt="x")):
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await at.http.get("/ready")).status_code == 503
    at.scheduler.open_gate()
    assert (await open_request).json()["choices"][0]["text"] == "ABCD"


@asynccontextmanager
async def public_channel(folder: Path, **router: object) -> AsyncIterator[tuple[Stand, grpc.aio.Channel]]:
    async with stand(folder, alphabet, tcp=True, **router) as at:
        address = at.shell.paths.address("router", "grpc").read_text().strip()
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield at, channel


KEY = (("authorization", "Bearer sesame"),)


async def test_strangers_are_asked_for_the_key_and_are_no_operators(tmp_path: Path) -> None:
    async with public_channel(tmp_path, api_key="sesame") as (_, channel):
        stub = InferenceServiceStub(channel)
        for wrong in ((), (("authorization", "Bearer sesam"),), (("authorization", "sesame"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=wrong)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        listed = await stub.ListModels(pb.ListModelsRequest(), metadata=KEY)
        assert len(listed.models) == 1
        answer = [m async for m in stub.GenerateText(pb.GenerateTextRequest(prompt="x"), metadata=KEY)]
        assert answer
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await AdminServiceStub(channel).Drain(pb.DrainRequest(), metadata=KEY)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_the_key_is_looked_at_before_anything_that_the_caller_sends(tmp_path: Path) -> None:
    async with public_channel(tmp_path, api_key="sesame") as (at, channel):
        # No message at all: the answer cannot have waited for one.
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        waiting = channel.stream_unary(f"/{pb.DESCRIPTOR.package}.InferenceService/ListModels")()
        for call in (reflected, waiting):
            async with asyncio.timeout(10):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await IntrospectionServiceStub(channel).GetStatus(introspection_pb2.GetStatusRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (
            await IntrospectionServiceStub(channel).GetStatus(introspection_pb2.GetStatusRequest(), metadata=KEY)
        ).identity.service
        assert at.router.admission.num_requests_total == 0


async def test_a_public_message_is_no_larger_than_a_body_of_http(tmp_path: Path) -> None:
    async with public_channel(tmp_path, max_request_bytes=4096) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _message in InferenceServiceStub(channel).GenerateText(pb.GenerateTextRequest(prompt="x" * 5000)):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        models = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert len(models.models) == 1
