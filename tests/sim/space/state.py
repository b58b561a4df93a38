"""A small group in flips as a value: its scheduler, its mover and journal, its ranks, and what may still go wrong."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.core.flip.coordinator import CoordinatorState
from services.core.flip.messages import (
    FlipDeadlines,
    FlipOutcome,
)
from services.core.flip.records import Concluded, FlipKey, Record
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex
from services.core.log import FIRST_EPOCH
from tests.sim.space.rank import RankState, checked

Key = tuple[int, ...]

DEADLINES = FlipDeadlines(park_ns=1, presence_ns=1, data_plane_ns=1, max_rounds=2)

ALL_CRASHES = frozenset({"rank", "mover", "scheduler", "unlink", "unask", "absent"})


@dataclass(frozen=True, slots=True)
class Scope:
    """How much may happen."""

    num_ranks: int = 3
    num_flips: int = 2
    num_crashes: int = 1
    crashes: frozenset[str] = frozenset({"rank", "mover", "scheduler"})
    """Also "unlink" and "unask", streams to the mover of a rank and of the scheduler; "absent", a mover too slow for
    the scheduler."""
    num_slips: int = 0
    slips: frozenset[str] = frozenset({"refused", "failed", "broken", "withdraw"})
    """What ranks may do of themselves."""
    num_expiries: int = 0
    """Clocks that expire although nothing is amiss."""
    has_hops: bool = False
    """Whether a rank's loop hears of what its thread did after a while."""


class Scheduler(NamedTuple):
    """The authority; its numbers outlive it."""

    is_up: bool = True
    generation: Generation = Generation(0)
    is_serving: bool = False
    epoch: Epoch = FIRST_EPOCH
    sequence: LogIndex = LogIndex(0)
    kind: LayoutKind = LayoutKind.PP
    last_id: FlipId = FlipId(0)
    is_pending: bool = False
    question: str | FlipOutcome = "idle"
    """Of the pending flip: idle, sent, open, broken, or the answer on its way."""
    is_lost: bool = False
    """A rank is gone, which it does not know yet."""


class Mover(NamedTuple):
    """One attempt at a time, and the journal that outlives it."""

    is_up: bool = True
    key: FlipKey | None = None
    state: CoordinatorState = CoordinatorState.ARMED
    round: int = 0
    journal: tuple[Record, ...] = ()
    """The last record of each attempt."""
    left: tuple[tuple[FlipKey, str], ...] = ()
    """Questions whose scheduler has gone, which it does not know yet: sent or open."""


class Budget(NamedTuple):
    """What may still go wrong, and which flips may still be made."""

    flips: int
    crashes: int
    slips: int
    expiries: int


class GroupState(NamedTuple):
    """Everything."""

    scheduler: Scheduler
    mover: Mover
    budget: Budget
    ranks: tuple[RankState, ...]


@dataclass(slots=True)
class OneJournal:
    """The records of a state, for the rule that reads and writes them."""

    records: list[Record] = field(default_factory=list)

    def last(self, key: FlipKey) -> Record | None:
        """Of one attempt."""
        return next((record for record in self.records if record.key == key), None)

    def append(self, record: Record) -> None:
        """One outcome for each attempt, once and for all."""
        last = self.last(record.key)
        checked(
            "one outcome",
            not isinstance(last, Concluded) or last == record,
            lambda: f"{last} is followed by {record}",
        )
        self.records = sorted([*(r for r in self.records if r.key != record.key), record], key=lambda r: r.key)


def flip_of(said: Any) -> FlipId:
    """The attempt that a rank speaks of."""
    return FlipId(said.flip_id)


def tell(state: GroupState, key: FlipKey, command: Any) -> GroupState:
    """To every rank that is linked."""
    ranks = tuple(
        r._replace(from_mover=(*r.from_mover, (int(key[0]), command))) if r.is_linked and None not in r.to_mover else r
        for r in state.ranks
    )
    return state._replace(ranks=ranks)


def put(ranks: tuple[RankState, ...], place: int, rank: RankState) -> tuple[RankState, ...]:
    """With another rank in that place."""
    return (*ranks[:place], rank, *ranks[place + 1 :])


def with_rank(state: GroupState, place: int, rank: RankState) -> GroupState:
    """With another rank in that place."""
    return state._replace(ranks=put(state.ranks, place, rank))
