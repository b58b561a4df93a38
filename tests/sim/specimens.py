"""Faults put back: each is the shipped code but for one rule, and the simulator must find it.

`invariants` are the rules that may be the first to break; a fault found by anything else is found by luck.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from services.core.flip import (
    AbandonReached,
    Conclude,
    CoordinatorEffect,
    DisarmReceived,
    EnterReceived,
    FlipOutcome,
    FlipProtocolError,
    JournalEnter,
    ParticipantEffect,
    RankVerified,
    RankWithdrew,
    SayPresent,
    SendEnter,
    StartWork,
)
from services.core.flip_coordinator import CoordinatorState, FlipCoordinator
from services.core.flip_participant import FlipParticipant, ParticipantState
from services.core.ids import BlockId, Sequence, TokenId, blocks_for
from services.core.radix import PrefixNode, PrefixTree, TokenKey
from services.core.step import FlipEntry, StepPlan
from services.mover.early import EarlyEvents
from services.scheduler.batcher import Batcher
from services.scheduler.resident import Request
from services.scheduler.residents import Residents
from tests.sim.case import Case, Fault, Odds
from tests.sim.group import SHIPPED, Parts
from tests.sim.mover import MoverProcess, OpenAttempt
from tests.sim.rank import RankProcess, Work
from tests.sim.resident_places import Place, Places
from tests.sim.run import Focus, unchanged
from tests.sim.scheduler import PendingFlip, Run, SchedulerProcess

NUM_SEEDS = 2000

Runs = tuple[tuple[BlockId, int], ...]


@dataclass(frozen=True, slots=True)
class Specimen:
    """One fault."""

    name: str
    parts: Parts
    invariants: frozenset[str]
    seeds: range = range(NUM_SEEDS)
    """It must be found among these."""
    focus: Focus = unchanged


# The batch and its blocks.


class FindableAfterEviction(PrefixTree):
    """P3.8: an evicted block goes back to the pool and stays in the tree."""

    def _drop(self, node: PrefixNode) -> None:
        self._pool.give(node.block)


class StaleTreeBatcher(Batcher):
    """Over a tree that still finds what it gave away."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tables.tree = FindableAfterEviction(self._tables.pool)


class SecondCopyTree(PrefixTree):
    """P3.9: a block whose content is cached already stays beside it, both held by the same request."""

    def publish(self, parent: PrefixNode | None, key: TokenKey, block: BlockId) -> PrefixNode:
        node = (self._roots if parent is None else parent.children).get(key)
        if node is None:
            return super().publish(parent, key, block)
        self.pin(node)
        return node


class SecondCopyBatcher(Batcher):
    """Over a tree that never takes a new copy for an old one."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tables.tree = SecondCopyTree(self._tables.pool)


class TwiceFreedBatcher(Batcher):
    """A request that ends while frozen frees its blocks at once and again at the thaw."""

    def _free(self, request: Request) -> None:
        if not self._is_frozen:
            super()._free(request)
            return
        path, blocks = list(request.path), list(request.blocks)
        self._tables.release(request)
        request.path, request.blocks = path, blocks
        self._unfreed.append(request)


class UnfrozenBatcher(Batcher):
    """Z6: what ends while a flip is pending is freed at once."""

    def _free(self, request: Request) -> None:
        self._residents.free(request)
        self._tables.release(request)


class ForgetfulBatcher(Batcher):
    """A step does not say whose tokens it reads."""

    def next_step(self, sequence: Sequence) -> StepPlan | None:
        plan = super().next_step(sequence)
        return None if plan is None else replace(plan, tokens_through=None)


class UnannouncedResidents(Residents):
    """Freed indexes are used again and ranks never hear that they were free."""

    def announce(self) -> list:  # type: ignore[type-arg]
        self._unannounced.clear()
        return []


class UnannouncedBatcher(Batcher):
    """With a resident table that keeps releases to itself."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._residents = UnannouncedResidents(self.limits.max_resident_requests)
        self._composer.residents = self._residents


class LengthExtentBatcher(Batcher):
    """J2: the extent is what sequences have filled, not what is allocated, nor what is cached."""

    def live_runs(self) -> Runs:
        blocks = {b for r in self._residents for b in r.blocks[: blocks_for(r.num_computed)]}
        return tuple((block, 1) for block in sorted(blocks))


class OneSlotExtentBatcher(Batcher):
    """J1: the resident set is read from one microbatch."""

    def live_runs(self) -> Runs:
        runs = super().live_runs()
        if self._kind.value != "pp" or self._window.num_stages == 1:
            return runs
        residents = list(self._residents)
        mine = {block for request in residents[::2] for block in request.blocks}
        cached = {node.block for node in self._tables.tree.nodes()}
        return tuple((block, 1) for block in sorted(mine | cached))


