"""One attempt over time: its queue of events, its clock, its record, and the commands on their way to the ranks.

It decides nothing: `Coordination` does, and has journalled what must be before a command leaves here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import anyio
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.worker.v1 import worker_service_pb2

from services.core.flip.attempts import Command, Opened
from services.core.flip.coordinator import CoordinatorState
from services.core.flip.messages import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    DeadlineReached,
    JournalEnter,
    SendAssemble,
)
from services.mesh.codec.flip import command_to_proto, outcome_to_proto
from services.mesh.debug.breakpoints import HoldPoint, Holds
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

_BEFORE: Mapping[type, HoldPoint] = {
    SendAssemble: HoldPoint.MOVER_ASSEMBLING,
    JournalEnter: HoldPoint.MOVER_ENTERING,
    Conclude: HoldPoint.MOVER_CONCLUDING,
}
_AFTER: Mapping[type, HoldPoint] = {JournalEnter: HoldPoint.MOVER_ENTERED, Conclude: HoldPoint.MOVER_CONCLUDED}
"""What is passed before an event is taken that leads to such an effect, and after, before ranks are told."""


class Attempt:
    """From the scheduler's request to the outcome."""

    def __init__(
        self, request: pb.RunFlipRequest, record: pb.FlipRecord, opened: Opened, send: Send, holds: Holds | None = None
    ) -> None:
        self._request = request
        self._holds = holds
        self._record = record
        self._opened = opened.attempt
        self._first = opened.commands
        self._send_to_ranks = send
        self._events: asyncio.Queue[CoordinatorEvent] = asyncio.Queue(MAX_EVENTS)
        for event in opened.early:
            self._events.put_nowait(event)

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is journalled."""
        return self._opened.outcome is not None

    async def hear(self, event: CoordinatorEvent) -> None:
        """An event from a rank; handled in order of arrival."""
        await self._events.put(event)

    async def run(self) -> AsyncIterator[pb.RunFlipResponse]:
        """Yields progress, then the outcome."""
        yield self._response(_STATES[self._opened.state])
        self._send(self._first)
        if self._holds is not None:
            await self._holds.passing(HoldPoint.MOVER_ARMED)
        while (concluded := self._opened.outcome) is None:
            before, event = self._opened.state, await self._next_event()
            if event is not None:
                await self._take(event)
            if (event is None or self._opened.state is not before) and self._opened.outcome is None:
                yield self._response(_STATES[self._opened.state])
        yield self._response(
            outcome_to_proto(concluded.outcome), concluded.reason, concluded.bytes_moved, concluded.rows_moved
        )

    async def _take(self, event: CoordinatorEvent) -> None:
        foreseen = () if self._holds is None else self._opened.foresee(event, time.monotonic_ns())
        await self._pass(_BEFORE, foreseen)
        commands = self._opened.on_event(event, time.monotonic_ns())
        if (concluded := self._opened.outcome) is not None:
            settle(
                self._record,
                concluded.outcome,
                concluded.reason,
                bytes_moved=concluded.bytes_moved,
                rows_moved=concluded.rows_moved,
            )
        await self._pass(_AFTER, foreseen)
        self._send(commands)

    async def _pass(self, points: Mapping[type, HoldPoint], effects: Sequence[CoordinatorEffect]) -> None:
        for effect in effects:
            if self._holds is not None and (point := points.get(type(effect))) is not None:
                await self._holds.passing(point)

    def _send(self, commands: list[Command]) -> None:
        for command in commands:
            self._send_to_ranks(command_to_proto(command, self._request.fence, self._opened.key[1]))

    async def _next_event(self) -> CoordinatorEvent | None:
        """The next thing that happens; None where nothing did for a beat."""
        deadline_ns = self._opened.deadline_ns
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
            flip_id=self._opened.key[1], state=state, reason=reason, bytes_moved=bytes_moved, rows_moved=rows_moved
        )
