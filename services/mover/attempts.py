"""One attempt over time: its queue of events, its clock, its record, and the commands on their way to the ranks.

It decides nothing: `Coordination` does, and has journalled what must be before a command leaves here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import anyio
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.worker.v1 import worker_service_pb2

from services.core.flip.attempts import Command, Opened
from services.core.flip.coordinator import CoordinatorState
from services.core.flip.messages import CoordinatorEvent, DeadlineReached
from services.mesh.codec.flip import command_to_proto, outcome_to_proto
from services.mover.history import settle

MAX_EVENTS = 1024
"""Events of one attempt that wait to be handled; ranks say a handful each."""
BEAT_S = 2.0
"""An attempt that waits says so this often: its scheduler tells a mover that waits from one that is stopped."""

_STATES = {
    CoordinatorState.ARMED: pb.FLIP_STATE_ARMED,
    CoordinatorState.ASSEMBLING: pb.FLIP_STATE_ASSEMBLING,
    CoordinatorState.ENTERED: pb.FLIP_STATE_ENTERED,
}

Send = Callable[[worker_service_pb2.JoinFlipRequest], None]


class Attempt:
    """From the scheduler's request to the outcome."""

    def __init__(self, request: pb.RunFlipRequest, record: pb.FlipRecord, opened: Opened, send: Send) -> None:
        self._request = request
        self._record = record
        self.opened = opened.attempt
        self._first = opened.commands
        self._send_to_ranks = send
        self._events: asyncio.Queue[CoordinatorEvent] = asyncio.Queue(MAX_EVENTS)
        for event in opened.early:
            self._events.put_nowait(event)

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is journalled."""
        return self.opened.outcome is not None

    async def hear(self, event: CoordinatorEvent) -> None:
        """An event from a rank; handled in order of arrival."""
        await self._events.put(event)

    async def run(self) -> AsyncIterator[pb.RunFlipResponse]:
        """Yields progress, then the outcome."""
        yield self._response(_STATES[self.opened.state])
        await self.begin()
        while (concluded := self.opened.outcome) is None:
            before, event = self.opened.state, await self._next_event()
            if event is not None:
                await self.take(event)
            if (event is None or self.opened.state is not before) and self.opened.outcome is None:
                yield self._response(_STATES[self.opened.state])
        yield self._response(
            outcome_to_proto(concluded.outcome), concluded.reason, concluded.bytes_moved, concluded.rows_moved
        )

    async def begin(self) -> None:
        """Tells the ranks what they are told first."""
        self.tell(self._first)

    async def take(self, event: CoordinatorEvent) -> None:
        """What follows from an event: journalled, then said."""
        self.tell(self.decide(event))

    def decide(self, event: CoordinatorEvent) -> list[Command]:
        """What follows from an event, journalled; the outcome is in the record."""
        commands = self.opened.on_event(event, time.monotonic_ns())
        if (concluded := self.opened.outcome) is not None:
            settle(
                self._record,
                concluded.outcome,
                concluded.reason,
                bytes_moved=concluded.bytes_moved,
                rows_moved=concluded.rows_moved,
            )
        return commands

    def tell(self, commands: list[Command]) -> None:
        """Sends these to the ranks."""
        for command in commands:
            self._send_to_ranks(command_to_proto(command, self._request.fence, self.opened.key[1]))

    async def _next_event(self) -> CoordinatorEvent | None:
        """The next thing that happens; None where nothing did for a beat."""
        deadline_ns = self.opened.deadline_ns
        assert deadline_ns is not None, "a clock runs until the attempt ends"
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9)
        # What came before a pause of this process counts before the clock that ran out in it.
        if not self._events.empty():
            return self._events.get_nowait()
        with anyio.move_on_after(min(left_s, BEAT_S)):
            return await self._events.get()
        return DeadlineReached() if left_s <= BEAT_S else None

    def _response(
        self, state: "pb.FlipState.ValueType", reason: str = "", bytes_moved: int = 0, rows_moved: int = 0
    ) -> pb.RunFlipResponse:
        return pb.RunFlipResponse(
            flip_id=self.opened.key[1], state=state, reason=reason, bytes_moved=bytes_moved, rows_moved=rows_moved
        )
