"""The worker's resident table driven beside the simulator's own, in some schedules: both must read the same tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from services.core.ids import LogIndex
from services.core.step import ResetEntry, StepPlan
from services.worker.steps.inputs import StepBuffers
from services.worker.steps.table import RequestTable, TableLimits
from tests.sim.processes.resident_places import Places
from tests.sim.processes.toy_model import VOCAB
from tests.sim.processes.world import InvariantError


class ShippedPlaces(Places):
    """Places that ask the shipped table at every step."""

    def __init__(self, reset: ResetEntry, max_batch_tokens: int) -> None:
        super().__init__(reset.max_resident_requests)
        self._table = RequestTable(
            TableLimits(
                max_resident_requests=reset.max_resident_requests,
                max_context_tokens=reset.max_context_tokens,
                num_blocks=reset.num_blocks,
                vocab_size=VOCAB,
                max_batch_tokens=max_batch_tokens,
            )
        )
        self._buffers = StepBuffers(reset.layout, self._table)

    def apply_tokens(self, step: LogIndex, targets: Sequence[tuple[int, int]], ids: Sequence[int]) -> None:
        super().apply_tokens(step, targets, ids)
        index, position = (np.asarray(values, np.int64) for values in zip(*targets, strict=True))
        self._table.apply_tokens(step, index, position, torch.tensor(ids, dtype=torch.int32))

    def apply_deltas(self, plan: StepPlan, sequence: LogIndex) -> None:
        super().apply_deltas(plan, sequence)
        self._table.apply_deltas(plan, sequence)

    def ends(self, plan: StepPlan) -> list[int]:
        ends = super().ends(plan)
        read = self._buffers.fill(self._table.rows(plan)).input_ids.tolist()
        own = [
            token
            for index, start, length in zip(plan.row_request_index, plan.row_start, plan.row_num_tokens, strict=True)
            for token in self.by_index[index].tokens[start : start + length]
        ]
        if read != own:
            raise InvariantError("shipped table", f"the worker's table reads {read}, the log says {own}")
        return ends
