"""Bearer keys: compared without telling by time how much of one was right, and asked for before a call is read. Pure
but for the answer of a refused call.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health

HELP = "the API key is missing or wrong: send authorization: Bearer metadata"


def is_bearer(authorization: str, api_key: str) -> bool:
    """Whether the value of an `authorization` header presents the key."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), api_key.encode())


class KeyCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the key by their head alone: no message of such a call is read. Health needs no key."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method that was asked for, or the refusal; called by the server."""
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        is_open = handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/")
        if is_open or (isinstance(given, str) and is_bearer(given, self._api_key)):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> NoReturn:
    # A method of streams is called before anything is received, which is why this answers for those of one message too.
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, HELP)
    raise AssertionError("abort does not return")
