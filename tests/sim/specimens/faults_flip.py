"""Coordinators, participants, movers and schedulers with one rule of the flip taken out."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from services.core.flip.attempts import Coordination, Opened, Records
from services.core.flip.coordinator import CoordinatorState, FlipCoordinator
from services.core.flip.log_side import Attempt, FlipAttempts
from services.core.flip.messages import (
    AbandonReached,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    DisarmReceived,
    EnterReceived,
    FlipDeadlines,
    FlipOutcome,
    FlipProtocolError,
    JournalEnter,
    ParticipantEffect,
    RankPresent,
    RankVerified,
    RankWithdrew,
    SayPresent,
    SendAssemble,
    SendEnter,
    StartWork,
)
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.flip.pending_events import PendingEvents
from services.core.flip.rank_side import RankFlips
from services.core.flip.records import Concluded, Entered, FlipKey, Record
from services.core.ids import Epoch, FlipId, Rank
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry
from services.scheduler.inputs import FlipWanted
from services.scheduler.log import GenerationLog
from tests.sim.case import DEADLINES
from tests.sim.processes.memory import Worked
from tests.sim.processes.mover import MoverProcess
from tests.sim.processes.rank import RankProcess
from tests.sim.processes.scheduler import Run, SchedulerProcess
from tests.sim.processes.world import MAX_EVENTS


class StaleQuorum(FlipCoordinator):
    """P: presence counts for the attempt, not for the round."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        present = dict(self._present)
        effects = super().on_event(event, now_ns)  # type: ignore[arg-type]
        if isinstance(event, RankWithdrew) and self.state is CoordinatorState.ASSEMBLING:
            self._present.update({rank: plan for rank, plan in present.items() if rank != event.rank})
        return effects


class StandingMark(FlipCoordinator):
    """H: the mark of a rank that is gone stays up, and peers form a quorum on it."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        if isinstance(event, RankWithdrew) and self.state is CoordinatorState.ASSEMBLING:
            return []
        return super().on_event(event, now_ns)  # type: ignore[arg-type]


class HastyCoordinator(FlipCoordinator):
    """COMMIT with the first rank that has verified."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        if isinstance(event, RankVerified) and self.state is CoordinatorState.ENTERED:
            self.state, self.deadline_ns = CoordinatorState.ENDED, None
            self.outcome = Conclude(FlipOutcome.COMMITTED, "one rank verified")
            return [self.outcome]
        return super().on_event(event, now_ns)  # type: ignore[arg-type]


class DeafCoordinator(FlipCoordinator):
    """ENTER is said once: a rank that missed it while the mover was down never hears it."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        effects = super().on_event(event, now_ns)  # type: ignore[arg-type]
        is_again = not any(isinstance(effect, JournalEnter) for effect in effects)
        return [e for e in effects if not (is_again and isinstance(e, SendEnter))]


class LonelyQuorum(FlipCoordinator):
    """I: the first rank that is quiet is taken for the group."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        if isinstance(event, RankPresent) and self.state is CoordinatorState.ASSEMBLING and event.fits:
            self._present.update({Rank(rank): event.plan_hash for rank in range(self._num_ranks)})
        return super().on_event(event, now_ns)  # type: ignore[arg-type]


class UnboundRounds(FlipCoordinator):
    """O: every opening of the gate sets the clock back, and there is no last round."""

    __slots__ = ()

    def __init__(self, flip_id: FlipId, num_ranks: int, deadlines: FlipDeadlines, now_ns: int) -> None:
        super().__init__(flip_id, num_ranks, replace(deadlines, max_rounds=MAX_EVENTS), now_ns)

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        effects = super().on_event(event, now_ns)  # type: ignore[arg-type]
        if any(isinstance(effect, SendAssemble) for effect in effects):
            self.deadline_ns = now_ns + self._deadlines.presence_ns
        return effects


class StaleExpiry(FlipCoordinator):
    """Z5: whether the clock has expired is computed before the gate sets it."""

    __slots__ = ()

    def on_event(self, event: object, now_ns: int) -> list[CoordinatorEffect]:
        before = self.state
        effects = super().on_event(event, now_ns)  # type: ignore[arg-type]
        if before is CoordinatorState.ARMED and self.state is CoordinatorState.ASSEMBLING:
            self.deadline_ns = now_ns
        return effects


class UnwrittenEnterMover(MoverProcess):
    """ENTER is said and not journalled."""

    def coordinate(self) -> Coordination:
        parts, journal = self.group.parts, WithoutEnter(self.journal)
        return Coordination(self.group.case.num_ranks, DEADLINES, journal, parts.coordinator)


@dataclass(slots=True)
class WithoutEnter:
    """A journal that takes no ENTER."""

    journal: Records

    def last(self, key: FlipKey) -> Record | None:
        return self.journal.last(key)

    def append(self, record: Record) -> None:
        if not isinstance(record, Entered):
            self.journal.append(record)


class Nothing(PendingEvents):
    """Remembers nothing."""

    def take(self, key: object) -> list:  # type: ignore[type-arg]
        return []


class TakesAll(PendingEvents):
    """Forgets what is of a later attempt as well: the question taken may be one that came late."""

    def take(self, key: FlipKey) -> list[CoordinatorEvent]:
        events = super().take(key)
        self._events.clear()
        return events


