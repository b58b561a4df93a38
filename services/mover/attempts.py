"""One attempt at a time: the coordinator's table with its journal, its clock and its record.

It carries out the table's effects in their order, so that ENTER is in the journal before any rank hears it and an
outcome before the scheduler does. It decides nothing the table does not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.worker.v1 import worker_service_pb2

from services.core.flip import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    DeadlineReached,
    FlipDeadlines,
    FlipOutcome,
    JournalEnter,
    SendAssemble,
    SendDisarm,
    SendEnter,
)
from services.core.flip_coordinator import CoordinatorState, FlipCoordinator
from services.core.ids import FlipId, Generation
from services.mesh.codec.flip import command_to_proto, outcome_to_proto
from services.mover.history import settle
from services.mover.journal import Armed, Concluded, Entered, FlipKey, Journal

MAX_EVENTS = 1024
"""Events of one attempt that wait to be handled; ranks say a handful each."""
BEAT_S = 2.0
"""An attempt that waits says so this often: its scheduler tells a mover that waits from one that is stopped."""

_STATES = {
    CoordinatorState.ARMED: pb.FLIP_STATE_ARMED,
    CoordinatorState.ASSEMBLING: pb.FLIP_STATE_ASSEMBLING,
    CoordinatorState.ENTERED: pb.FLIP_STATE_ENTERED,
}

Send = Callable[[worker_service_pb2.JoinFlipRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Group:
    """What an attempt needs to know of its group."""

    num_ranks: int
    deadlines: FlipDeadlines
    send: Send


class Attempt:
    """From the scheduler's request to the outcome."""

    def __init__(self, request: pb.RunFlipRequest, record: pb.FlipRecord, group: Group, journal: Journal) -> None:
        self.key: FlipKey = (Generation(request.fence.generation), FlipId(request.flip_id))
        self._request = request
        self._record = record
        self._group = group
        self._journal = journal
        self._events: asyncio.Queue[CoordinatorEvent] = asyncio.Queue(MAX_EVENTS)
        self._coordinator = self._begin()

    def _begin(self) -> FlipCoordinator:
        last, now_ns = self._journal.last(self.key), time.monotonic_ns()
        if isinstance(last, Entered):
            return FlipCoordinator.recovered(
                self.key[1], self._group.num_ranks, self._group.deadlines, now_ns, last.round
            )
        self._journal.append(Armed(self.key))
        return FlipCoordinator(self.key[1], self._group.num_ranks, self._group.deadlines, now_ns)

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is journalled."""
        return self._coordinator.outcome is not None

    async def hear(self, event: CoordinatorEvent) -> None:
        """An event from a rank; handled in order of arrival."""
        await self._events.put(event)

    async def run(self) -> AsyncIterator[pb.RunFlipResponse]:
        """Yields progress, then the outcome."""
        yield self._response(_STATES[self._coordinator.state])
        while (concluded := self._coordinator.outcome) is None:
            before, event = self._coordinator.state, await self._next_event()
            if event is not None:
                await self._carry_out(self._coordinator.on_event(event, time.monotonic_ns()))
            if (event is None or self._coordinator.state is not before) and self._coordinator.outcome is None:
                yield self._response(_STATES[self._coordinator.state])
        yield self._response(
            outcome_to_proto(concluded.outcome), concluded.reason, concluded.bytes_moved, concluded.rows_moved
        )

    async def _next_event(self) -> CoordinatorEvent | None:
        """The next thing that happens; None where nothing did for a beat."""
        deadline_ns = self._coordinator.deadline_ns
        assert deadline_ns is not None, "a clock runs until the attempt ends"
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9)
        # What came before a pause of this process counts before the clock that ran out in it.
        if not self._events.empty():
            return self._events.get_nowait()
        with anyio.move_on_after(min(left_s, BEAT_S)):
            return await self._events.get()
        return DeadlineReached() if left_s <= BEAT_S else None

    async def _carry_out(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case JournalEnter(round_number):
                    self._journal.append(Entered(self.key, round_number))
                case SendAssemble() | SendEnter() | SendDisarm():
                    await self._group.send(command_to_proto(effect, self._request.fence, self.key[1]))
                case Conclude():
                    self._journal.append(Concluded(self.key, effect.outcome, effect.reason))
                    settle(
                        self._record,
                        effect.outcome,
                        effect.reason,
                        bytes_moved=effect.bytes_moved,
                        rows_moved=effect.rows_moved,
                    )

    def _response(
        self, state: "pb.FlipState.ValueType", reason: str = "", bytes_moved: int = 0, rows_moved: int = 0
    ) -> pb.RunFlipResponse:
        return pb.RunFlipResponse(
            flip_id=self.key[1], state=state, reason=reason, bytes_moved=bytes_moved, rows_moved=rows_moved
        )


def decide_again(journal: Journal, key: FlipKey) -> Concluded | None:
    """The outcome of an attempt that is asked for again, where it is decided or can be decided now.

    One that was armed and had not entered is abandoned: marks of presence given to an earlier life of the coordinator
    open no gate.
    """
    match journal.last(key):
        case Concluded() as concluded:
            return concluded
        case Armed():
            concluded = Concluded(
                key, FlipOutcome.ABANDONED, "asked for again before ENTER: the mover or its stream was lost"
            )
            journal.append(concluded)
            return concluded
        case _:
            return None
