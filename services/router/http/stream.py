"""Answers to generation requests over HTTP: server-sent events, or one JSON body.

A closed connection cancels the work behind either. Exactly one terminal event for each choice of a stream: its finish
reason, or one error event for all of them; then `[DONE]`.
"""

import json
from collections.abc import Iterable, Mapping

import anyio
from opentelemetry.context import Context
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.router.openai.refusal import RefusalError
from services.router.openai.replies import Collected, Replies
from services.router.openai.wanted import InferenceRequest
from services.router.streams.inference import Inference
from services.router.streams.open_request import OpenRequest

HEADERS_AFTER_S = 0.5
"""How long a stream waits for word of its request before it says 200: a refusal comes sooner and keeps its status."""
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies that buffer would undo the stream.
    "x-accel-buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def refusal_response(error: RefusalError, headers: Mapping[str, str] | None = None) -> Response:
    """The error object with its status."""
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(error.body(), error.kind.http_status, all_headers)


def server_event(body: Mapping[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body).encode("utf-8", "replace") + b"\n\n"


class Answer(Response):
    """The answer to one generation request; nothing is opened before the server runs it, or left open after."""

    def __init__(
        self, inference: Inference, asked: InferenceRequest, headers: Mapping[str, str], context: Context | None
    ) -> None:
        # The base's rendering is not used: status and headers depend on what the work meets.
        self.background = None
        self._inference, self._asked = inference, asked
        self._own_headers, self._context = headers, context
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the work beside a watch of the connection; whichever ends first ends the other."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, receive, tasks.cancel_scope)
            await self._work(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._inference.generate(self._asked, self._context) as generation:
                if self._asked.stream:
                    await self._stream(generation, send)
                else:
                    await self._whole(generation, scope, receive, send)
        except RefusalError as error:
            if self._is_started:
                await _send_last(send, server_event(error.body()) + _DONE)
            else:
                await refusal_response(error, self._own_headers)(scope, receive, send)

    async def _whole(self, generation: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Collected() for _ in generation.choices]
        async for updates in generation.updates():
            for choice, delta in updates:
                choices[choice.index].add(delta)
        body = self._replies(generation).whole(choices, generation.usage)
        await JSONResponse(body, headers=dict(self._own_headers))(scope, receive, send)

    async def _stream(self, generation: OpenRequest, send: Send) -> None:
        with anyio.move_on_after(HEADERS_AFTER_S):
            await generation.news()
        if (failure := generation.failure) is not None:
            raise failure
        await self._start(send)
        replies = self._replies(generation)
        if generation.is_chat:
            await _send_part(send, (replies.role_chunk(choice.index) for choice in generation.choices))
        async for updates in generation.updates():
            await _send_part(send, (body for choice, delta in updates for body in replies.chunks(choice.index, delta)))
        usage = server_event(replies.usage_chunk(generation.usage)) if self._asked.include_usage else b""
        await _send_last(send, usage + _DONE)

    async def _start(self, send: Send) -> None:
        headers = {**self._own_headers, **_STREAM_HEADERS}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        self._is_started = True

    def _replies(self, generation: OpenRequest) -> Replies:
        model, asked = self._inference.model, self._asked
        return Replies(
            asked.endpoint,
            reply_id=generation.reply_id,
            created_s=generation.created_s,
            model=model.name,
            fingerprint=model.fingerprint,
            token_bytes=model.token_bytes,
            wants_logprobs=asked.num_logprobs is not None,
            includes_usage=asked.include_usage,
            echo_lengths=[len(echo) for echo in generation.echoes for _ in range(asked.num_choices)],
        )


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _send_part(send: Send, bodies: Iterable[Mapping[str, object]]) -> None:
    part = b"".join(map(server_event, bodies))
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _send_last(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": False})
