"""The mover: the shipped coordination, with its journal, its early events and its table, behind channels.

The journal is a list that outlives the process. Links to ranks break with either end; what is said over a broken link
is lost, and a rank says its state again when it is back.
"""

from dataclasses import dataclass, field
from errno import ENOSPC
from typing import TYPE_CHECKING

from services.core.flip.attempts import Command, Coordination, OpenAttempt
from services.core.flip.coordinator import CoordinatorState
from services.core.flip.messages import (
    AssembleReceived,
    CoordinatorEvent,
    DeadlineReached,
    DisarmReceived,
    EnterReceived,
    FlipOutcome,
    ParticipantEffect,
    RankFailed,
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
    SayWithdrawn,
    SendAssemble,
    SendDisarm,
    SendEnter,
    StartWork,
)
from services.core.flip.records import Concluded, FlipKey, Record
from services.core.ids import FlipId, Generation, Rank
from services.scheduler.inputs import MoverDecided, MoverSpoke, QuestionFailed
from tests.sim.case import BEAT_NS, DEADLINES
from tests.sim.processes.world import Channel, Process

if TYPE_CHECKING:
    from tests.sim.processes.group import Group

Said = ParticipantEffect


@dataclass(slots=True)
class MemoryJournal:
    """What the file holds, without the file."""

    records: list[Record] = field(default_factory=list)
    newest: dict[FlipKey, Record] = field(default_factory=dict)
    is_full: bool = False
    """Nothing more can be written."""

    def last(self, key: FlipKey) -> Record | None:
        """The newest record of an attempt."""
        return self.newest.get(key)

    def append(self, record: Record) -> None:
        """Durable when this returns."""
        if self.is_full:
            raise OSError(ENOSPC, "no space is left")
        self.records.append(record)
        self.newest[record.key] = record


@dataclass(slots=True, eq=False)
class Question:
    """The scheduler's, that is open: who is told the outcome."""

    attempt: OpenAttempt
    answers: Channel


