"""One step's rows as the model takes them: tensors over the request table's own arrays, nothing gathered twice.

Never decides which rows run. Shapes: T tokens, S rows (sequences), N sampled rows.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.backend import StepInputs
from services.core.ids import BLOCK_SLOTS
from services.worker.steps.table import Int32s, RequestTable, Rows


def inputs_on(inputs: StepInputs, place: torch.device) -> StepInputs:
    """The same with its tensors there: itself, where they are."""
    if place.type == "cpu":
        return inputs
    values: dict[str, Any] = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    tensors = {name: value.to(place) for name, value in values.items() if isinstance(value, Tensor)}
    return StepInputs(**{**values, **tensors})


def make_inputs(resident: RequestTable, rows: Rows, input_ids: Int32s) -> StepInputs:
    """The step's inputs; arrays are its own, except the block tables, which are the resident table's."""
    positions = rows.positions()
    blocks = resident.blocks[np.repeat(rows.request, rows.row_tokens), positions // BLOCK_SLOTS]
    slots = blocks * BLOCK_SLOTS + positions % BLOCK_SLOTS
    last_tokens = rows.query_start[1:][rows.sampled].astype(np.int64) - 1
    return StepInputs(
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
