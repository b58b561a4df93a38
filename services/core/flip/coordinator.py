"""One attempt at a flip, as the mover coordinates it: a table from (state, event) to what follows.

It decides when the gate opens and how the attempt ends, and owns its clocks; it never touches memory, the log or the
network. Invariants: nobody is told to enter before ENTER is journalled; a rank's presence counts for one round; one
clock runs at a time, and the presence clock starts when the last rank has parked; exactly one `Conclude` ends it.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

from services.core.flip.messages import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    DeadlineReached,
    FlipDeadlines,
    FlipOutcome,
    FlipProtocolError,
    JournalEnter,
    RankFailed,
    RankLost,
    RankNotReady,
    RankParked,
    RankPresent,
    RankVerified,
    RankWithdrew,
    SendAssemble,
    SendDisarm,
    SendEnter,
)
from services.core.ids import FlipId, Rank


class CoordinatorState(Enum):
    """Where the attempt is."""

    ARMED = "armed"
    """Ranks execute the log up to the FLIP entry."""
    ASSEMBLING = "assembling"
    """All have parked; the gate is open for one round."""
    ENTERED = "entered"
    """Irreversible for presence: everyone follows through."""
    ENDED = "ended"


Effects = list[CoordinatorEffect]


class FlipCoordinator:
    """One attempt, from the FLIP entry to its outcome.

    Feed it events with the time they arrive at; carry out the effects in order. `deadline_ns` is when the running clock
    expires (None once ended): the owner then feeds `DeadlineReached`.
    """

    __slots__ = (
        "_bytes_moved",
        "_deadlines",
        "_num_ranks",
        "_parked",
        "_present",
        "_reasons",
        "_rows_moved",
        "_verified",
        "deadline_ns",
        "flip_id",
        "outcome",
        "round",
        "state",
    )

    def __init__(self, flip_id: FlipId, num_ranks: int, deadlines: FlipDeadlines, now_ns: int) -> None:
        self.flip_id = flip_id
        self.state = CoordinatorState.ARMED
        self.round = 0
        self.outcome: Conclude | None = None
        self.deadline_ns: int | None = now_ns + deadlines.park_ns
        self._num_ranks = num_ranks
        self._deadlines = deadlines
        self._parked: set[Rank] = set()
        self._present: dict[Rank, int] = {}
        """Plan hash by rank, of this round alone."""
        self._verified: set[Rank] = set()
        self._reasons: dict[Rank, str] = {}
        """Why a rank was last not ready."""
        self._bytes_moved = 0
        self._rows_moved = 0

    @classmethod
    def recovered(
        cls, flip_id: FlipId, num_ranks: int, deadlines: FlipDeadlines, now_ns: int, entered_round: int
    ) -> "FlipCoordinator":
        """An attempt whose journal holds ENTER and no outcome: ranks say again what they have verified."""
        attempt = cls(flip_id, num_ranks, deadlines, now_ns)
        attempt.state = CoordinatorState.ENTERED
        attempt.round = entered_round
        attempt.deadline_ns = now_ns + deadlines.data_plane_ns
        return attempt

    def on_event(self, event: CoordinatorEvent, now_ns: int) -> Effects:
        """What follows from `event` at `now_ns`.

        Raises:
            FlipProtocolError: the state has no row for this event.
        """
        row = self._TABLE.get((self.state, type(event)))
        if row is None:
            raise FlipProtocolError(f"flip {self.flip_id}: {event} while {self.state.value}: no such row")
        return row(self, event, now_ns)

    # Rows. Each says why where that is not its name.

    def _late(self, _event: CoordinatorEvent, _now_ns: int) -> Effects:
        """The attempt is decided, or the message repeats what is known (a stream that reconnected)."""
        return []

    def _count_parked(self, event: RankParked, now_ns: int) -> Effects:
        self._parked.add(event.rank)
        if len(self._parked) < self._num_ranks:
            return []
        self.state = CoordinatorState.ASSEMBLING
        self.deadline_ns = now_ns + self._deadlines.presence_ns
        return self._open_round()

    def _open_round(self) -> Effects:
        self.round += 1
        self._present.clear()
        return [SendAssemble(self.round)]

    def _note_reason(self, event: RankNotReady, _now_ns: int) -> Effects:
        self._reasons[event.rank] = event.reason
        return []

    def _count_present(self, event: RankPresent, now_ns: int) -> Effects:
        if event.round != self.round:
            # A mark of an earlier round authorises nothing; of a later one it cannot exist.
            return []
        if not event.fits:
            return self._abandon(f"rank {event.rank} refuses: {event.refusal}")
        self._present[event.rank] = event.plan_hash
        if len(self._present) < self._num_ranks:
            return []
        if len(set(self._present.values())) > 1:
            return self._abandon(f"plans differ: hash by rank {dict(sorted(self._present.items()))}")
        self.state = CoordinatorState.ENTERED
        self.deadline_ns = now_ns + self._deadlines.data_plane_ns
        return [JournalEnter(self.round), SendEnter(self.round)]

    def _enter_again(self, event: RankPresent, _now_ns: int) -> Effects:
        """An earlier life of the coordinator journalled ENTER and died before this rank heard it."""
        return [SendEnter(self.round)] if event.round == self.round else []

    def _reopen(self, event: RankWithdrew, _now_ns: int) -> Effects:
        if event.round != self.round:
            return []
        self._reasons[event.rank] = event.reason
        if self.round >= self._deadlines.max_rounds:
            return self._abandon(f"rank {event.rank} withdrew in round {self.round}, the last: {event.reason}")
        return self._open_round()

    def _withdrawn_early(self, event: RankWithdrew, _now_ns: int) -> Effects:
        return self._abandon(f"rank {event.rank} withdrew before the gate opened: {event.reason}")

    def _count_verified(self, event: RankVerified, _now_ns: int) -> Effects:
        if event.rank not in self._verified:
            self._verified.add(event.rank)
            self._bytes_moved += event.bytes_moved
            self._rows_moved += event.rows_moved
        if len(self._verified) < self._num_ranks:
            return []
        return self._conclude(FlipOutcome.COMMITTED, "all ranks verified")

    def _failed(self, event: RankFailed, _now_ns: int) -> Effects:
        reason = f"rank {event.rank} failed: {event.reason}"
        if not event.restored:
            return self._conclude(FlipOutcome.BROKEN, reason)
        return [SendDisarm(reason), *self._conclude(FlipOutcome.RESTORED, reason)]

    def _lost_before_enter(self, event: RankLost, _now_ns: int) -> Effects:
        return self._abandon(f"rank {event.rank} lost: {event.reason}")

    def _lost_after_enter(self, event: RankLost, _now_ns: int) -> Effects:
        return self._conclude(FlipOutcome.BROKEN, f"rank {event.rank} lost after ENTER: {event.reason}")

    def _park_expired(self, _event: DeadlineReached, _now_ns: int) -> Effects:
        return self._abandon(f"not parked in time: {self._missing(self._parked)}")

    def _presence_expired(self, _event: DeadlineReached, _now_ns: int) -> Effects:
        return self._abandon(f"not present in time: {self._missing(set(self._present))}")

    def _data_plane_expired(self, _event: DeadlineReached, _now_ns: int) -> Effects:
        return self._conclude(FlipOutcome.BROKEN, f"not verified in time: {self._missing(self._verified)}")

    # What rows share.

    def _missing(self, there: set[Rank]) -> str:
        ranks = [Rank(rank) for rank in range(self._num_ranks) if rank not in there]
        return ", ".join(f"rank {rank} ({self._reasons.get(rank, 'said nothing')})" for rank in ranks)

    def _abandon(self, reason: str) -> Effects:
        return [SendDisarm(reason), *self._conclude(FlipOutcome.ABANDONED, reason)]

    def _conclude(self, outcome: FlipOutcome, reason: str) -> Effects:
        self.state = CoordinatorState.ENDED
        self.deadline_ns = None
        self.outcome = Conclude(outcome, reason, self._bytes_moved, self._rows_moved)
        return [self.outcome]

    # Rows take one kind of event each, which the table guarantees and a type cannot say.
    _TABLE: ClassVar[dict[tuple[CoordinatorState, type[Any]], Callable[[Any, Any, int], Effects]]] = {
        (CoordinatorState.ARMED, RankParked): _count_parked,
        (CoordinatorState.ARMED, RankPresent): _late,
        (CoordinatorState.ARMED, RankNotReady): _note_reason,
        (CoordinatorState.ARMED, RankWithdrew): _withdrawn_early,
        (CoordinatorState.ARMED, RankLost): _lost_before_enter,
        (CoordinatorState.ARMED, DeadlineReached): _park_expired,
        (CoordinatorState.ASSEMBLING, RankParked): _late,
        (CoordinatorState.ASSEMBLING, RankPresent): _count_present,
        (CoordinatorState.ASSEMBLING, RankNotReady): _note_reason,
        (CoordinatorState.ASSEMBLING, RankWithdrew): _reopen,
        (CoordinatorState.ASSEMBLING, RankLost): _lost_before_enter,
        (CoordinatorState.ASSEMBLING, DeadlineReached): _presence_expired,
        (CoordinatorState.ENTERED, RankParked): _late,
        (CoordinatorState.ENTERED, RankPresent): _enter_again,
        (CoordinatorState.ENTERED, RankNotReady): _note_reason,
        # Too late: a commit made on someone's presence binds him.
        (CoordinatorState.ENTERED, RankWithdrew): _late,
        (CoordinatorState.ENTERED, RankVerified): _count_verified,
        (CoordinatorState.ENTERED, RankFailed): _failed,
        (CoordinatorState.ENTERED, RankLost): _lost_after_enter,
        (CoordinatorState.ENTERED, DeadlineReached): _data_plane_expired,
        (CoordinatorState.ENDED, RankParked): _late,
        (CoordinatorState.ENDED, RankPresent): _late,
        (CoordinatorState.ENDED, RankNotReady): _late,
        (CoordinatorState.ENDED, RankWithdrew): _late,
        (CoordinatorState.ENDED, RankVerified): _late,
        (CoordinatorState.ENDED, RankFailed): _late,
        (CoordinatorState.ENDED, RankLost): _late,
        (CoordinatorState.ENDED, DeadlineReached): _late,
    }
