"""A step's inputs at fixed addresses: one set of buffers for each layout, filled by one upload and one gather.

A step of T tokens and S rows uses the first T and S of each buffer, so that what is captured over them may be replayed.
Ids and blocks are gathered on the device, from the request table; the host sends where they are and never reads them.
On a host the buffers are numpy's own memory and one set is enough, since a step has ended before the next is prepared.
Never decides which rows run.

Shapes: T tokens, S rows (sequences), N sampled rows.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.backend import StepInputs
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.worker.steps.table import RequestTable, Rows, TableLimits


class StepBuffers:
    """Inputs of one layout's steps: 32-bit words, what is sent in the order of `_widths`, and what is gathered."""

    def __init__(self, layout: LayoutKind, table: RequestTable) -> None:
        self.layout, self._table = layout, table
        widths, device = _widths(table.limits), table.state.words.device
        self._sent = torch.from_numpy(np.zeros(sum(widths), np.int32))
        """On the host."""
        self._here = self._sent.to(device)
        self._fields = [part.numpy() for part in _split(self._sent, widths)]
        self._parts = _split(self._here, widths)
        self._gathered = torch.zeros(2 * table.limits.max_batch_tokens, dtype=torch.int32, device=device)
        self._shape = (0, 0, 0)
        self._inputs: StepInputs | None = None
        self._gathers: tuple[Tensor, ...] = ()

    def fill(self, rows: Rows) -> StepInputs:
        """This step's inputs; they hold until the next call."""
        shape = (rows.num_tokens, len(rows.request), len(rows.sampled))
        self._write(rows, *shape)
        self._here.copy_(self._sent, non_blocking=True)
        if self._inputs is None or shape != self._shape:
            self._shape, self._inputs = shape, self._views(*shape)
        addresses, gathered, slot_in_block = self._gathers
        torch.index_select(self._table.state.words, 0, addresses, out=gathered)
        torch.add(slot_in_block, self._inputs.slots, alpha=BLOCK_SLOTS, out=self._inputs.slots)
        return self._inputs

    def _write(self, rows: Rows, num_tokens: int, num_rows: int, num_sampled: int) -> None:
        addresses, sampled_tokens, positions, slot_in_block, row_of_sequence, query_start, context_tokens = self._fields
        request, position = rows.tokens()
        addresses[:num_tokens] = self._table.token_addresses(request, position)
        addresses[num_tokens : 2 * num_tokens] = self._table.block_addresses(request, position // BLOCK_SLOTS)
        sampled_tokens[:num_sampled] = rows.query_start[1:][rows.sampled] - 1
        positions[:num_tokens] = position
        slot_in_block[:num_tokens] = position % BLOCK_SLOTS
        row_of_sequence[:num_rows] = rows.request
        query_start[: num_rows + 1] = rows.query_start
        context_tokens[:num_rows] = rows.context_tokens

    def _views(self, num_tokens: int, num_rows: int, num_sampled: int) -> StepInputs:
        addresses, sampled_tokens, positions, slot_in_block, row_of_sequence, query_start, context_tokens = self._parts
        gathered = self._gathered[: 2 * num_tokens]
        self._gathers = (addresses[: 2 * num_tokens], gathered, slot_in_block[:num_tokens])
        return StepInputs(
            num_tokens=num_tokens,
            input_ids=gathered[:num_tokens],
            positions=positions[:num_tokens],
            slots=gathered[num_tokens:],
            block_tables=self._table.blocks_RB,
            row_of_sequence=row_of_sequence[:num_rows],
            query_start=query_start[: num_rows + 1],
            context_tokens=context_tokens[:num_rows],
            sampled_tokens=sampled_tokens[:num_sampled],
        )


NUM_WIDE = 2
"""Fields of 64 bits, which come first: addresses of ids and then of blocks, and the sampled tokens."""


def _widths(limits: TableLimits) -> list[int]:
    """32-bit words of each field: besides those, positions, places in a block, and what attention needs of the rows."""
    tokens, rows = limits.max_batch_tokens, limits.max_resident_requests
    return [4 * tokens, 2 * rows, tokens, tokens, rows, rows + 1, rows]


def _split(words: Tensor, widths: list[int]) -> list[Tensor]:
    parts = torch.split(words, widths)
    return [*(part.view(torch.int64) for part in parts[:NUM_WIDE]), *parts[NUM_WIDE:]]
