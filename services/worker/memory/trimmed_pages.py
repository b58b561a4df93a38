"""A step's word on memory: pages of blocks that it takes are had, those of blocks that it calls dead are given back.

Before the step is computed. A rank decides nothing, but it does not lose rows on the scheduler's word alone: where its
own block tables have a block that is said to be dead, it keeps every page, says so, and the step goes on. A FLIP is
never pending here, as the log has no step before its outcome.
"""

from dataclasses import dataclass

from services.core.ids import BlockId
from services.core.step import StepPlan
from services.worker.memory.rank_memory import RankMemory
from services.worker.steps.table import RequestTable


@dataclass(frozen=True, slots=True)
class Released:
    """What came of a step's `dead_from`."""

    dead_from: BlockId
    own_end: int
    """One above the highest block in this rank's tables."""
    num_bytes: int
    """Given back, by the system's account."""

    @property
    def is_refused(self) -> bool:
        """Whether rows were to go that are live by this rank's own evidence: it kept everything."""
        return self.own_end > self.dead_from


def settle_pages(memory: RankMemory, resident: RequestTable, plan: StepPlan) -> Released | None:
    """Does it for one step, whose deltas `resident` has; None: nothing is said to be dead.

    Raises:
        BackingError: there is no memory for blocks that the step takes.
    """
    new = (*plan.block_id, *(block for request in plan.admitted for block in request.block_ids))
    memory.rows.back_below(max(new, default=-1) + 1)
    if plan.dead_from is None:
        return None
    own_end = resident.blocks_end
    num_bytes = 0 if own_end > plan.dead_from else memory.rows.release_above(plan.dead_from)
    return Released(plan.dead_from, own_end, num_bytes)