class AnyStepPlaces(Places):
    """A request index used again without a look at when it was taken: late tokens go to the wrong request."""

    def is_of_step(self, place: Place, step: int) -> bool:
        return True


# The flip.


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


class ImpatientScheduler(SchedulerProcess):
    """COMMIT as soon as the mover says so, while reports of the old epoch are still on the way."""

    def may_commit(self, run: Run) -> bool:
        return True


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


def mover_dies_at_enter(case: Case) -> Case:
    """Its journal holds ENTER, and ranks may not have heard it."""
    return replace(case, faults=(Fault(0, "crash", "mover", moment="entered"),), eager_flips=3, is_shared=False)


def links_break_as_flips_follow_each_other(case: Case) -> Case:
    """The mover calls an attempt off while the outcome of the one before is still on its way to a slow rank."""
    faults = tuple(Fault(0, "unlink", f"rank-{case.num_ranks - 1}", moment="armed") for _ in range(6))
    return replace(case, faults=faults, odds=Odds(refuse=0.3), eager_flips=8, slow_share=0.3)


def one_prompt_of_whole_blocks(case: Case) -> Case:
    """Everybody asks the same, and the pool has one block more than the prompt."""
    limits = replace(case.limits, num_blocks=4, max_context_tokens=64)
    prompt = tuple(TokenId(1 + place % 5) for place in range(48))
    return replace(case, limits=limits, asked=tuple(replace(asked, prompt=prompt) for asked in case.asked))


def _specimen(name: str, invariants: Items[str], focus: Focus = unchanged, **parts: type) -> Specimen:
    return Specimen(name, replace(SHIPPED, **parts), frozenset(invariants), focus=focus)


SPECIMENS = (
    _specimen("freed block stays findable (P3.8)", ("census", "context", "raised"), batcher=StaleTreeBatcher),
    _specimen("second copy kept (P3.9)", ("liveness",), one_prompt_of_whole_blocks, batcher=SecondCopyBatcher),
    _specimen("blocks freed twice", ("raised", "census", "frozen blocks"), batcher=TwiceFreedBatcher),
    _specimen("freed while frozen (Z6)", ("frozen blocks",), batcher=UnfrozenBatcher),
    _specimen("tokens_through left out", ("known tokens",), batcher=ForgetfulBatcher),
    _specimen("releases not announced", ("resident table",), batcher=UnannouncedBatcher),
    _specimen("extent from lengths (J2)", ("context", "frozen blocks"), batcher=LengthExtentBatcher),
    _specimen("extent from one microbatch (J1)", ("context", "frozen blocks"), batcher=OneSlotExtentBatcher),
    _specimen("index without admitted_at", ("known tokens", "context", "agreement", "answers"), places=AnyStepPlaces),
    _specimen("presence of the attempt (P)", ("stale quorum",), coordinator=StaleQuorum),
    _specimen("commit at the first verified", ("commit after all verified",), coordinator=HastyCoordinator),
    _specimen("ENTER said once", ("convergence",), mover_dies_at_enter, coordinator=DeafCoordinator),
    _specimen(
        "ENTER not journalled",
        ("collective order", "wedge", "convergence", "generation lost"),
        mover_dies_at_enter,
        mover=UnwrittenEnterMover,
    ),
    _specimen("early marks dropped", ("convergence",), mover=ForgetfulMover),
    _specimen("a rank enters alone", ("raised", "wedge", "convergence"), participant=EagerParticipant),
    _specimen("no ABANDON while entered", ("raised",), participant=BoundParticipant),
    _specimen(
        "no later DISARM while parked",
        ("raised",),
        links_break_as_flips_follow_each_other,
        participant=LiteralParticipant,
    ),
    _specimen("carry dropped (J3, K)", ("wedge", "resident table", "liveness"), scheduler=DroppedCarryScheduler),
    _specimen("carry twice (Z7)", ("raised", "wedge", "census", "rows", "liveness"), scheduler=DoubleCarryScheduler),
    _specimen("commit before reports", ("fence", "raised"), scheduler=ImpatientScheduler),
    _specimen("old epoch after COMMIT", ("raised",), scheduler=StaleEpochScheduler),
    _specimen("entries reordered", ("raised",), scheduler=ReorderedScheduler),
    _specimen("source written before verified", ("source untouched", "context"), rank=InPlaceRank),
)
