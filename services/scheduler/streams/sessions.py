"""The routers' streams, seen from the batch: who asked for what, and what each has yet to be told.

A session belongs to one stream of one router. Its requests carry the session's number inside the scheduler, so that
routers need not agree on ids. What a router is told waits in a bounded outbox, in order; a router that does not read is
cut, which aborts its requests, rather than holding up the others or filling memory. Never decides what runs.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb

from services.core.ids import RequestId
from services.core.request import RequestEvent, Submission
from services.mesh.codec.scheduler import event_to_proto

MAX_OUTBOX_EVENTS = 65_536
"""Events that may wait for one router: half a minute of a thousand streams at the pace of a small model on a CPU."""

MAX_EVENTS_PER_MESSAGE = 1_024
"""Keeps one response far below the largest message, with log-probabilities too."""

SEPARATOR = "/"


@dataclass(eq=False, slots=True)
class Session:
    """One router's stream, from its first message to its end."""

    number: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the outbox has something."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router has closed its side, or the session is cut."""
    cut_reason: str | None = None
    """Why the stream must end; None: it goes on."""
    _outbox: list[pb.RequestEvent | pb.ServeRequestsResponse] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """What every inner id of this session begins with, and no other."""
        return f"{self.number}{SEPARATOR}"

    def inside(self, request_id: str) -> RequestId:
        """The router's id as the scheduler knows it."""
        return RequestId(f"{self.prefix}{request_id}")

    def owned(self, submission: Submission) -> Submission:
        """The submission under its inner id."""
        return replace(submission, request_id=self.inside(submission.request_id))

    def tell(self, message: pb.RequestEvent | pb.ServeRequestsResponse) -> None:
        """Queues an event or a whole response for the router, or cuts it where too much waits already."""
        if len(self._outbox) >= MAX_OUTBOX_EVENTS:
            self.cut(f"the router has not read for {MAX_OUTBOX_EVENTS} events: its stream ends, its requests too")
            return
        self._outbox.append(message)
        self.wake.set()

    def cut(self, reason: str) -> None:
        """Ends the stream with an error; what waits is dropped."""
        self.cut_reason = self.cut_reason or reason
        self._outbox.clear()
        self.ended.set()

    def take(self) -> list[pb.ServeRequestsResponse]:
        """What there is to send, events coalesced, in order."""
        self.wake.clear()
        waiting, self._outbox = self._outbox, []
        responses: list[pb.ServeRequestsResponse] = []
        room = 0
        for message in waiting:
            if isinstance(message, pb.ServeRequestsResponse):
                responses.append(message)
                room = 0
                continue
            if not room:
                responses.append(pb.ServeRequestsResponse(events=pb.RequestEvents()))
                room = MAX_EVENTS_PER_MESSAGE
            responses[-1].events.events.append(message)
            room -= 1
        return responses


class Sessions:
    """All routers' streams."""

    def __init__(self) -> None:
        self._open: dict[int, Session] = {}
        self._num_opened = 0
        self.is_empty = asyncio.Event()
        """Set while no router is connected."""
        self.is_empty.set()

    def open(self) -> Session:
        """A session for a stream that has begun."""
        self._num_opened += 1
        session = self._open[self._num_opened] = Session(self._num_opened)
        self.is_empty.clear()
        return session

    def close(self, session: Session) -> None:
        """Its stream has ended; what is told to it from here on goes nowhere."""
        del self._open[session.number]
        if not self._open:
            self.is_empty.set()

    def deliver(self, events: Iterable[RequestEvent]) -> None:
        """Hands each event to the session whose request it is about, if that is still open."""
        for event in events:
            number, _, request_id = event.request_id.partition(SEPARATOR)
            session = self._open.get(int(number))
            if session is not None:
                message = event_to_proto(event)
                message.request_id = request_id
                session.tell(message)

    def tell_all(self, message: pb.ServeRequestsResponse) -> None:
        """The group opened, or was lost."""
        for session in self._open.values():
            session.tell(message)

    def cut_all(self, reason: str) -> None:
        """The process ends."""
        for session in self._open.values():
            session.cut(reason)
