"""The HTTP front: OpenAI's endpoints and the operator's, over the same core as gRPC.

Every error has OpenAI's shape. Nothing here decides what runs; nothing blocks the loop: bodies, prompts and templates
are bounded before they are read, and large ones are handled on threads.
"""

import secrets
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from itertools import islice
from typing import TypeVar

import anyio
import anyio.to_thread
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.mesh.bearer import is_bearer
from services.mesh.logs.log import Log
from services.router.health import Health
from services.router.http.body import declared_bytes, parse_body, read_body
from services.router.http.metrics_page import MetricsPage
from services.router.http.stream import Answer, refusal_response
from services.router.openai.refusal import Kind, RefusalError
from services.router.openai.requests import parse_chat, parse_completion
from services.router.openai.text_requests import parse_detokenize, parse_tokenize
from services.router.openai.wanted import InferenceRequest, RequestBounds
from services.router.streams.inference import Inference
from services.router.text.served_model import software_version

MAX_REQUEST_ID_CHARS = 128
MAX_IGNORED_FIELDS = 256
"""Names of unknown fields that are remembered, and so told once."""
TOKENIZE_WINDOWS = 4
"""How many windows long a text may be for /tokenize: it is not to be generated from."""
VALUES_PER_TOKEN = 2
"""How many commas, brackets or colons a token of a prompt may have: one as an id, seldom two in a text."""
PARSE_THREADS = 1
"""Threads for large bodies: parsing holds the interpreter, so more would only add memory."""
_KINDS = {401: Kind.UNAUTHORIZED, 404: Kind.NOT_FOUND, 413: Kind.TOO_LARGE, 415: Kind.UNSUPPORTED_MEDIA}
ParseRequest = Callable[[object, RequestBounds], tuple[InferenceRequest, Collection[str]]]
Parsed = TypeVar("Parsed")
Handler = Callable[[Request], Awaitable[Response]]


class HttpFront:
    """The endpoints. `api_key` None: nobody is asked for one."""

    def __init__(
        self,
        inference: Inference,
        bounds: RequestBounds,
        health: Health,
        metrics: MetricsPage,
        log: Log,
        *,
        max_request_bytes: int,
        api_key: str | None,
    ) -> None:
        self._inference, self._bounds = inference, bounds
        self._health, self._metrics, self._log = health, metrics, log
        self._max_request_bytes, self._api_key = max_request_bytes, api_key
        self._threads = anyio.CapacityLimiter(PARSE_THREADS)
        self._ignored_fields: set[str] = set()
        self._propagator = TraceContextTextMapPropagator()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._guarded(partial(self._generate, parse_chat)), methods=["POST"]),
                Route("/v1/completions", self._guarded(partial(self._generate, parse_completion)), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
                Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
                Route("/health", self._report_health, methods=["GET"]),
                Route("/ready", self._report_ready, methods=["GET"]),
                Route("/metrics", self._report_metrics, methods=["GET"]),
                Route("/version", self._report_version, methods=["GET"]),
            ],
            exception_handlers={
                RefusalError: _on_refusal,
                HTTPException: _on_http_exception,
                Exception: self._on_failure,
            },
        )

    # Generation.

    async def _generate(self, parse: ParseRequest, request: Request) -> Response:
        headers = {"x-request-id": _request_id(request)}
        self._inference.admission.check_room()
        asked, ignored = await self._parsed(request, lambda value: parse(value, self._bounds))
        self._tell_ignored(ignored)
        return Answer(self._inference, asked, headers, self._propagator.extract(request.headers))

    async def _parsed(self, request: Request, parse: Callable[[object], Parsed]) -> Parsed:
        """The body through `parse`; there is room for it before its first byte is read."""
        with self._inference.admission.receiving(declared_bytes(request, self._max_request_bytes)):
            body = await read_body(request, self._max_request_bytes)
            return await parse_body(body, parse, self._threads, VALUES_PER_TOKEN * self._bounds.max_context_tokens)

    def _tell_ignored(self, names: Collection[str]) -> None:
        """Each unknown field once, by name: a client's spelling mistake should not stay unseen."""
        unheard = (name for name in names if name not in self._ignored_fields)
        for name in sorted(islice(unheard, MAX_IGNORED_FIELDS - len(self._ignored_fields))):
            self._ignored_fields.add(name)
            self._log.warning("unknown-field-ignored", field=name[:MAX_REQUEST_ID_CHARS])

    # Models and text.

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        self._inference.check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, object]:
        model, group = self._inference.model, self._inference.client.group
        window = self._bounds.max_context_tokens if group is None else group.max_context_tokens
        card = {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "flipmesh"}
        return {**card, "max_model_len": window}

    async def _tokenize(self, request: Request) -> Response:
        asked = await self._parsed(request, parse_tokenize)
        with self._inference.admission.tokenising(asked.num_chars):
            ids = await asked.encode(self._inference.model, max_tokens=self._max_tokenized)
        return JSONResponse({"tokens": list(ids), "count": len(ids), "max_model_len": self._bounds.max_context_tokens})

    async def _detokenize(self, request: Request) -> Response:
        ids = await self._parsed(request, partial(parse_detokenize, bounds=self._bounds))
        decode = partial(self._inference.model.tokens.decode, ids, with_control=True)
        return JSONResponse({"prompt": await anyio.to_thread.run_sync(decode, limiter=self._threads)})

    @property
    def _max_tokenized(self) -> int:
        """A text may be counted that is longer than the window: finding that out is what the endpoint is for."""
        return TOKENIZE_WINDOWS * self._bounds.max_context_tokens

    # The operator's.

    async def _report_health(self, request: Request) -> Response:
        verdict = self._health.verdict()
        return JSONResponse(verdict.body(), 200 if verdict.is_good else 503)

    async def _report_ready(self, request: Request) -> Response:
        verdict = self._health.readiness()
        return JSONResponse(verdict.body(), 200 if verdict.is_good else 503)

    async def _report_metrics(self, request: Request) -> Response:
        return Response(await self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _report_version(self, request: Request) -> Response:
        return JSONResponse({"version": software_version()})

    # Around all of them.

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            self._check_key(request)
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        if not is_bearer(request.headers.get("authorization", ""), self._api_key):
            raise RefusalError(
                Kind.UNAUTHORIZED, "the API key is missing or wrong: send Authorization: Bearer", code="invalid_api_key"
            )

    async def _on_failure(self, request: Request, error: Exception) -> Response:
        self._log.failure("request-failed", error, path=request.url.path)
        return refusal_response(RefusalError(Kind.FAILED, "the server failed on this request; its log says how"))


def _request_id(request: Request) -> str:
    """The client's own id, to be given back; what the request is called inside is always made here."""
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(12)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError), f"registered for RefusalError, called with {type(error).__name__}"
    return refusal_response(error, {"x-request-id": _request_id(request)})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, called with {type(error).__name__}"
    kind = _KINDS.get(error.status_code, Kind.INVALID)
    refusal = RefusalError(kind, f"{error.detail}: see the list of endpoints in the documentation")
    return JSONResponse(refusal.body(), error.status_code, error.headers)