class SilentCoordination(Coordination):
    """An attempt that is recovered waits for what ranks have said to the one before."""

    def ask(self, key: FlipKey, now_ns: int) -> Concluded | Opened:
        answer = super().ask(key, now_ns)
        return replace(answer, commands=[]) if isinstance(answer, Opened) else answer


class TwoEaredFlips(RankFlips):
    """An older stream of the mover is heard although another has taken its place."""

    def on_command(self, stream: int, generation: int, command: Any) -> list[ParticipantEffect]:
        return super().on_command(self.stream, generation, command)


class EagerParticipant(FlipParticipant):
    """A rank begins with its own presence, without the evidence that all are there."""

    __slots__ = ()

    def on_event(self, event: object) -> list[ParticipantEffect]:
        effects = super().on_event(event)  # type: ignore[arg-type]
        if any(isinstance(effect, SayPresent) for effect in effects):
            assert self.flip_id is not None
            effects += [
                e for e in super().on_event(EnterReceived(self.flip_id, self.round)) if isinstance(e, StartWork)
            ]
        return effects


class BoundParticipant(FlipParticipant):
    """A rank that has entered takes no ABANDON before its work is done."""

    __slots__ = ()

    def on_event(self, event: object) -> list[ParticipantEffect]:
        if isinstance(event, AbandonReached) and self.state is ParticipantState.ENTERED:
            raise FlipProtocolError(f"{event} while entered")
        return super().on_event(event)  # type: ignore[arg-type]


class LiteralParticipant(FlipParticipant):
    """A rank that is parked hears of no other attempt, although its log may be behind the mover's stream."""

    __slots__ = ()

    def on_event(self, event: object) -> list[ParticipantEffect]:
        if isinstance(event, DisarmReceived) and self.flip_id is not None and event.flip_id > self.flip_id:
            raise FlipProtocolError(f"{event} while parked for {self.flip_id}")
        return super().on_event(event)  # type: ignore[arg-type]


class DroppedCarryLog(GenerationLog):
    """J3, K: the cutover begins with a new batch, and drops every resident request."""

    def conclude(self, entry: CommitEntry | AbandonEntry) -> None:
        super().conclude(entry)
        if not self.batcher.num_in_flight:
            self.batcher = type(self.batcher)(self.batcher.limits, self._layouts[self.layout])


class DoubleCarryLog(GenerationLog):
    """Z7: the carry runs twice, and duplicates what decodes."""

    def conclude(self, entry: CommitEntry | AbandonEntry) -> None:
        super().conclude(entry)
        for request in list(self.batcher._running):
            if not request.is_prefilling and request.num_known < request.max_tokens:
                self.batcher._queue.add(request)


class ImpatientLog(GenerationLog):
    """COMMIT as soon as the mover says so, while reports of the old epoch are still on the way."""

    @property
    def is_parked(self) -> bool:
        return True


class StaleEpochLog(GenerationLog):
    """The log goes on under the old epoch after a COMMIT."""

    def conclude(self, entry: CommitEntry | AbandonEntry) -> None:
        super().conclude(entry)
        if isinstance(entry, CommitEntry):
            self.fence.epoch = Epoch(self.fence.epoch - 1)


class RebornNumbers(SchedulerProcess):
    """N: a new life counts its generations from the beginning, and meets what the one before has left behind."""

    def boot(self) -> None:
        self._last_generation = 0
        super().boot()


class ForgivingAttempts(FlipAttempts):
    """A mover that is given up leads to ABANDON, although ranks may meet in the work by then."""

    __slots__ = ()

    @property
    def without_mover(self) -> FlipOutcome:
        return FlipOutcome.ABANDONED


class HastyLog(GenerationLog):
    """FLIP is written with the wish for it."""

    def _on_flip_wanted(self, given: FlipWanted) -> None:
        super()._on_flip_wanted(given)
        attempt = self.flips.attempt
        if attempt is not None and attempt.frozen_ns is None:
            self.arm(attempt)

    _STEPS: ClassVar = {**GenerationLog._STEPS, FlipWanted: _on_flip_wanted}


class HopefulAttempts(FlipAttempts):
    """Every word of the mover begins its silence anew, and nothing bounds the whole."""

    __slots__ = ()

    def on_word(self, flip_id: FlipId, now_ns: int) -> bool:
        if self.attempt is not None:
            self.attempt.is_first_question = True
        return super().on_word(flip_id, now_ns)

    def _given_up_ns(self, attempt: Attempt) -> int:
        return attempt.heard_ns + self._clocks.silence_ns


class ReorderedScheduler(SchedulerProcess):
    """Two entries change places on the way to one rank, once."""

    def _write(self, run: Run, logged: LogEntry) -> None:
        super()._write(run, logged)
        if logged.sequence == 4:
            run.streams[-1]._last_ns = 0


class InPlaceRank(RankProcess):
    """Writes the destination into the source's rows before everyone has read, and cannot go back."""

    def move(self, flip: FlipEntry) -> Worked:
        assert self.memory is not None
        source = self.memory.slots(flip.target.other)
        outcome = yield from super().move(flip)
        for begin, length in flip.live_runs:
            source[begin * 16 : (begin + length) * 16] = [None] * (length * 16)
        return outcome
