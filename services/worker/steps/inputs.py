"""One step's rows as the model takes them: tensors over the resident table's own arrays, nothing gathered twice.

Never decides which rows run. Shapes: T tokens, S rows (sequences), N sampled rows.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.core.ids import BLOCK_SLOTS
from services.worker.steps.table import Int32s, RequestTable, Rows


@dataclass(frozen=True, slots=True)
class Batch:
    """What attention, rotary embedding and sampling need to know of a step; int32 unless said."""

    num_tokens: int
    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T] where each token's key and value go: block id * 16 + place in the block."""
    block_tables: Tensor
    """[R, B] of the resident table."""
    row_of_sequence: Tensor
    """[S] into block_tables."""
    query_start: Tensor
    """[S + 1]"""
    context_tokens: Tensor
    """[S]"""
    sampled_tokens: Tensor
    """[N] indexes into T of the tokens whose logits are wanted; int64."""

    @property
    def num_sampled(self) -> int:
        """N."""
        return self.sampled_tokens.numel()

    def on(self, place: torch.device) -> "Batch":
        """The same with its tensors there: itself, where they are."""
        if place.type == "cpu":
            return self
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value.to(place) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**{**values, **tensors})


def make_batch(resident: RequestTable, rows: Rows, input_ids: Int32s) -> Batch:
    """The step's batch; arrays are its own, except the block tables, which are the resident table's."""
    positions = rows.positions()
    blocks = resident.blocks[np.repeat(rows.request, rows.row_tokens), positions // BLOCK_SLOTS]
    slots = blocks * BLOCK_SLOTS + positions % BLOCK_SLOTS
    last_tokens = rows.query_start[1:][rows.sampled].astype(np.int64) - 1
    return Batch(
        num_tokens=rows.num_tokens,
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slots=torch.from_numpy(slots.astype(np.int32)),
        block_tables=torch.from_numpy(resident.blocks),
        row_of_sequence=torch.from_numpy(rows.request.astype(np.int32)),
        query_start=torch.from_numpy(rows.query_start),
        context_tokens=torch.from_numpy(rows.context_tokens),
        sampled_tokens=torch.from_numpy(last_tokens),
    )
