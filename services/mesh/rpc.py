"""Calls between processes: channels by service name, the one awaiter of unary calls, streams of ready bytes.

Every call has a deadline. Never retries by itself: whether asking again is safe is the caller's to know. Errors that
come out are the closed set of `errors`, each naming the peer's method, what came back and the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import anyio.lowlevel
import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.core.errors import (
    DeadlineExceededError,
    MeshError,
    MessageTooLargeError,
    PeerLostError,
    RequestRefusedError,
)
from services.core.ids import Rank
from services.mesh import limits
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths, process_name

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response")
Answer = TypeVar("Answer", covariant=True)
ResponseMessage = TypeVar("ResponseMessage", bound=Message)

FIRST_WAIT_S = 1.0
"""How long a peer may be absent before the log says what is waited for."""

WAIT_AGAIN_S = 20.0
"""How often a wait for a peer starts a fresh call; the channel itself reconnects far sooner."""

HEALTH_CHECK = "/grpc.health.v1.Health/Check"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *limits.BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", limits.RECONNECT_BACKOFF_MIN_MS),
    ("grpc.min_reconnect_backoff_ms", limits.RECONNECT_BACKOFF_MIN_MS),
    ("grpc.max_reconnect_backoff_ms", limits.RECONNECT_BACKOFF_MAX_MS),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Started(Protocol[Answer]):
    """A unary call under way."""

    def __await__(self) -> Generator[Any, None, Answer]:
        """Waits for the response."""

    def cancel(self) -> bool:
        """Gives the call up."""


class UnaryCall(Protocol[Request, Answer]):
    """What a stub's unary method is: called with a request, it gives an awaitable that can be cancelled."""

    def __call__(
        self, request: Request, *, timeout: float | None = None, wait_for_ready: bool | None = None
    ) -> Started[Answer]:
        """Starts the call."""


async def unary(
    method: UnaryCall[Request, Response], request: Request, *, timeout_s: float, wait_for_ready: bool = False
) -> Response:
    """Awaits one unary call; the only place that does.

    The deadline goes into the call: an anyio timeout around it would leak a bare `CancelledError`, as grpc drops the
    message by which anyio knows its own cancellation. `wait_for_ready`: an absent peer is waited for, not an error.

    Raises `DeadlineExceededError`, `PeerLostError`, `MessageTooLargeError`, `RequestRefusedError`.
    """
    call = method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    try:
        return await call
    except asyncio.CancelledError:
        call.cancel()
        # Raises the cancellation anew, in anyio's own form, if it was an enclosing scope's.
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise
    except grpc.aio.AioRpcError as error:
        raise translate(error, type(request).__name__) from error


def translate(error: grpc.aio.AioRpcError, what: str) -> MeshError:
    """The closed set's error for what grpc reports; `what` names the request, for the message."""
    code, details = error.code(), error.details() or "no details"
    text = f"{what}: {code.name}: {details}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(f"{text}; the peer may be busy or stopped: see its status before asking again")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return PeerLostError(f"{text}; its supervisor starts it again")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message" in details.lower():
        return MessageTooLargeError(f"{text}; the bound is {limits.MAX_MESSAGE_BYTES} bytes: refuse what made it")
    return RequestRefusedError(text)


def stream_of_bytes(
    channel: grpc.aio.Channel, path: str, response_type: type[ResponseMessage]
) -> grpc.aio.StreamStreamMultiCallable[bytes, ResponseMessage]:
    """A bidirectional method that takes messages already serialised, so that one serialisation serves every rank.

    `path` is `/package.Service/Method`. Responses are parsed as `response_type`.
    """
    return channel.stream_stream(path, request_serializer=_as_it_is, response_deserializer=response_type.FromString)


def _as_it_is(message: bytes) -> bytes:
    return message


class Peers:
    """Channels to the other processes of this deployment, one each, made on first use and closed together."""

    def __init__(self, paths: StatePaths, log: Log) -> None:
        self._paths, self._log = paths, log
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, service: str, rank: Rank | None = None) -> grpc.aio.Channel:
        """The channel to a process, whether it is there yet or not; it connects, and reconnects, by itself."""
        name = process_name(service, rank)
        if name not in self._channels:
            target = f"unix:{self._paths.socket(service, rank)}"
            self._channels[name] = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return self._channels[name]

    async def reach(
        self, service: str, rank: Rank | None = None, *, timeout_s: float = float("inf")
    ) -> grpc.aio.Channel:
        """Waits until a process answers, saying once what is waited for, and returns its channel.

        Raises `DeadlineExceededError` if it does not within `timeout_s`.
        """
        channel, name = self.channel(service, rank), process_name(service, rank)
        check: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
        check = channel.unary_unary(
            HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        began_s = time.monotonic()
        wait_s = min(FIRST_WAIT_S, timeout_s)
        said = False
        while True:
            try:
                await unary(check, health_pb2.HealthCheckRequest(), timeout_s=wait_s, wait_for_ready=True)
            except (DeadlineExceededError, PeerLostError):
                left_s = timeout_s - (time.monotonic() - began_s)
                if left_s <= 0:
                    where = self._paths.socket(service, rank)
                    raise DeadlineExceededError(f"{name} at {where}: absent for {timeout_s:g} s; see its log") from None
                if not said:
                    self._log.info("waiting-for-peer", peer=name, socket=self._paths.socket(service, rank))
                    said = True
                wait_s = min(WAIT_AGAIN_S, left_s)
            else:
                if said:
                    self._log.info("peer-reached", peer=name, waited_s=time.monotonic() - began_s)
                return channel

    async def close(self) -> None:
        """Closes every channel; calls in flight on them end with `PeerLostError`."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
