"""The gRPC front: generation and models for clients, flips and drains for operators, over the same core as HTTP.

Operators are those who can open the private unix socket; whoever comes over the public address, whose server has asked
for the key, is none.
"""

from collections.abc import AsyncIterator, Callable
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from flipmesh.router.v1 import inference_service_pb2 as pb
from flipmesh.router.v1.inference_service_pb2_grpc import AdminServiceServicer, InferenceServiceServicer
from flipmesh.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from services.core.errors import DeadlineExceededError, MeshError
from services.mesh.codec.common import finish_to_proto, logprobs_to_proto
from services.mesh.rpc import unary
from services.router.grpc_requests import parse_generate
from services.router.openai.refusal import Kind, RefusalError
from services.router.openai.wanted import RequestBounds
from services.router.streams.inference import Inference
from services.router.streams.open_request import OpenRequest
from services.router.streams.sessions import Choice, Delta

Request = TypeVar("Request")
Response = TypeVar("Response")
GenerateContext = grpc.aio.ServicerContext[pb.GenerateTextRequest, pb.GenerateTextResponse]

_CODES = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNSUPPORTED_MEDIA: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.FAILED: grpc.StatusCode.INTERNAL,
}


class InferenceServicer(InferenceServiceServicer):
    """Serves clients."""

    def __init__(self, inference: Inference, bounds: RequestBounds) -> None:
        self._inference, self._bounds = inference, bounds

    async def GenerateText(  # noqa: N802 (the proto's name)
        self, request: pb.GenerateTextRequest, context: GenerateContext
    ) -> AsyncIterator[pb.GenerateTextResponse]:
        """One request; a cancelled call aborts it."""
        try:
            asked = parse_generate(request, self._bounds)
            async with self._inference.generate(asked) as generation:
                async for response in _responses(generation):
                    yield response
        except RefusalError as error:
            await _abort(context, error)

    async def ListModels(  # noqa: N802 (the proto's name)
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        """The model served."""
        group = self._inference.client.group
        window = self._bounds.max_context_tokens if group is None else group.max_context_tokens
        return pb.ListModelsResponse(models=[pb.Model(id=self._inference.model.name, max_context_tokens=window)])


class AdminServicer(AdminServiceServicer):
    """Serves operators. `flip_s` bounds a flip by hand, from its arming to its outcome."""

    def __init__(self, scheduler: grpc.aio.Channel, drain: Callable[[str], int], *, flip_s: float) -> None:
        self._scheduler = SchedulerServiceStub(scheduler)
        self._drain, self._flip_s = drain, flip_s

    async def Flip(  # noqa: N802 (the proto's name)
        self, request: pb.FlipRequest, context: grpc.aio.ServicerContext[pb.FlipRequest, pb.FlipResponse]
    ) -> pb.FlipResponse:
        """Asks the scheduler for a flip and answers with what came of it."""
        await _refuse_strangers(context)
        asked = scheduler_pb.RequestFlipRequest(target=request.target)
        try:
            outcome = await unary(self._scheduler.RequestFlip, asked, timeout_s=self._flip_s)
        except DeadlineExceededError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except MeshError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the scheduler did not answer: {error}")
        return pb.FlipResponse(
            committed=outcome.outcome == scheduler_pb.FLIP_OUTCOME_COMMITTED,
            flip_id=outcome.flip_id,
            reason=outcome.reason,
            layout=outcome.layout,
            epoch=outcome.fence.epoch,
        )

    async def Drain(  # noqa: N802 (the proto's name)
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Takes no new request from now on; open ones go on to their end."""
        await _refuse_strangers(context)
        return pb.DrainResponse(num_open_requests=self._drain("the server drains: an operator asked for it"))


async def _responses(generation: OpenRequest) -> AsyncIterator[pb.GenerateTextResponse]:
    num_running = len(generation.choices)
    async for updates in generation.updates():
        for choice, delta in updates:
            num_running -= delta.ending is not None
            response = _response(generation.reply_id, choice, delta)
            if num_running == 0 and delta.ending is not None:
                response.usage.CopyFrom(_usage(generation))
            yield response


def _response(reply_id: str, choice: Choice, delta: Delta) -> pb.GenerateTextResponse:
    response = pb.GenerateTextResponse(
        request_id=reply_id,
        choice_index=choice.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=map(logprobs_to_proto, delta.logprobs),
    )
    if delta.ending is not None:
        response.finish_reason = finish_to_proto(delta.ending.reason)
    return response


def _usage(generation: OpenRequest) -> pb.Usage:
    usage = generation.usage
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def _is_private(context: "grpc.aio.ServicerContext[Request, Response]") -> bool:
    return context.peer().startswith("unix:")


async def _refuse_strangers(context: "grpc.aio.ServicerContext[Request, Response]") -> None:
    if not _is_private(context):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "operators use the router's unix socket, not a public address"
        )


async def _abort(context: "grpc.aio.ServicerContext[Request, Response]", error: RefusalError) -> NoReturn:
    trailers = () if error.retry_after_s is None else (("retry-after", str(error.retry_after_s)),)
    await context.abort(_CODES[error.kind], error.message, trailers)
    raise AssertionError("abort does not return")
