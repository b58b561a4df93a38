"""The router's one stream to the scheduler, and the open choices behind it.

It reconnects for ever, gives every choice of a lost generation to the next one, and hands each event to its choice. A
slow client never holds it up: what a choice has for its client is coalesced in the choice, and a reader is only woken.
Never decides what runs, never talks to a client.

Invariants: a choice is registered under the id that the scheduler knows now; whoever registers it releases it; at most
`max_open` are registered, which bounds the messages that can wait to be sent.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from services.core.ids import Epoch, Generation, LayoutKind, RequestId
from services.mesh.codec.common import CodecError, layout_from_proto
from services.mesh.codec.scheduler import event_from_proto, submission_to_proto
from services.mesh.logs.log import Log
from services.router.openai.refusal import Kind
from services.router.streams.sessions import Choice, FinishAt, TryAgain

MESSAGES_PER_CHOICE = 4
"""Most messages one choice can have waiting: submit, submit again, finish, abort."""
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
EXPIRE_INTERVAL_S = 0.25
"""How often choices without a generation are looked at: budgets are counted in seconds."""
REFUSED_AGAIN_S = 0.5
"""How long a resubmission that the scheduler would not take waits before the next try."""

Stream = grpc.aio.StreamStreamCall[pb.ServeRequestsRequest, pb.ServeRequestsResponse]


class StreamEndedError(Exception):
    """The stream is over, and with it every request on it; the text says why."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """The generation that serves now."""

    generation: Generation
    epoch: Epoch
    layout: LayoutKind
    max_context_tokens: int


@dataclass(slots=True)
class _Registered:
    choice: Choice
    wake: Callable[[], None]


class SchedulerClient:
    """Submits choices, delivers their events, carries them over lost generations.

    `budget_s` is how long a choice may wait for a generation before its client gets an error.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        log: Log,
        *,
        max_open: int,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = SchedulerServiceStub(channel)
        self._log, self._clock = log, clock
        self._budget_s = budget_s
        self._max_open = max_open
        self._max_messages = max_open * MESSAGES_PER_CHOICE
        self._registered: dict[RequestId, _Registered] = {}
        self._outgoing: deque[pb.ServeRequestsRequest] = deque()
        self._has_outgoing = asyncio.Event()
        self._refused: dict[RequestId, float] = {}
        self._changed = asyncio.Event()
        self._call: Stream | None = None
        self._closed_because: str | None = None
        self._heard_s = float("-inf")
        self.group: OpenGroup | None = None
        self.num_resubmitted = 0
        self.waiting_for = "the scheduler's stream"
        """Why there is no group, for people."""

    @property
    def num_open(self) -> int:
        """Choices registered."""
        return len(self._registered)

    @property
    def silence_s(self) -> float:
        """Seconds since the scheduler last said something on its stream; infinite if it never did."""
        return self._clock() - self._heard_s

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._expire)
            backoff_s = BACKOFF_MIN_S
            while True:
                began_s = self._clock()
                why = await self._serve_once()
                if self._clock() - began_s > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_MIN_S
                self._log.warning("scheduler-stream-ended", why=why, again_in_s=backoff_s)
                self._lose(why)
                await anyio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    async def wait_for_change(self) -> None:
        """Returns when a group has opened or been lost since the call began."""
        await self._changed.wait()

    def open(self, choice: Choice, wake: Callable[[], None]) -> None:
        """Registers a choice and submits it; `wake` is called when `choice.take()` has something, or may have."""
        if self._closed_because is not None:
            choice.fail(Kind.UNAVAILABLE, self._closed_because)
            wake()
        elif len(self._registered) >= self._max_open:
            choice.fail(Kind.OVERLOADED, f"{self._max_open} choices are open already: try again later")
            wake()
        elif self.group is None:
            choice.fail(Kind.UNAVAILABLE, f"the model is not ready: waiting for {self.waiting_for}")
            wake()
        else:
            self._registered[choice.request_id] = _Registered(choice, wake)
            self._send(pb.ServeRequestsRequest(submit=submission_to_proto(choice.submission)))

    def release(self, choice: Choice) -> None:
        """Forgets a choice; one that has not ended is aborted."""
        if self._registered.pop(choice.request_id, None) is None:
            return
        self._refused.pop(choice.request_id, None)
        if self.group is not None:
            self._send(pb.ServeRequestsRequest(abort=pb.AbortRequest(request_id=choice.request_id)))

    def close(self, why: str) -> None:
        """Ends every open choice with an error, and every later one: the drain's time is over."""
        self._closed_because = why
        for registered in list(self._registered.values()):
            registered.choice.fail(Kind.UNAVAILABLE, why)
            registered.wake()

    def drop(self, why: str) -> None:
        """Gives the stream up, since that of a stopped scheduler never ends by itself; choices wait for the next."""
        if self._call is not None:
            self._log.warning("scheduler-given-up", why=why)
            self._call.cancel()

    # The stream.

    async def _serve_once(self) -> str:
        """One stream, from its beginning to its end; returns why it ended."""
        self._outgoing.clear()
        self._has_outgoing.clear()
        why = "the scheduler ended the stream"
        try:
            async with self._stream() as call, anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_all, call)
                await self._read_all(call)
                tasks.cancel_scope.cancel()
        except* (grpc.aio.AioRpcError, StreamEndedError, CodecError) as group:
            why = "; ".join(map(_reason, group.exceptions))
        return why

    async def _read_all(self, call: Stream) -> None:
        while (message := await _step(call, call.read())) is not grpc.aio.EOF:
            assert isinstance(message, pb.ServeRequestsResponse), f"{type(message)} read from the stream"
            self._on_message(message)

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[Stream]:
        self._call = call = self._stub.ServeRequests(wait_for_ready=True)
        try:
            yield call
        finally:
            self._call = None
            call.cancel()

    async def _write_all(self, call: Stream) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                await _step(call, call.write(self._outgoing.popleft()))

    def _send(self, message: pb.ServeRequestsRequest) -> None:
        if len(self._outgoing) >= self._max_messages:
            # The scheduler does not read: the stream ends, and every choice on it waits for the next one.
            self._log.warning("scheduler-does-not-read", messages=len(self._outgoing))
            if self._call is not None:
                self._call.cancel()
        else:
            self._outgoing.append(message)
            self._has_outgoing.set()

    def _on_message(self, message: pb.ServeRequestsResponse) -> None:
        self._heard_s = self._clock()
        match message.WhichOneof("message"):
            case "events":
                for event in message.events.events:
                    self._on_event(event)
            case "opened":
                self._open_group(message.opened)
            case "lost":
                self._log.warning("group-lost", reason=message.lost.reason, open=len(self._registered))
                self._lose(message.lost.reason)
            case None:
                raise CodecError("message: the scheduler's response is empty")

    def _on_event(self, message: pb.RequestEvent) -> None:
        registered = self._registered.get(RequestId(message.request_id))
        if registered is None:
            # Released a moment ago; its abort is on the way.
            return
        choice = registered.choice
        match choice.on_event(event_from_proto(message), self._clock()):
            case FinishAt(num_output_tokens):
                finish = pb.FinishRequest(request_id=choice.request_id, num_output_tokens=num_output_tokens)
                self._send(pb.ServeRequestsRequest(finish=finish))
            case TryAgain():
                self._refused[choice.request_id] = self._clock() + REFUSED_AGAIN_S
            case None:
                pass
        if choice.ending is not None:
            # The scheduler is done with it, or was told so just now: there is nothing left to abort.
            self._registered.pop(choice.request_id, None)
        registered.wake()

    def _open_group(self, opened: pb.GroupOpened) -> None:
        self.group = OpenGroup(
            Generation(opened.fence.generation),
            Epoch(opened.fence.epoch),
            layout_from_proto(opened.layout, "opened.layout"),
            opened.max_context_tokens,
        )
        waiting = [entry.choice for entry in self._registered.values() if entry.choice.waiting_since_s is not None]
        self._refused.clear()
        self._resubmit(waiting)
        self._tell_change()
        self._log.info("group-opened", generation=self.group.generation, resubmitted=len(waiting))

    def _lose(self, reason: str) -> None:
        """The generation is gone: every choice waits for the next one, or ends."""
        self.group = None
        self.waiting_for = f"a new generation of the group ({reason})"
        self._refused.clear()
        self._outgoing.clear()
        before, self._registered = self._registered, {}
        for registered in before.values():
            if registered.choice.on_lost(self._clock()):
                self._registered[registered.choice.request_id] = registered
            registered.wake()
        self._tell_change()

    def _resubmit(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            self.num_resubmitted += 1
            self._send(pb.ServeRequestsRequest(submit=submission_to_proto(choice.submission)))

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # What time does.

    async def _expire(self) -> None:
        while True:
            await anyio.sleep(EXPIRE_INTERVAL_S)
            if self.group is None or self._refused:
                self._on_time(self._clock())

    def _on_time(self, now_s: float) -> None:
        for registered in list(self._registered.values()):
            if registered.choice.overdue(now_s, self._budget_s):
                registered.choice.fail(
                    Kind.UNAVAILABLE,
                    f"the model was lost and did not come back within {self._budget_s:g} s "
                    f"(waiting for {self.waiting_for})",
                )
                self.release(registered.choice)
                registered.wake()
        due = [request_id for request_id, at_s in self._refused.items() if at_s <= now_s]
        for request_id in due:
            del self._refused[request_id]
            self._resubmit([self._registered[request_id].choice])


async def _step(call: Stream, operation: "asyncio.Future[object] | object") -> object:
    """Awaits one read or write; gives a cancellation back in anyio's own form, which grpc drops."""
    try:
        return await operation  # type: ignore[misc]
    except asyncio.CancelledError:
        call.cancel()
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise StreamEndedError("the stream was cancelled") from None
    except asyncio.InvalidStateError as error:
        # It was given up between two words.
        raise StreamEndedError("the stream is closed") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details() or 'no details'}"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(inner) for inner in error.exceptions)
    return str(error)
