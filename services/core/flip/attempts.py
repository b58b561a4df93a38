"""Which attempt is open, what its events lead to, and what is remembered. Pure but for the journal it is given.

The coordinator's table decides; here its effects are carried out as far as they concern memory: ENTER is in the journal
before the command to enter is returned, an outcome before anybody can be told. What ranks say of an attempt that is not
open is kept for the case that it is asked for. Never sends, waits, or reads a clock: the shell and the simulator run
the same code.
"""

import copy
from dataclasses import dataclass
from typing import Protocol

from services.core.flip.coordinator import CoordinatorState, FlipCoordinator
from services.core.flip.messages import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    FlipDeadlines,
    FlipOutcome,
    JournalEnter,
    RankLost,
    SendAssemble,
    SendDisarm,
    SendEnter,
)
from services.core.flip.pending_events import PendingEvents
from services.core.flip.records import Armed, Concluded, Entered, FlipKey, Record
from services.core.ids import Rank

Command = SendAssemble | SendEnter | SendDisarm
"""To every rank that is linked."""


class Records(Protocol):
    """The journal, as far as decisions go."""

    def last(self, key: FlipKey) -> Record | None:
        """The newest record of an attempt."""

    def append(self, record: Record) -> None:
        """Writes one record; it is there for the next life of this process when the call returns."""


def decide_again(journal: Records, key: FlipKey) -> Concluded | None:
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


def first_words(last: Record | None) -> list[Command]:
    """What an attempt whose journal ends with `last` begins by saying: ENTER again, where it was said.

    Ranks that have verified said so to the attempt before, which may have ended with its scheduler's stream alone: no
    link of a rank has broken then, and nothing else would make them repeat it.
    """
    return [SendEnter(last.round)] if isinstance(last, Entered) else []


class OpenAttempt:
    """One attempt that is coordinated."""

    def __init__(self, key: FlipKey, coordinator: FlipCoordinator, journal: Records) -> None:
        self.key = key
        self._coordinator, self._journal = coordinator, journal

    @property
    def state(self) -> CoordinatorState:
        """Where it is."""
        return self._coordinator.state

    @property
    def round(self) -> int:
        """Of the gate; 0 before it opens."""
        return self._coordinator.round

    @property
    def deadline_ns(self) -> int | None:
        """When the running clock expires; None once it has ended."""
        return self._coordinator.deadline_ns

    @property
    def outcome(self) -> Conclude | None:
        """How it ended; it is journalled."""
        return self._coordinator.outcome

    def foresee(self, event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        """What would follow from an event, with nothing done: where a test wants the attempt held before it is."""
        return copy.deepcopy(self._coordinator).on_event(event, now_ns)

    def on_event(self, event: CoordinatorEvent, now_ns: int) -> list[Command]:
        """What is to be said to the ranks, in order; what is to be remembered is when this returns."""
        commands: list[Command] = []
        for effect in self._coordinator.on_event(event, now_ns):
            match effect:
                case JournalEnter(round_number):
                    self._journal.append(Entered(self.key, round_number))
                case Conclude():
                    self._journal.append(Concluded(self.key, effect.outcome, effect.reason))
                case SendAssemble() | SendEnter() | SendDisarm():
                    commands.append(effect)
        return commands


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt that is open from now on: what it says before it hears anything, and what it hears first."""

    attempt: OpenAttempt
    commands: list[Command]
    early: list[CoordinatorEvent]


class Coordination:
    """One attempt at a time, over one journal."""

    def __init__(
        self,
        num_ranks: int,
        deadlines: FlipDeadlines,
        journal: Records,
        coordinator: type[FlipCoordinator] = FlipCoordinator,
    ) -> None:
        self._num_ranks, self._deadlines, self._journal, self._class = num_ranks, deadlines, journal, coordinator
        self.early = PendingEvents()
        self.attempt: OpenAttempt | None = None
        """The one that is open."""

    def ask(self, key: FlipKey, now_ns: int) -> Concluded | Opened:
        """What was decided, or the attempt that is open from now on; only while none is open."""
        assert self.attempt is None, "one attempt runs at a time"
        decided = decide_again(self._journal, key)
        if decided is not None:
            return decided
        last = self._journal.last(key)
        if isinstance(last, Entered):
            coordinator = self._class.recovered(key[1], self._num_ranks, self._deadlines, now_ns, last.round)
        else:
            self._journal.append(Armed(key))
            coordinator = self._class(key[1], self._num_ranks, self._deadlines, now_ns)
        self.attempt = OpenAttempt(key, coordinator, self._journal)
        return Opened(self.attempt, first_words(last), self.early.take(key))

    def is_heard(self, key: FlipKey, event: CoordinatorEvent) -> bool:
        """Whether what a rank says of `key` is for the open attempt; if not, it is kept."""
        if self.attempt is not None and self.attempt.key == key:
            return True
        self.early.keep(key, event)
        return False

    def lose(self, rank: Rank, reason: str) -> RankLost | None:
        """The rank's stream has ended: what the open attempt is to hear, if there is one."""
        self.early.forget(rank)
        return None if self.attempt is None else RankLost(rank, reason)

    def close(self, attempt: OpenAttempt) -> bool:
        """The attempt is over, or its scheduler has left; whether it was open."""
        if self.attempt is not attempt:
            return False
        self.attempt = None
        return True
