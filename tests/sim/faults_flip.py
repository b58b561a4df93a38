"""Coordinators, participants, movers and schedulers with one rule of the flip taken out."""

from dataclasses import replace

from services.core.flip import (
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
from services.core.flip_coordinator import CoordinatorState, FlipCoordinator
from services.core.flip_participant import FlipParticipant, ParticipantState
from services.core.ids import FlipId, Rank
from services.core.step import FlipEntry
from services.mover.early import EarlyEvents
from services.mover.journal import FlipKey
from tests.sim.mover import MoverProcess, OpenAttempt
from tests.sim.rank import RankProcess, Work
from tests.sim.scheduler import PendingFlip, Run, SchedulerProcess
from tests.sim.world import MAX_EVENTS


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

    def journal_enter(self, attempt: OpenAttempt, round_number: int) -> None:
        return None


class Nothing(EarlyEvents):
    """Remembers nothing."""

    def take(self, key: object) -> list:  # type: ignore[type-arg]
        return []


class ForgetfulMover(MoverProcess):
    """What a rank says before the scheduler has asked is dropped as a stray message."""

    def boot(self) -> None:
        super().boot()
        self.early = Nothing()


class TakesAll(EarlyEvents):
    """Forgets what is of a later attempt as well: the question taken may be one that came late."""

    def take(self, key: FlipKey) -> list[CoordinatorEvent]:
        events = super().take(key)
        self._events.clear()
        return events


class LatelyForgetfulMover(MoverProcess):
    """Its early marks are those of one attempt."""

    def boot(self) -> None:
        super().boot()
        self.early = TakesAll()


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


class DroppedCarryScheduler(SchedulerProcess):
    """J3, K: the cutover begins with a new batch, and drops every resident request."""

    def thaw(self, run: Run) -> None:
        super().thaw(run)
        if not run.batcher.num_in_flight:
            run.batcher = self.group.parts.batcher(self.group.case.limits, self.group.layouts[run.kind])


class RebornNumbers(SchedulerProcess):
    """N: a new life counts its generations from the beginning, and meets what the one before has left behind."""

    def boot(self) -> None:
        self._last_generation = 0
        super().boot()


class ImpatientScheduler(SchedulerProcess):
    """COMMIT as soon as the mover says so, while reports of the old epoch are still on the way."""

    def may_commit(self, run: Run) -> bool:
        return True


class ForgivingScheduler(SchedulerProcess):
    """A mover that is given up leads to ABANDON, although ranks may meet in the work by then."""

    def give_up_mover(self, run: Run, flip: PendingFlip) -> None:
        self.on_outcome(run, flip.entry.flip_id, FlipOutcome.ABANDONED, "the mover is absent")


class DoubleCarryScheduler(SchedulerProcess):
    """Z7: the carry runs twice, and duplicates what decodes."""

    def thaw(self, run: Run) -> None:
        super().thaw(run)
        for request in list(run.batcher._residents):
            if not request.is_prefilling and request.num_known < request.max_tokens:
                run.batcher._queue.add(request)


class StaleEpochScheduler(SchedulerProcess):
    """The log goes on under the old epoch after a COMMIT."""

    def _end_flip(self, run: Run, flip: PendingFlip) -> None:
        if flip.outcome is FlipOutcome.COMMITTED:
            run.fence.epoch = type(run.fence.epoch)(run.fence.epoch - 1)
        super()._end_flip(run, flip)


class ReorderedScheduler(SchedulerProcess):
    """Two entries change places on the way to one rank, once."""

    def append(self, entry: object) -> None:
        super().append(entry)  # type: ignore[arg-type]
        run = self.run
        assert run is not None
        if run.sequence == 4:
            run.streams[-1]._last_ns = 0


class InPlaceRank(RankProcess):
    """Writes the destination into the source's rows before everyone has read, and cannot go back."""

    def move(self, flip: FlipEntry) -> Work:
        source = self.planes[flip.target.other]
        yield from super().move(flip)
        for begin, length in flip.live_runs:
            source[begin * 16 : (begin + length) * 16] = [None] * (length * 16)
