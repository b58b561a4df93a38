"""The mover: the shipped coordinator, and the shipped rule for an attempt that is asked for again, behind channels.

The journal is a list that outlives the process. Links to ranks break with either end; what is said over a broken link
is lost, and a rank says its state again when it is back.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.core.flip import (
    AssembleReceived,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    DeadlineReached,
    DisarmReceived,
    EnterReceived,
    FlipOutcome,
    JournalEnter,
    ParticipantEffect,
    RankFailed,
    RankLost,
    RankNotReady,
    RankParked,
    RankPresent,
    RankVerified,
    RankWithdrew,
    SayFailed,
    SayNotReady,
    SayParked,
    SayPresent,
    SayVerified,
    SendAssemble,
    SendDisarm,
    SendEnter,
    StartWork,
)
from services.core.flip_coordinator import CoordinatorState, FlipCoordinator
from services.core.ids import FlipId, Generation, Rank
from services.mover.attempts import decide_again
from services.mover.early import EarlyEvents
from services.mover.journal import Armed, Concluded, Entered, FlipKey, Record
from tests.sim.case import DEADLINES
from tests.sim.world import Channel, Process

if TYPE_CHECKING:
    from tests.sim.group import Group

Said = ParticipantEffect | tuple[str, FlipId, int]


@dataclass(slots=True)
class MemoryJournal:
    """What the file holds, without the file."""

    records: list[Record] = field(default_factory=list)

    def last(self, key: FlipKey) -> Record | None:
        """The newest record of an attempt."""
        return next((record for record in reversed(self.records) if record.key == key), None)

    def append(self, record: Record) -> None:
        """Durable when this returns."""
        self.records.append(record)


@dataclass(slots=True, eq=False)
class OpenAttempt:
    """What the mover knows of the attempt it coordinates, and who is told its outcome."""

    key: FlipKey
    coordinator: FlipCoordinator
    answers: Channel


class MoverProcess(Process):
    """One attempt at a time."""

    def __init__(self, group: "Group") -> None:
        super().__init__(group.world, "mover")
        self.group = group
        self.journal = MemoryJournal()
        self._attempt: OpenAttempt | None = None
        self.links: dict[Rank, Channel] = {}
        self.early = EarlyEvents()
        self.away_ns: int | None = 0
        """Since when nobody would answer."""

    def stop(self) -> None:
        super().stop()
        self._is_away()

    def go_on(self) -> None:
        self.away_ns = None
        super().go_on()

    def die(self) -> None:
        super().die()
        self._is_away()

    def _is_away(self) -> None:
        if self.away_ns is None:
            self.away_ns = self.world.now_ns

    def boot(self) -> None:
        """Up, with the journal as its only memory."""
        self.away_ns = None
        self.is_up, self._attempt, self.links, self.early = True, None, {}, EarlyEvents()
        self.group.connect_links()

    # The scheduler's questions.

    def run_flip(self, key: FlipKey, answers: Channel) -> None:
        """One attempt to its outcome; asked again, it goes on or says what was decided."""
        if self._attempt is not None:
            self.world.note(self.name, "busy", key)
            answers.send("busy")
            return
        decided = decide_again(self.journal, key)  # type: ignore[arg-type]
        if decided is not None:
            answers.send("outcome", key[1], decided.outcome, decided.reason)
            return
        attempt = self._attempt = OpenAttempt(key, self._coordinator(key), answers)
        self.world.note(self.name, "attempt", key[1], attempt.coordinator.state.value)
        self._set_clock(attempt)
        for event in self.early.take(key):
            self._feed(attempt, event)

    def _coordinator(self, key: FlipKey) -> FlipCoordinator:
        last, parts, num_ranks = self.journal.last(key), self.group.parts, self.group.case.num_ranks
        if isinstance(last, Entered):
            return parts.coordinator.recovered(key[1], num_ranks, DEADLINES, self.world.now_ns, last.round)
        self.journal.append(Armed(key))
        return parts.coordinator(key[1], num_ranks, DEADLINES, self.world.now_ns)

    def on_scheduler_lost(self, key: FlipKey) -> None:
        """Its stream has ended: nobody waits for this attempt any more."""
        if self._attempt is not None and self._attempt.key == key:
            self._attempt = None

    # Ranks.

    def on_said(self, rank: Rank, generation: int, said: Said) -> None:
        """From a rank; what belongs to an attempt that is not open is kept for the case that it is asked for."""
        attempt = self._attempt
        flip_id = said[1] if isinstance(said, tuple) else said.flip_id
        if attempt is None or attempt.key != (generation, flip_id):
            self.world.note(self.name, "early", rank, type(said).__name__)
            self.early.keep((Generation(generation), flip_id), event_of(rank, said))
            return
        self._feed(attempt, event_of(rank, said))

    def on_rank_lost(self, rank: Rank) -> None:
        """A link has ended."""
        self.links.pop(rank, None)
        self.early.forget(rank)
        self.group.link_again(rank)
        if self._attempt is not None:
            self._feed(self._attempt, RankLost(rank, "its stream ended"))

    def _feed(self, attempt: OpenAttempt, event: CoordinatorEvent) -> None:
        coordinator = attempt.coordinator
        before = coordinator.deadline_ns
        self.world.note(self.name, "hears", type(event).__name__, getattr(event, "rank", ""), coordinator.state.value)
        if isinstance(event, RankWithdrew) and coordinator.state is not CoordinatorState.ENTERED:
            self.group.checks.on_withdrawal_heard(attempt.key, event.rank, event.round)
        effects = coordinator.on_event(event, self.world.now_ns)
        for effect in effects:
            self._carry_out(attempt, effect)
        if coordinator.deadline_ns is not None and coordinator.deadline_ns != before:
            self._set_clock(attempt)

    def _set_clock(self, attempt: OpenAttempt) -> None:
        deadline_ns = attempt.coordinator.deadline_ns
        assert deadline_ns is not None
        self.world.at(deadline_ns - self.world.now_ns, self, self._on_clock, attempt, deadline_ns)

    def _on_clock(self, attempt: OpenAttempt, deadline_ns: int) -> None:
        if self._attempt is attempt and attempt.coordinator.deadline_ns == deadline_ns:
            self._feed(attempt, DeadlineReached())

    def _carry_out(self, attempt: OpenAttempt, effect: CoordinatorEffect) -> None:
        flip_id = attempt.key[1]
        match effect:
            case JournalEnter(round_number):
                self.journal_enter(attempt, round_number)
                self.group.checks.on_enter(attempt.key, round_number)
            case SendAssemble(round_number):
                self._send(attempt.key[0], AssembleReceived(flip_id, round_number))
            case SendEnter(round_number):
                self._send(attempt.key[0], EnterReceived(flip_id, round_number))
            case SendDisarm():
                self._send(attempt.key[0], DisarmReceived(flip_id))
            case Conclude():
                self._conclude(attempt, effect)

    def journal_enter(self, attempt: OpenAttempt, round_number: int) -> None:
        """From here on everyone follows through."""
        self.journal.append(Entered(attempt.key, round_number))

    def _conclude(self, attempt: OpenAttempt, effect: Conclude) -> None:
        self.world.note(self.name, "concludes", attempt.key[1], effect.outcome.value, effect.reason)
        if effect.outcome is FlipOutcome.COMMITTED:
            self.group.checks.on_committed(attempt.key)
        self.journal.append(Concluded(attempt.key, effect.outcome, effect.reason))
        self._attempt = None
        self.group.moment("concluded")
        attempt.answers.send("outcome", attempt.key[1], effect.outcome, effect.reason)

    def _send(self, generation: Generation, command: AssembleReceived | EnterReceived | DisarmReceived) -> None:
        self.world.note(self.name, "tells", type(command).__name__, command.flip_id)
        for link in self.links.values():
            link.send(generation, command)


def event_of(rank: Rank, said: Said) -> CoordinatorEvent:
    """What a rank said, as the coordinator hears it."""
    match said:
        case SayParked():
            return RankParked(rank)
        case SayPresent(_, round_number, fits, refusal, plan_hash):
            return RankPresent(rank, round_number, fits, refusal, plan_hash)
        case SayNotReady(_, reason):
            return RankNotReady(rank, reason)
        case SayVerified(_, bytes_moved, rows_moved):
            return RankVerified(rank, bytes_moved, rows_moved)
        case SayFailed(_, reason, restored):
            return RankFailed(rank, reason, restored)
        case (_, _, round_number):
            return RankWithdrew(rank, round_number, "a message came in")
        case StartWork():
            raise AssertionError("work is not said")
