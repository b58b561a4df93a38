"""A flip as one rank sees it: a table from (state, event) to what it says and does.

A rank never decides: it parks at the FLIP entry, announces presence, works when told to, and switches only on the log's
COMMIT. It has no clock: a rank that has verified waits for the outcome in the log and never times out alone.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

from services.core.flip.messages import (
    AbandonReached,
    AssembleReceived,
    CommitReached,
    DisarmReceived,
    EnterReceived,
    EntryReached,
    FlipProtocolError,
    MoverConnected,
    ParticipantEffect,
    ParticipantEvent,
    RoomSeen,
    SayFailed,
    SayNotReady,
    SayParked,
    SayPresent,
    SayVerified,
    SayWithdrawn,
    StartWork,
    WorkDone,
    WorkFailed,
)
from services.core.ids import FlipId


class ParticipantState(Enum):
    """Where this rank is."""

    RUNNING = "running"
    """Executes steps; no attempt has reached it."""
    PARKED = "parked"
    PRESENT = "present"
    ENTERED = "entered"
    VERIFIED = "verified"
    FAILED = "failed"


Effects = list[ParticipantEffect]

_CROSSING = AssembleReceived | EnterReceived | DisarmReceived | WorkDone | WorkFailed | RoomSeen
"""What may be on its way when the log ends the attempt: it comes from the mover, or from work begun before."""


class FlipParticipant:
    """One rank through all attempts of its life."""

    __slots__ = ("_entry", "_last_ended", "_result", "round", "state")

    def __init__(self) -> None:
        self.state = ParticipantState.RUNNING
        self.round = 0
        self._entry: EntryReached | None = None
        self._result: WorkDone | WorkFailed | None = None
        self._last_ended: FlipId | None = None

    @property
    def flip_id(self) -> FlipId | None:
        """The attempt this rank is parked for."""
        return self._entry.flip_id if self._entry else None

    def on_event(self, event: ParticipantEvent) -> Effects:
        """What follows from `event`.

        Raises:
            FlipProtocolError: the state has no row for this event, or it names an attempt this rank is not in.
        """
        if isinstance(event, _CROSSING) and self._is_over(event.flip_id):
            return []
        row = self._TABLE.get((self.state, type(event)))
        if row is None:
            raise FlipProtocolError(f"{event} while {self.state.value} (flip {self.flip_id}): no such row")
        return row(self, event)

    def _is_over(self, flip_id: FlipId) -> bool:
        """Whether it belongs to an attempt that has ended here: it crossed the outcome."""
        return self._last_ended is not None and flip_id <= self._last_ended

    # Rows.

    def _park(self, event: EntryReached) -> Effects:
        self.state = ParticipantState.PARKED
        self.round = 0
        self._entry = event
        return [SayParked(event.flip_id)]

    def _asked_early(self, event: AssembleReceived) -> Effects:
        return [SayNotReady(event.flip_id, "still executing the log before the FLIP entry")]

    def _say_present(self, event: AssembleReceived) -> Effects:
        entry = self._own(event.flip_id)
        if event.round < self.round:
            return []
        self.state = ParticipantState.PRESENT
        self.round = event.round
        return [SayPresent(entry.flip_id, event.round, entry.fits, entry.refusal, entry.plan_hash)]

    def _note_room(self, event: RoomSeen) -> Effects:
        """The verdict that the next round hears."""
        self._entry = replace(self._own(event.flip_id), fits=not event.refusal, refusal=event.refusal)
        return []

    def _take_back(self, event: RoomSeen) -> Effects:
        """Stays present: what was said in this round binds this rank if ENTER is on its way."""
        fitted = self._own(event.flip_id).fits
        self._note_room(event)
        return [SayWithdrawn(event.flip_id, self.round, event.refusal)] if fitted and event.refusal else []

    def _begun(self, _event: RoomSeen) -> Effects:
        """The work looks for itself, and asks the others."""
        return []

    def _enter(self, event: EnterReceived) -> Effects:
        entry = self._own(event.flip_id)
        if event.round != self.round:
            raise FlipProtocolError(f"flip {entry.flip_id}: ENTER of round {event.round}, present in {self.round}")
        self.state = ParticipantState.ENTERED
        return [StartWork(entry.flip_id)]

    def _stand_down(self, event: DisarmReceived) -> Effects:
        # A later attempt may be called off while the outcome of this one is still on its way in the log.
        if event.flip_id == self.flip_id:
            self.state = ParticipantState.PARKED
        return []

    def _await_outcome(self, _event: DisarmReceived) -> Effects:
        """What was done stays as it is until the log says what becomes of it."""
        return []

    def _done(self, event: WorkDone) -> Effects:
        self.state = ParticipantState.VERIFIED
        self._result = event
        return self._say_again()

    def _failed(self, event: WorkFailed) -> Effects:
        self.state = ParticipantState.FAILED
        self._result = event
        return self._say_again()

    def _end(self, event: CommitReached | AbandonReached) -> Effects:
        self._own(event.flip_id)
        self.state = ParticipantState.RUNNING
        self._last_ended = event.flip_id
        self._entry = None
        self._result = None
        return []

    def _repeat(self, _event: MoverConnected | EnterReceived) -> Effects:
        return self._say_again()

    # What rows share.

    def _own(self, flip_id: FlipId) -> EntryReached:
        if self._entry is None or self._entry.flip_id != flip_id:
            raise FlipProtocolError(f"flip {flip_id} named, parked for flip {self.flip_id}")
        return self._entry

    def _say_again(self) -> Effects:
        entry = self._entry
        if entry is None:
            return []
        match self.state, self._result:
            case ParticipantState.PARKED, _:
                return [SayParked(entry.flip_id)]
            case ParticipantState.PRESENT, _:
                present = SayPresent(entry.flip_id, self.round, entry.fits, entry.refusal, entry.plan_hash)
                return [SayParked(entry.flip_id), present]
            case _, WorkDone() as done:
                return [SayVerified(entry.flip_id, done.bytes_moved, done.rows_moved)]
            case _, WorkFailed() as failed:
                return [SayFailed(entry.flip_id, failed.reason, failed.restored)]
            case _:
                return []

    # Rows take one kind of event each, which the table guarantees and a type cannot say.
    _TABLE: ClassVar[dict[tuple[ParticipantState, type[Any]], Callable[[Any, Any], Effects]]] = {
        (ParticipantState.RUNNING, EntryReached): _park,
        (ParticipantState.RUNNING, AssembleReceived): _asked_early,
        (ParticipantState.RUNNING, DisarmReceived): _await_outcome,
        (ParticipantState.RUNNING, MoverConnected): _repeat,
        (ParticipantState.PARKED, AssembleReceived): _say_present,
        (ParticipantState.PARKED, DisarmReceived): _stand_down,
        (ParticipantState.PARKED, RoomSeen): _note_room,
        (ParticipantState.PARKED, AbandonReached): _end,
        (ParticipantState.PARKED, MoverConnected): _repeat,
        (ParticipantState.PRESENT, AssembleReceived): _say_present,
        (ParticipantState.PRESENT, EnterReceived): _enter,
        (ParticipantState.PRESENT, DisarmReceived): _stand_down,
        (ParticipantState.PRESENT, RoomSeen): _take_back,
        (ParticipantState.PRESENT, AbandonReached): _end,
        (ParticipantState.PRESENT, MoverConnected): _repeat,
        # Another rank failed and could restore, or the scheduler gave the mover up, before this one was done.
        (ParticipantState.ENTERED, AbandonReached): _end,
        (ParticipantState.ENTERED, RoomSeen): _begun,
        (ParticipantState.ENTERED, WorkDone): _done,
        (ParticipantState.ENTERED, WorkFailed): _failed,
        (ParticipantState.ENTERED, EnterReceived): _repeat,
        (ParticipantState.ENTERED, DisarmReceived): _await_outcome,
        (ParticipantState.ENTERED, MoverConnected): _repeat,
        (ParticipantState.VERIFIED, RoomSeen): _begun,
        (ParticipantState.VERIFIED, CommitReached): _end,
        (ParticipantState.VERIFIED, AbandonReached): _end,
        (ParticipantState.VERIFIED, EnterReceived): _repeat,
        (ParticipantState.VERIFIED, DisarmReceived): _await_outcome,
        (ParticipantState.VERIFIED, MoverConnected): _repeat,
        (ParticipantState.FAILED, RoomSeen): _begun,
        (ParticipantState.FAILED, AbandonReached): _end,
        (ParticipantState.FAILED, EnterReceived): _repeat,
        (ParticipantState.FAILED, DisarmReceived): _await_outcome,
        (ParticipantState.FAILED, MoverConnected): _repeat,
    }
