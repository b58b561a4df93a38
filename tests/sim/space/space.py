"""Every state of a small group in flips: what can happen next, to whom, and what must hold when it does.

A state is a value: the scheduler, the mover with its journal, the budgets of faults, and the sorted tuple of the ranks.
The tables and the rule for an attempt that is asked for again are the shipped ones. Channels are FIFO each and race
each other; any process may be as slow as it likes, so a clock may expire whenever one runs, if the scope allows it.
What a dying process had sent arrives or is lost with it. Where two ranks said something before their attempt is open,
what they said is heard rank by rank: such events commute.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from services.core.flip.attempts import decide_again, first_words
from services.core.flip.coordinator import CoordinatorState, FlipCoordinator
from services.core.flip.messages import (
    AssembleReceived,
    Conclude,
    CoordinatorEffect,
    DeadlineReached,
    DisarmReceived,
    EnterReceived,
    FlipOutcome,
    JournalEnter,
    RankLost,
    SayWithdrawn,
    SendAssemble,
    SendDisarm,
    SendEnter,
)
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.flip.pending_events import PendingEvents
from services.core.flip.records import Armed, Concluded, Entered, FlipKey, Record
from services.core.ids import Epoch, FlipId, Generation, LogIndex, Rank
from services.core.step import AbandonEntry, CommitEntry, Entry, FlipEntry, LogEntry, ResetEntry
from tests.sim.processes.mover import event_of
from tests.sim.space.checks import check_commit, check_enter, check_told
from tests.sim.space.rank import PLAN_HASH, Interned, RankMoves, RankState, reborn, unlinked, withdrawing
from tests.sim.space.state import (
    DEADLINES,
    Budget,
    GroupState,
    Key,
    Mover,
    OneJournal,
    Scheduler,
    Scope,
    flip_of,
    put,
    tell,
    with_rank,
)


class Space:
    """What can happen, with the classes of both tables as parameters."""

    def __init__(
        self,
        scope: Scope,
        coordinator: type[FlipCoordinator] = FlipCoordinator,
        participant: type[FlipParticipant] = FlipParticipant,
        *,
        journals_enter: bool = True,
        early: type[PendingEvents] = PendingEvents,
        says_enter_again: bool = True,
    ) -> None:
        self.scope = scope
        self._class = coordinator
        self._journals_enter, self._early = journals_enter, early
        self._first_words = first_words if says_enter_again else lambda last: []
        self._interned = Interned()
        self._rank = RankMoves(participant, self._interned, has_hops=scope.has_hops)
        self._decide = lru_cache(None)(self._decide_uncached)

    def first(self) -> GroupState:
        """Nothing has been said yet."""
        scope = self.scope
        budget = Budget(scope.num_flips, scope.num_crashes, scope.num_slips, scope.num_expiries)
        return GroupState(Scheduler(), Mover(), budget, (RankState(),) * scope.num_ranks)

    def named(self, state: GroupState) -> tuple[Key, GroupState]:
        """The state with interned parts, and its name; equal but for the names of the ranks is equal."""
        one = self._interned.one
        scheduler, mover, budget = one(state.scheduler), one(state.mover), one(state.budget)
        ranks = sorted(map(one, state.ranks), key=id)
        return (id(scheduler), id(mover), id(budget), *map(id, ranks)), GroupState(
            scheduler, mover, budget, tuple(ranks)
        )

    def quiet_moves(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        """Every event that is possible without a fault or a clock, and the state after it.

        Raises:
            InvariantError: a rule broke.
            FlipProtocolError, ProtocolError: a table has no row for what happens.
        """
        yield from self._scheduler_moves(state)
        yield from self._mover_moves(state)
        before = None
        for place, rank in enumerate(state.ranks):
            if rank is not before and rank != before:
                yield from self._rank_moves(state, place, rank)
            before = rank

    # The scheduler.

    def _scheduler_moves(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        s = state.scheduler
        if not s.is_up:
            yield "scheduler up", state._replace(scheduler=s._replace(is_up=True))
            return
        if s.is_lost:
            yield "scheduler sees a rank lost", self._lose(state)
        if not s.is_serving:
            if not any(rank.has_log for rank in state.ranks):
                yield "generation opens", self._open(state)
            return
        if not s.is_pending:
            if state.budget.flips:
                yield "FLIP", self._arm(state)
            return
        if isinstance(s.question, FlipOutcome):
            yield f"scheduler hears {s.question.value}", self._conclude(state, s.question)
        elif s.question == "broken":
            yield "scheduler sees the mover's stream end", state._replace(scheduler=s._replace(question="idle"))
        elif s.question == "idle":
            if state.mover.is_up:
                yield "scheduler asks", state._replace(scheduler=s._replace(question="sent"))
            else:
                yield "scheduler gives the mover up", self._conclude(state, FlipOutcome.ABANDONED)

    def _open(self, state: GroupState) -> GroupState:
        old = state.scheduler
        scheduler = Scheduler(generation=Generation(old.generation + 1))._replace(is_serving=True)
        ranks = tuple(rank._replace(has_log=True, is_log_open=True) for rank in state.ranks)
        return self._append(state._replace(scheduler=scheduler, ranks=ranks), ResetEntry(scheduler.kind, 1, 1, 1))

    def _append(self, state: GroupState, entry: Entry) -> GroupState:
        s = state.scheduler
        logged = LogEntry(s.generation, s.epoch, LogIndex(s.sequence + 1), entry)
        ranks = tuple(r._replace(queue=(*r.queue, logged)) if r.is_log_open else r for r in state.ranks)
        return state._replace(scheduler=s._replace(sequence=logged.sequence), ranks=ranks)

    def _arm(self, state: GroupState) -> GroupState:
        s = state.scheduler
        s = s._replace(last_id=FlipId(s.last_id + 1), is_pending=True, question="idle")
        state = state._replace(scheduler=s, budget=state.budget._replace(flips=state.budget.flips - 1))
        return self._append(state, FlipEntry(s.last_id, s.kind.other, ()))

    def _conclude(self, state: GroupState, outcome: FlipOutcome) -> GroupState:
        s = state.scheduler
        if outcome is FlipOutcome.BROKEN:
            return self._lose(state)
        if outcome is not FlipOutcome.COMMITTED:
            state = self._append(state, AbandonEntry(s.last_id, ""))
        else:
            check_commit(state)
            state = self._append(state, CommitEntry(s.last_id, s.kind.other))
            s = s._replace(epoch=Epoch(s.epoch + 1), kind=s.kind.other)
        return state._replace(
            scheduler=s._replace(sequence=state.scheduler.sequence, is_pending=False, question="idle")
        )

    def _lose(self, state: GroupState) -> GroupState:
        """The generation is over: logs end, the mover's stream with them."""
        state = self._leave(state)
        s = state.scheduler._replace(is_serving=False, is_pending=False, question="idle", is_lost=False)
        return state._replace(scheduler=s, ranks=tuple(rank._replace(is_log_open=False) for rank in state.ranks))

    def _leave(self, state: GroupState) -> GroupState:
        s, mover = state.scheduler, state.mover
        if s.is_pending and s.question in ("sent", "open"):
            left = tuple(sorted([*mover.left, ((s.generation, s.last_id), str(s.question))]))
            return state._replace(mover=mover._replace(left=left))
        return state

    # The mover.

    def _mover_moves(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        s, mover = state.scheduler, state.mover
        if not mover.is_up:
            yield "mover up", state._replace(mover=mover._replace(is_up=True))
            return
        if s.question == "sent":
            key = (s.generation, s.last_id)
            if mover.key is not None:
                yield "mover is busy", state._replace(scheduler=s._replace(question="idle"))
            else:
                yield f"attempt {key}", self._begin(state._replace(scheduler=s._replace(question="open")), key)
        for place, (key, where) in enumerate(mover.left):
            left = mover._replace(left=(*mover.left[:place], *mover.left[place + 1 :]))
            if where == "open" or mover.key is not None:
                ended = left._replace(key=None) if where == "open" and mover.key == key else left
                yield f"mover sees {key} left", self._uncounted(state._replace(mover=ended))
                continue
            opened = left._replace(left=tuple(sorted([*left.left, (key, "open")])))
            yield f"attempt {key}, left", self._begin(state._replace(mover=opened), key)
            yield f"question {key} lost", state._replace(mover=left)

    def _uncounted(self, state: GroupState) -> GroupState:
        if state.mover.key is not None:
            return state
        mover = state.mover._replace(state=CoordinatorState.ARMED, round=0)
        ranks = tuple(rank._replace(is_counted=(False, False, False)) for rank in state.ranks)
        return state._replace(mover=mover, ranks=ranks)

    def _begin(self, state: GroupState, key: FlipKey) -> GroupState:
        journal = OneJournal(list(state.mover.journal))
        decided = decide_again(journal, key)  # type: ignore[arg-type]
        if decided is not None:
            return self._answered(state._replace(mover=state.mover._replace(journal=tuple(journal.records))), decided)
        last = journal.last(key)
        if isinstance(last, Entered):
            mover = state.mover._replace(key=key, state=CoordinatorState.ENTERED, round=last.round)
            for command in self._first_words(last):
                state = tell(state, key, EnterReceived(key[1], command.round))
        else:
            journal.append(Armed(key))
            mover = state.mover._replace(key=key, journal=tuple(journal.records))
        early = self._early()
        for place, rank in enumerate(state.ranks):
            for generation, effect in rank.early:
                early.keep((Generation(generation), flip_of(effect)), event_of(Rank(place), effect))
        events = early.take(key)
        kept = {early_key for early_key, _ in early._events}
        ranks = tuple(
            rank._replace(early=tuple(said for said in rank.early if (said[0], flip_of(said[1])) in kept))
            for rank in state.ranks
        )
        state = state._replace(mover=mover, ranks=ranks)
        for event in events:
            state = self._feed(state, event)
        return state

    def _answered(self, state: GroupState, concluded: Concluded) -> GroupState:
        """The outcome goes to whoever asked, if he is still there."""
        s, mover = state.scheduler, state.mover
        left = tuple(item for item in mover.left if item != (concluded.key, "open"))
        if (s.generation, s.last_id) == concluded.key and s.is_pending and s.question == "open":
            s = s._replace(question=concluded.outcome)
        state = state._replace(scheduler=s, mover=mover._replace(left=left, key=None))
        return self._uncounted(state)

    def _decide_uncached(
        self, state: CoordinatorState, round_number: int, counted: tuple[tuple[bool, bool, bool], ...], event: Any
    ) -> tuple[CoordinatorState, int, tuple[tuple[bool, bool, bool], ...], tuple[CoordinatorEffect, ...]]:
        coordinator = self._class(FlipId(1), len(counted), DEADLINES, 0)
        coordinator.state, coordinator.round = state, round_number
        coordinator._parked = {Rank(r) for r, bits in enumerate(counted) if bits[0]}
        coordinator._present = {Rank(r): PLAN_HASH for r, bits in enumerate(counted) if bits[1]}
        coordinator._verified = {Rank(r) for r, bits in enumerate(counted) if bits[2]}
        effects = coordinator.on_event(event, 0)
        after = tuple(
            (r in coordinator._parked, r in coordinator._present, r in coordinator._verified)
            for r in map(Rank, range(len(counted)))
        )
        return coordinator.state, coordinator.round, after, tuple(effects)

    def _feed(self, state: GroupState, event: Any) -> GroupState:
        """The open attempt hears `event`; nobody hears it where it has ended meanwhile."""
        mover = state.mover
        if mover.key is None:
            return state
        counted = tuple(rank.is_counted for rank in state.ranks)
        after, round_number, counted, effects = self._decide(mover.state, mover.round, counted, event)
        ranks = tuple(rank._replace(is_counted=bits) for rank, bits in zip(state.ranks, counted, strict=True))
        state = state._replace(mover=mover._replace(state=after, round=round_number), ranks=ranks)
        key = mover.key
        for effect in effects:
            state = self._carry_out(state, key, effect)
        return state

    def _carry_out(self, state: GroupState, key: FlipKey, effect: CoordinatorEffect) -> GroupState:
        match effect:
            case JournalEnter(round_number):
                check_enter(state, key, round_number)
                return self._record(state, Entered(key, round_number)) if self._journals_enter else state
            case SendAssemble(round_number):
                return tell(state, key, AssembleReceived(key[1], round_number))
            case SendEnter(round_number):
                return tell(state, key, EnterReceived(key[1], round_number))
            case SendDisarm():
                return tell(state, key, DisarmReceived(key[1]))
            case Conclude():
                concluded = Concluded(key, effect.outcome, "")
                return self._answered(self._record(state, concluded), concluded)

    def _record(self, state: GroupState, record: Record) -> GroupState:
        journal = OneJournal(list(state.mover.journal))
        journal.append(record)
        return state._replace(mover=state.mover._replace(journal=tuple(journal.records)))

    # Ranks.

    def _rank_moves(self, state: GroupState, place: int, rank: RankState) -> Iterator[tuple[str, GroupState]]:
        moves, who = self._rank, f"rank {place}"
        if rank.has_log and not rank.is_log_open:
            for is_heard in (True, False) if rank.is_linked and rank.to_mover else (True,):
                yield f"{who} sees its log end", with_rank(state, place, reborn(rank, is_heard=is_heard))
        if rank.to_mover and state.mover.is_up:
            yield f"mover hears {who}: {rank.to_mover[0]}", self._hear(state, place, rank)
        if rank.to_loop:
            for after in moves.hop(rank):
                yield f"{who} hears {rank.to_loop[0]}", with_rank(state, place, after)
        if rank.from_mover:
            check_told(state, rank)
            for after in moves.obey(rank):
                yield f"{who} obeys {rank.from_mover[0]}", with_rank(state, place, after)
        if rank.queue:
            for after in moves.execute(rank, "well"):
                yield f"{who} executes {rank.queue[0]}", with_rank(state, place, after)
        if state.mover.is_up and not rank.is_linked and not rank.to_mover:
            for after in moves.connect(rank):
                yield f"{who} is linked", with_rank(state, place, after)

    def _hear(self, state: GroupState, place: int, rank: RankState) -> GroupState:
        said, rank = rank.to_mover[0], rank._replace(to_mover=rank.to_mover[1:])
        if said is None:
            state = state._replace(ranks=put(state.ranks, place, rank._replace(early=(), is_linked=False)))
            return self._feed(state, RankLost(Rank(place), ""))
        generation, effect = said
        is_withdrawn = (
            isinstance(effect, SayWithdrawn) and (generation, effect.flip_id, effect.round) == rank.present_in
        )
        if is_withdrawn and state.mover.state is not CoordinatorState.ENTERED:
            # Nobody may count on it in this round any more.
            rank = rank._replace(present_in=(0, FlipId(0), 0))
        if state.mover.key != (generation, flip_of(effect)):
            return with_rank(state, place, rank._replace(early=(*rank.early, said)))
        state = state._replace(ranks=put(state.ranks, place, rank))
        return self._feed(state, event_of(Rank(place), effect))

    # What goes wrong.

    def loud_moves(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        """Every fault and every clock that the budget has left."""
        budget, mover = state.budget, state.mover
        if budget.expiries and mover.is_up and mover.key is not None:
            after = state._replace(budget=budget._replace(expiries=budget.expiries - 1))
            yield "clock expires", self._feed(after, DeadlineReached())
        if budget.slips:
            yield from self._slips(state._replace(budget=budget._replace(slips=budget.slips - 1)))
        if budget.crashes and state.scheduler.generation:
            yield from self._crashes(state._replace(budget=budget._replace(crashes=budget.crashes - 1)))

    def _slips(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        kinds = self.scope.slips
        for place, rank in enumerate(state.ranks):
            for kind in kinds - {"withdraw"} if rank.queue else ():
                item = rank.queue[0]
                is_flip = isinstance(item, LogEntry) and isinstance(item.entry, FlipEntry)
                if is_flip if kind == "refused" else not isinstance(item, LogEntry):
                    for after in self._rank.execute(rank, kind):
                        yield f"rank {place}: {kind}", with_rank(state, place, after)
            if "withdraw" in kinds and rank.is_linked and rank.tables.state is ParticipantState.PRESENT:
                yield f"rank {place} withdraws", with_rank(state, place, withdrawing(rank))

    def _crashes(self, state: GroupState) -> Iterator[tuple[str, GroupState]]:
        kinds, s, mover = self.scope.crashes, state.scheduler, state.mover
        if "scheduler" in kinds and s.is_up:
            down = self._lose(state)
            yield "scheduler dies", down._replace(scheduler=down.scheduler._replace(is_up=False))
        if "mover" in kinds and mover.is_up:
            yield "mover dies", self._mover_dies(state, s)
            if s.question in ("sent", "open") or isinstance(s.question, FlipOutcome):
                yield "mover dies, its word lost", self._mover_dies(state, s._replace(question="broken"))
        if "unask" in kinds and s.question in ("sent", "open"):
            left = self._leave(state)
            yield "question broken", left._replace(scheduler=s._replace(question="broken"))
        if "absent" in kinds and s.is_pending and s.question in ("idle", "sent", "open"):
            yield "scheduler gives the mover up", self._conclude(self._leave(state), FlipOutcome.ABANDONED)
        for place, rank in enumerate(state.ranks):
            if "unlink" in kinds and rank.is_linked:
                yield f"rank {place} unlinked", with_rank(state, place, unlinked(rank, is_seen=False))
            if "rank" in kinds:
                is_noticed = rank.is_log_open or s.is_lost
                hurt = state._replace(scheduler=s._replace(is_lost=is_noticed))
                for is_heard in (True, False):
                    yield f"rank {place} dies", with_rank(hurt, place, reborn(rank, is_heard=is_heard))

    def _mover_dies(self, state: GroupState, scheduler: Scheduler) -> GroupState:
        if scheduler.question in ("sent", "open"):
            scheduler = scheduler._replace(question="broken")
        mover = Mover(is_up=False, journal=state.mover.journal)
        ranks = tuple(
            unlinked(r, is_seen=True)._replace(to_mover=(), early=(), is_counted=(False, False, False))
            for r in state.ranks
        )
        return state._replace(scheduler=scheduler, mover=mover, ranks=ranks)
