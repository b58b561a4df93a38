"""Requests of the public gRPC face to the same form, by the same rules, as those of HTTP. Pure.

A message is written as the JSON body that asks for the same, so that there is one validation and one set of words; the
fields at fault are then named as the proto names them.
"""

from typing import Literal, get_args

from flipmesh.router.v1 import inference_service_pb2 as pb

from services.router.openai.refusal import Kind, RefusalError
from services.router.openai.requests import parse_chat, parse_completion
from services.router.openai.wanted import InferenceRequest, RequestBounds

_RENAMED = {"n": "num_choices", "max_tokens": "max_output_tokens", "logprobs": "num_logprobs", "messages": "chat"}
_Optional = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
_OPTIONAL: tuple[_Optional, ...] = get_args(_Optional)


def parse_generate(request: pb.GenerateTextRequest, bounds: RequestBounds) -> InferenceRequest:
    """The request, validated.

    Raises:
        RefusalError: naming the first field at fault.
    """
    try:
        match request.WhichOneof("input"):
            case "chat":
                return parse_chat(_chat_body(request), bounds)[0]
            case "prompt":
                return parse_completion(_completion_body(request, request.prompt), bounds)[0]
            case "prompt_token_ids":
                ids = list(request.prompt_token_ids.ids)
                return parse_completion(_completion_body(request, [ids]), bounds)[0]
            case None:
                raise RefusalError(Kind.INVALID, "input is required: prompt, prompt_token_ids or chat", field="input")
    except RefusalError as error:
        raise _renamed(error) from error


def _chat_body(request: pb.GenerateTextRequest) -> dict[str, object]:
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    body = {**_common_body(request), "messages": messages}
    if request.HasField("num_logprobs"):
        body |= {"logprobs": True, "top_logprobs": request.num_logprobs}
    return body


def _completion_body(request: pb.GenerateTextRequest, prompt: object) -> dict[str, object]:
    body = {**_common_body(request), "prompt": prompt}
    if request.HasField("num_logprobs"):
        body["logprobs"] = request.num_logprobs
    return body


def _common_body(request: pb.GenerateTextRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": request.model or None,
        "stream": True,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "n": request.num_choices or 1,
        "priority": request.priority,
        "logit_bias": {str(item.token_id): item.bias for item in request.logit_bias},
    }
    body.update((name, getattr(request, name)) for name in _OPTIONAL if request.HasField(name))
    if request.HasField("max_output_tokens"):
        body["max_tokens"] = request.max_output_tokens
    return body


def _renamed(error: RefusalError) -> RefusalError:
    field = error.field
    name = None if field is None else _RENAMED.get(field.partition("[")[0])
    if field is None or name is None:
        return error
    renamed = field.replace(field.partition("[")[0], name, 1)
    message = error.message.replace(field, renamed, 1)
    return RefusalError(error.kind, message, field=renamed, code=error.code, retry_after_s=error.retry_after_s)
