"""A step's inputs at fixed addresses: one set of buffers for each layout, filled by one upload and two gathers.

A step of T tokens and S rows uses the first T and S of each buffer, so that what is captured over them may be replayed.
Ids and blocks are gathered on the device, from the request table; the host sends where they are and never reads them.
On a host the buffers are numpy's own memory and one set is enough, since a step has ended before the next is prepared.
Never decides which rows run.

Shapes: T tokens, S rows (sequences), N sampled rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import StepInputs
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.worker.steps.table import RequestTable, Rows, TableLimits
from services.worker.steps.words import Int32s, Int64s


@dataclass(frozen=True, slots=True)
class _Fields:
    """What is sent for a step, in the order of memory: addresses and indexes of 64 bits first."""

    token_address: Int64s
    block_address: Int64s
    sampled_tokens: Int64s
    positions: Int32s
    slot_in_block: Int32s
    row_of_sequence: Int32s
    query_start: Int32s
    context_tokens: Int32s


class StepBuffers:
    """Inputs of one layout's steps."""

    def __init__(self, layout: LayoutKind, table: RequestTable) -> None:
        self.layout, self._table = layout, table
        widths, device = _widths(table.limits), table.state.words.device
        self._sent = torch.from_numpy(np.zeros(sum(widths), np.int32))
        """On the host; 32-bit words."""
        self._here = self._sent.to(device)
        host = _split(self._sent, widths)
        self._fields = _Fields(*(part.numpy() for part in host))
        self._parts = _split(self._here, widths)
        self._ids = torch.zeros(table.limits.max_batch_tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros_like(self._ids)
        self._shape = (0, 0, 0)
        self._inputs: StepInputs | None = None

    def fill(self, rows: Rows) -> StepInputs:
        """This step's inputs; they hold until the next call."""
        shape = (rows.num_tokens, len(rows.request), len(rows.sampled))
        self._write(rows, *shape)
        self._here.copy_(self._sent, non_blocking=True)
        if self._inputs is None or shape != self._shape:
            self._shape, self._inputs = shape, self._views(*shape)
        self._gather(self._inputs)
        return self._inputs

    def _write(self, rows: Rows, num_tokens: int, num_rows: int, num_sampled: int) -> None:
        fields, positions = self._fields, rows.positions()
        request = np.repeat(rows.request, rows.row_tokens)
        fields.token_address[:num_tokens] = self._table.token_addresses(request, positions)
        fields.block_address[:num_tokens] = self._table.block_addresses(request, positions // BLOCK_SLOTS)
        fields.sampled_tokens[:num_sampled] = rows.query_start[1:][rows.sampled] - 1
        fields.positions[:num_tokens] = positions
        fields.slot_in_block[:num_tokens] = positions % BLOCK_SLOTS
        fields.row_of_sequence[:num_rows] = rows.request
        fields.query_start[: num_rows + 1] = rows.query_start
        fields.context_tokens[:num_rows] = rows.context_tokens

    def _views(self, num_tokens: int, num_rows: int, num_sampled: int) -> StepInputs:
        _, _, sampled_tokens, positions, _, row_of_sequence, query_start, context_tokens = self._parts
        return StepInputs(
            num_tokens=num_tokens,
            input_ids=self._ids[:num_tokens],
            positions=positions[:num_tokens],
            slots=self._slots[:num_tokens],
            block_tables=self._table.blocks_RB,
            row_of_sequence=row_of_sequence[:num_rows],
            query_start=query_start[: num_rows + 1],
            context_tokens=context_tokens[:num_rows],
            sampled_tokens=sampled_tokens[:num_sampled],
        )

    def _gather(self, inputs: StepInputs) -> None:
        words, n = self._table.state.words, inputs.num_tokens
        token_address, block_address, _, _, slot_in_block, *_ = self._parts
        torch.index_select(words, 0, token_address[:n], out=inputs.input_ids)
        torch.index_select(words, 0, block_address[:n], out=inputs.slots)
        inputs.slots.mul_(BLOCK_SLOTS).add_(slot_in_block[:n])


def _widths(limits: TableLimits) -> tuple[int, ...]:
    """32-bit words of each field."""
    tokens, rows = limits.max_batch_tokens, limits.max_resident_requests
    return (2 * tokens, 2 * tokens, 2 * rows, tokens, tokens, rows, rows + 1, rows)


NUM_WIDE = 3
"""Fields of 64 bits."""


def _split(words: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    parts = torch.split(words, list(widths))
    return (*(part.view(torch.int64) for part in parts[:NUM_WIDE]), *parts[NUM_WIDE:])