class MoverProcess(Process):
    """One attempt at a time."""

    def __init__(self, group: "Group") -> None:
        super().__init__(group.world, "mover")
        self.group = group
        self.journal = MemoryJournal()
        self._question: Question | None = None
        self.links: dict[Rank, Channel] = {}

    def boot(self) -> None:
        """Up, with the journal as its only memory."""
        self.is_up, self._question, self.links = True, None, {}
        self.coordination: Coordination = self.coordinate()
        self.group.connect_links()

    def coordinate(self) -> Coordination:
        """The shipped one, over this life's journal."""
        parts = self.group.parts
        return parts.coordination(self.group.case.num_ranks, DEADLINES, self.journal, parts.coordinator)

    # The scheduler's questions.

    def run_flip(self, key: FlipKey, answers: Channel) -> None:
        """One attempt to its outcome; asked again, it goes on or says what was decided."""
        if self.coordination.attempt is not None:
            self.world.note(self.name, "busy", key)
            answers.send(QuestionFailed(key[1], "another attempt is open"))
            return
        try:
            answer = self.coordination.ask(key, self.world.now_ns)
        except OSError as error:
            answers.send(QuestionFailed(key[1], str(error)))
            return
        if isinstance(answer, Concluded):
            answers.send(MoverDecided(key[1], answer.outcome, answer.reason))
            return
        question = self._question = Question(answer.attempt, answers)
        self.world.note(self.name, "attempt", key[1], answer.attempt.state.value)
        self._set_clock(question)
        self._beat(question)
        for command in answer.commands:
            self._send(key, command)
        for event in answer.early:
            if self._question is question:
                self._feed(question, event)

    def _beat(self, question: Question) -> None:
        """An attempt that is taken, or waits, says so."""
        if self._question is question:
            question.answers.send(MoverSpoke(question.attempt.key[1]))
            self.world.at(BEAT_NS, self, self._beat, question)

    def on_scheduler_lost(self, answers: Channel) -> None:
        """The stream that asked has ended: nobody waits for its attempt any more."""
        question = self._question
        if question is not None and question.answers is answers:
            self._close(question)

    def _close(self, question: Question) -> None:
        if self.coordination.close(question.attempt):
            self._question = None

    # Ranks.

    def on_said(self, rank: Rank, generation: int, said: Said) -> None:
        """From a rank; what belongs to an attempt that is not open is kept for the case that it is asked for."""
        key = (Generation(generation), said[1] if isinstance(said, tuple) else said.flip_id)
        event = event_of(rank, said)
        if self.coordination.is_heard(key, event):
            assert self._question is not None
            self._feed(self._question, event)
        else:
            self.world.note(self.name, "early", rank, type(said).__name__)

    def on_rank_lost(self, rank: Rank) -> None:
        """A link has ended."""
        self.links.pop(rank, None)
        self.group.link_again(rank)
        lost = self.coordination.lose(rank, "its stream ended")
        if lost is not None:
            assert self._question is not None
            self._feed(self._question, lost)

    def _feed(self, question: Question, event: CoordinatorEvent) -> None:
        attempt = question.attempt
        before, state = attempt.deadline_ns, attempt.state
        self.world.note(self.name, "hears", type(event).__name__, getattr(event, "rank", ""), state.value)
        if isinstance(event, RankWithdrew) and state is not CoordinatorState.ENTERED:
            self.group.checks.on_withdrawal_heard(attempt.key, event.rank, event.round)
        try:
            commands = attempt.on_event(event, self.world.now_ns)
        except OSError as error:
            self.world.note(self.name, "ends", error)
            self.group.crash(self)
            return
        if state is not CoordinatorState.ENTERED and attempt.state is CoordinatorState.ENTERED:
            self.group.checks.on_enter(attempt.key, attempt.round)
        for command in commands:
            self._send(attempt.key, command)
        if attempt.outcome is not None:
            self._tell(question)
        elif attempt.deadline_ns != before:
            self._set_clock(question)

    def _set_clock(self, question: Question) -> None:
        deadline_ns = question.attempt.deadline_ns
        assert deadline_ns is not None
        self.world.at(deadline_ns - self.world.now_ns, self, self._on_clock, question, deadline_ns)

    def _on_clock(self, question: Question, deadline_ns: int) -> None:
        if self._question is question and question.attempt.deadline_ns == deadline_ns:
            self._feed(question, DeadlineReached())

    def _tell(self, question: Question) -> None:
        """The outcome, to whoever asked."""
        key, concluded = question.attempt.key, question.attempt.outcome
        assert concluded is not None
        self.world.note(self.name, "concludes", key[1], concluded.outcome.value, concluded.reason)
        if concluded.outcome is FlipOutcome.COMMITTED:
            self.group.checks.on_committed(key)
        self.group.checks.on_told(self.journal.last(key), concluded)
        self._close(question)
        self.group.moment("concluded")
        question.answers.send(MoverDecided(key[1], concluded.outcome, concluded.reason))

    def _send(self, key: FlipKey, said: Command) -> None:
        command = command_of(key[1], said)
        self.world.note(self.name, "tells", type(command).__name__, command.flip_id)
        if isinstance(said, SendEnter):
            self.group.checks.on_enter_said(key, self.journal.last(key))
        for link in self.links.values():
            link.send(key[0], command)


def command_of(flip_id: FlipId, said: Command) -> AssembleReceived | EnterReceived | DisarmReceived:
    """What the mover says, as a rank hears it."""
    match said:
        case SendAssemble(round_number):
            return AssembleReceived(flip_id, round_number)
        case SendEnter(round_number):
            return EnterReceived(flip_id, round_number)
        case SendDisarm():
            return DisarmReceived(flip_id)


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
        case SayWithdrawn(_, round_number, reason):
            return RankWithdrew(rank, round_number, reason)
        case StartWork():
            raise AssertionError("work is not said")
