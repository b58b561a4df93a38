"""What must hold in every history, looked at where it could break; it reads everything and changes nothing.

Kept apart from the processes: a process knows what it could know, this sees all of them at one instant.
"""

from collections import Counter
from typing import TYPE_CHECKING

from services.core.flip.messages import Conclude, FlipOutcome
from services.core.flip.participant import ParticipantState
from services.core.flip.records import Concluded, Entered, FlipKey, Record
from services.core.ids import BLOCK_SLOTS, BlockId, FlipId, Generation, Rank
from services.core.log import LogState
from services.core.step import CommitEntry, FlipEntry, LogEntry
from services.scheduler.inputs import FlipEnded
from tests.sim.case import FLIP_CLOCKS, PATIENT_NS, STEP_NS, Fault
from tests.sim.processes.data_plane import DataPlane
from tests.sim.processes.toy_model import EMPTY, chained, letter
from tests.sim.processes.world import InvariantError

if TYPE_CHECKING:
    from tests.sim.processes.group import Group
    from tests.sim.processes.rank import RankProcess
    from tests.sim.processes.resident_places import Place
    from tests.sim.processes.scheduler import Run


class Checks:
    """The invariants of one schedule."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._log: dict[tuple[int, int], LogEntry] = {}
        self._planes: dict[int, DataPlane] = {}
        self._present: dict[tuple[FlipKey, int], set[Rank]] = {}
        self._verified: dict[FlipKey, set[Rank]] = {}
        self._owned: tuple[tuple[BlockId, int], ...] = ()
        """When the batch was frozen, and when that was."""
        self._frozen_ns = 0
        self._faults: list[tuple[int, Fault]] = []
        self.outcomes: list[FlipOutcome] = []
        self.num_committed = self.num_abandoned = self.num_lost = self.num_carried = self.longest_frozen_ns = 0

    def on_fault(self, fault: Fault) -> None:
        """Somebody was hurt."""
        self._faults.append((self._group.world.now_ns, fault))

    # The log.

    def on_generation(self, generation: Generation, plane: DataPlane) -> None:
        """A new one has begun, under a number that none had before."""
        if generation in self._planes:
            raise InvariantError("one number, one generation", f"generation {generation} has been before")
        self._planes[generation] = plane

    def on_logged(self, entry: LogEntry) -> None:
        """The scheduler wrote an entry."""
        self._log[entry.generation, entry.sequence] = entry
        if isinstance(entry.entry, CommitEntry):
            for rank in self._group.ranks:
                if rank.is_up and rank.follower.generation == entry.generation:
                    self._must_be_verified(rank, entry.entry.flip_id)

    def on_executed(self, rank: "RankProcess", entry: LogEntry) -> None:
        """A rank begins an entry: the one that was written, in the epoch and layout that hold."""
        if self._log.get((entry.generation, entry.sequence)) is not entry:
            raise InvariantError("one log", f"{rank.name} executes {entry.sequence}, which is not what was written")
        epoch = entry.epoch + isinstance(entry.entry, CommitEntry)
        if rank.follower.epoch != epoch:
            raise InvariantError("foreign epoch", f"{rank.name} in epoch {rank.follower.epoch} executes one of {epoch}")

    # Flips.

    def on_freeze(self, run: "Run", flip: FlipEntry) -> None:
        """FLIP is written: the mover has taken it, and whose blocks are whose stays as it is until its outcome."""
        key = (run.fence.generation, flip.flip_id)
        if self._group.mover.journal.last(key) is None:
            raise InvariantError("asked, then frozen", f"flip {flip.flip_id}: the mover has never heard of it")
        self._owned, self._frozen_ns = run.batcher._tables.pool.owned_runs(), self._group.world.now_ns
        self._group.moment("armed")

    def on_present(self, rank: "RankProcess", flip_id: FlipId, round_number: int) -> None:
        """A rank says that it is there."""
        generation = rank.follower.generation
        assert generation is not None
        self._present.setdefault(((generation, flip_id), round_number), set()).add(rank.rank)
        self._group.moment("present")

    def on_verified(self, rank: "RankProcess", flip_id: FlipId) -> None:
        """A rank says that its part is moved and checked."""
        generation = rank.follower.generation
        assert generation is not None
        self._verified.setdefault((generation, flip_id), set()).add(rank.rank)

    def on_withdrawal_heard(self, key: FlipKey, rank: Rank, round_number: int) -> None:
        """The mover hears, while the gate is still to open, that a rank is not there any more."""
        self._present.setdefault((key, round_number), set()).discard(rank)

    def on_withdrawn(self, rank: "RankProcess", flip_id: FlipId, round_number: int) -> None:
        """It took that back; whether in time is the coordinator's to say."""
        self._group.world.note(rank.name, "withdraws", flip_id, round_number)

    def on_enter(self, key: FlipKey, round_number: int) -> None:
        """The gate opens: everyone is present in this very round, and nothing is under way."""
        missing = {rank.rank for rank in self._group.ranks} - self._present.get((key, round_number), set())
        if missing:
            raise InvariantError("stale quorum", f"flip {key[1]} enters round {round_number} without ranks {missing}")
        self._group.moment("entered")
        run = self._group.scheduler.run
        flip = None if run is None or run.fence.generation != key[0] else run.flip
        # A mover that slept may enter what the log has abandoned: ranks are past it, and nobody follows.
        if flip is not None and flip.flip_id == key[1] and self._planes[key[0]].num_held:
            raise InvariantError(
                "channels empty", f"flip {key[1]} enters with {self._planes[key[0]].num_held} messages held"
            )

    def on_enter_said(self, key: FlipKey, last: Record | None) -> None:
        """Ranks are told to enter: a next life of the mover must know that."""
        if not isinstance(last, Entered):
            raise InvariantError("journal, then speak", f"flip {key[1]}: ENTER is said, the journal's last is {last}")

    def on_told(self, last: Record | None, concluded: Conclude) -> None:
        """The scheduler is told an outcome: whoever asks again must get the same."""
        if not isinstance(last, Concluded) or last.outcome is not concluded.outcome:
            raise InvariantError("journal, then speak", f"{concluded} is told, the journal's last is {last}")

    def on_committed(self, key: FlipKey) -> None:
        """The mover decides for COMMIT; the scheduler may have given it up by then, which the log alone tells."""
        missing = {rank.rank for rank in self._group.ranks} - self._verified.get(key, set())
        if missing:
            raise InvariantError("commit after all verified", f"flip {key[1]} without ranks {sorted(missing)}")

    def _must_be_verified(self, rank: "RankProcess", flip_id: FlipId) -> None:
        state = rank.participant.state
        if state is not ParticipantState.VERIFIED or rank.participant.flip_id != flip_id:
            raise InvariantError("commit after all verified", f"flip {flip_id}: {rank.name} is {state.value}")

    def on_flip_ended(self, run: "Run", ended: FlipEnded) -> None:
        """Counted; a clock that expires without a fault is a wedge somebody papered over."""
        if ended.outcome is FlipOutcome.COMMITTED:
            self.num_committed += 1
        else:
            self.num_abandoned += 1
        if ended.outcome is not None:
            self.outcomes.append(ended.outcome)
        is_late = "in time" in ended.reason or "no outcome within" in ended.reason
        faults = [fault for _, fault in self._faults]
        if is_late and not any(fault.is_patience for fault in faults):
            raise InvariantError(
                "convergence", f"nobody was stopped, and a flip is {ended.outcome}: {ended.reason}; {self.waits}"
            )
        if "no mover" in ended.reason and not any(fault.who == "mover" for fault in faults):
            raise InvariantError("convergence", f"the mover is there, and given up: {ended.reason}; {self.waits}")
        if ended.census is not None:
            self._frozen_time()

    @property
    def waits(self) -> str:
        """Which rank is in what."""
        run = self._group.scheduler.run
        return "no generation" if run is None else self._planes[run.fence.generation].waits

    def while_frozen(self, run: "Run", flip: FlipEntry) -> None:
        """Nothing changes hands while the flip is pending."""
        now = run.batcher._tables.pool.owned_runs()
        if now != self._owned:
            raise InvariantError("frozen blocks", f"blocks {self._owned} had owners at the FLIP, {now} have now")

    def on_thaw(self, run: "Run") -> None:
        """The outcome is written."""
        self.num_carried += len(run.batcher.open_request_ids)

    def _frozen_time(self) -> None:
        """Bounded, whoever is hurt; and short where nobody is."""
        frozen_ns = self._group.world.now_ns - self._frozen_ns
        slept_ns = sum(fault.for_ns for _, fault in self._faults if fault.who == "scheduler")
        bound_ns = FLIP_CLOCKS.frozen_ns + STEP_NS + 2 * slept_ns if self._faults else PATIENT_NS
        self.longest_frozen_ns = max(self.longest_frozen_ns, 0 if self._faults else frozen_ns)
        if frozen_ns > bound_ns:
            raise InvariantError("frozen time", f"the batch stood still for {frozen_ns / 1e6:.1f} ms")

    def on_lost(self, run: "Run", reason: str) -> None:
        """A generation ends only by a fault."""
        self.num_lost += 1
        if run.flip is not None:
            self._frozen_time()
        reasons = [at_ns + fault.for_ns >= run.begun_ns for at_ns, fault in self._faults if fault.may_end_generation]
        if not any(reasons) and not self._group.case.odds.breaks:
            raise InvariantError("generation lost", f"without a fault that could end it: {reason}")

    # Memory.

    def census(self, run: "Run") -> None:
        """Every block has its owner."""
        census = run.batcher.census()
        if not census.is_sound:
            raise InvariantError("census", f"{census}")
        self._rows_in_flight(run)

    def _rows_in_flight(self, run: "Run") -> None:
        """What a request waits for is what steps in flight sample for its present stay in the batch."""
        sampled = Counter(
            row.request.request_id
            for draft in run.batcher._in_flight.values()
            for row in draft.sampled
            if row.is_live and row.request.index is not None
        )
        for request in run.batcher._running:
            if request.num_in_flight != sampled[request.request_id]:
                raise InvariantError(
                    "rows in flight",
                    f"{request.request_id} waits for {request.num_in_flight} tokens, steps in flight sample "
                    f"{sampled[request.request_id]} for it",
                )

    def on_wrong_context(
        self, rank: "RankProcess", place: "Place", begin: int, found: list[int | None], sequence: int
    ) -> None:
        """A slot does not hold what its reader needs: says what it holds."""
        expected = place.chains[begin : begin + len(found)]
        at = next(at for at, chain in enumerate(found) if chain != expected[at])
        raise InvariantError(
            "context",
            f"{rank.name} step {sequence} reads {place.name} position {begin + at} in block "
            f"{place.blocks[begin // BLOCK_SLOTS]}: the slot holds {self._whose(found[at])}",
        )

    def _whose(self, chain: int | None) -> str:
        if chain is None:
            return "nothing (never written in this layout)"
        for client in self._group.router.clients:
            here = EMPTY
            for position, token in enumerate((*client.asked.prompt, *client.expected.token_ids)):
                here = chained(here, token)
                if here == chain:
                    return f"position {position} of {client.asked.name}, {letter(token)!r}"
        return "a history that no request has"

    # The end.

    def at_end(self) -> None:
        """Nothing is left to happen: nothing may be left to do."""
        group = self._group
        group.router.check_end()
        run = group.scheduler.run
        if run is None or not run.is_open:
            raise InvariantError("wedge", "no generation serves at the end")
        if run.flip is not None:
            raise InvariantError("wedge", f"flip {run.flip.flip_id} has no outcome at the end")
        if (attempt := run.attempts.attempt) is not None:
            raise InvariantError("wedge", f"flip {attempt.flip_id} is over and stands in the way of the next")
        batcher, census = run.batcher, run.batcher.census()
        if batcher.open_request_ids or batcher.num_in_flight:
            raise InvariantError(
                "wedge", f"{batcher.open_request_ids} open, {batcher.num_in_flight} steps in flight at the end"
            )
        if not census.is_sound or census.num_referenced:
            raise InvariantError("census", f"at the end: {census}")
        for rank in group.ranks:
            follower = rank.follower
            if (follower.sequence, follower.state, follower.layout) != (run.log.sequence, LogState.RUNNING, run.layout):
                raise InvariantError(
                    "wedge", f"{rank.name} is {follower.state.value} at {follower.sequence} of {run.log.sequence}"
                )
