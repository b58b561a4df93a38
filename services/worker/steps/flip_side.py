"""A flip as the model thread carries it out: park at the entry, do the work, execute the outcome, note what it took.

Decides nothing. At the entry every earlier step is collected and every sampled id is taken, so that nothing is under
way; an outcome holds every part of the rank to the layout that the log says.
"""

import time
from collections.abc import Callable, Mapping

from services.core.ids import FlipId, LayoutKind, LogIndex, Rank
from services.core.log import LogFollower, ProtocolError
from services.core.ring import RecordKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.rows.kv_cache import Pool
from services.worker.participation import FlipAnswer, Looked, Parked, Resumed, Switched, Worked, WorkLost
from services.worker.steps.active_layout import LayoutPart
from services.worker.steps.layout_evidence import check_parts
from services.worker.steps.pipeline import StepPipeline
from services.worker.steps.records import Records


class FlipSide:
    """The flips of one generation on one rank."""

    def __init__(
        self,
        rank: Rank,
        memory: RankMemory,
        follower: LogFollower,
        records: Records,
        steps: StepPipeline,
        pools: Mapping[LayoutKind, Pool],
    ) -> None:
        self._rank, self._memory, self._follower, self._records = rank, memory, follower, records
        self._steps, self._pools = steps, pools
        self._switched: tuple[FlipId, int] | None = None
        """The outcome whose first step is still to come, and when it was executed; wall clock."""

    def park(self, flip: FlipEntry, sequence: LogIndex) -> Parked:
        """Takes what is still to be taken, so that all channels are empty, and says what the flip would be here."""
        self._steps.read_tokens(sequence, sequence)
        plan = self._memory.plan(flip)
        self._records.write(RecordKind.PARKED, sequence)
        last_end = self._steps.last_end_unix_ns
        return Parked(flip.flip_id, last_end, time.time_ns(), not plan.refusal, plan.refusal, plan.hash)

    def work(self, flip_id: FlipId) -> Worked | WorkLost:
        """Read, seam, write and verify, between FLIP and its outcome. Raises `ProtocolError` outside a flip."""
        began_unix_ns = time.time_ns()
        flip, sequence = self._follower.flip, self._follower.sequence
        if flip is None or flip.flip_id != flip_id:
            raise ProtocolError(f"work for flip {flip_id}, parked for {flip.flip_id if flip else 'none'}")
        assert sequence is not None, "a flip is an entry"
        self._records.write(RecordKind.FLIP_WORK, sequence)
        answer = self._memory.work(flip, began_unix_ns)
        self._records.write(RecordKind.FLIP_DONE, sequence)
        return answer

    def look(self, flip_id: FlipId) -> Looked:
        """Whether the flip that this rank is parked for could begin now; of another one: it could not."""
        flip = self._follower.flip
        if flip is None or flip.flip_id != flip_id:
            return Looked(flip_id, f"not parked for flip {flip_id}")
        return Looked(flip_id, self._memory.obstacle(flip))

    def commit(self, commit: CommitEntry, sequence: LogIndex) -> Switched:
        """Switches, and proves it. Raises `HalfSwitchedError` where something is of the layout before."""
        self._steps.active.switch(commit.layout)
        self._records.write(RecordKind.COMMITTED, sequence)
        return self._after(commit.flip_id, is_committed=True)

    def abandon(self, abandon: AbandonEntry, sequence: LogIndex) -> Switched:
        """Goes on as before, and proves that it can. Raises `HalfSwitchedError` where something is not as before."""
        self._records.write(RecordKind.ABANDONED, sequence)
        return self._after(abandon.flip_id, is_committed=False)

    def _after(self, flip_id: FlipId, *, is_committed: bool) -> Switched:
        active, follower = self._steps.active, self._follower
        assert follower.layout is not None and follower.epoch is not None, "a flip is an entry of an epoch"
        assert not self._steps.num_unread, "every sampled id is taken at the FLIP entry"
        self._memory.settle(follower.layout)
        evidence = active.evidence(self._rank, follower, self._memory, self._pools)
        check_parts(LayoutPart, evidence, follower.layout, follower.epoch)
        self._steps.last_end_unix_ns = None
        self._switched = (flip_id, time.time_ns())
        return Switched(flip_id, is_committed)

    def note_first_step(self, notice: Callable[[FlipAnswer], None]) -> None:
        """A step begins: after an outcome the first one is its last word."""
        if self._switched is not None:
            flip_id, switched_unix_ns = self._switched
            self._switched = None
            notice(Resumed(flip_id, switched_unix_ns, time.time_ns()))
