"""The carrier for ranks of one host: the region that they inherited; its waits are in C and release the interpreter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kernels.cpu.collectives import ShmCommunicator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.cpu.collectives import AbortReason, Purpose, ShmRegion


class ShmWatch:
    """See Watch: the abort word and this rank's mirror line, which the waits themselves keep and poll."""

    def __init__(self, region: ShmRegion, rank: int, deadline_s: float) -> None:
        self._region, self._rank, self.deadline_s = region, rank, deadline_s
        self.abort = region.abort

    @property
    def abort_reason(self) -> AbortReason | None:
        """See Watch."""
        return self._region.abort_reason()

    @property
    def num_operations(self) -> int:
        """See Watch."""
        return self._region.rank_words(self._rank).num_operations

    @property
    def waited_ns(self) -> int:
        """See Watch: for others alone, without the copying and summing."""
        return self._region.waited_ns(self._rank)

    def check(self) -> None:
        """See Watch: every call has raised what was to be raised."""


class ShmCarrier:
    """Ranks of one host over the region they inherited. The region's owner closes it after the carrier."""

    def __init__(self, region: ShmRegion, rank: int, deadline_s: float) -> None:
        communicator = ShmCommunicator(region, rank)
        self._communicator = communicator
        self._ids = torch.empty(region.max_rows, dtype=torch.int32)
        self.rank = rank
        self.num_ranks = region.num_ranks
        self.watch = ShmWatch(region, rank, deadline_s)
        # The same signatures but for the deadline: no frame stands between a step and these.
        self.all_reduce = partial(communicator.all_reduce_sum, deadline_s=deadline_s)
        self.all_to_all = partial(communicator.all_to_all, deadline_s=deadline_s)
        self.broadcast = partial(communicator.broadcast, deadline_s=deadline_s)
        self.barrier = partial(communicator.barrier, deadline_s=deadline_s)
        self.send = partial(communicator.send, deadline_s=deadline_s)
        self.recv = partial(communicator.recv, deadline_s=deadline_s)
        self.publish_tokens = communicator.publish

    def all_gather_columns(
        self, part: Tensor, widths: Sequence[int], *, to_rank: int | None, purpose: Purpose
    ) -> Tensor | None:
        """See Carrier: shares go through the stages, straight into their columns."""
        rows, item_bytes = part.shape[0], part.element_size()
        takes = to_rank is None or to_rank == self.rank
        out = part.new_empty((rows, sum(widths))) if takes else None
        row_bytes = [width * item_bytes for width in widths]
        self._communicator.all_gather(part, row_bytes, out, deadline_s=self.watch.deadline_s, purpose=purpose)
        return out

    def take_tokens(self, sequence: int) -> Tensor:
        """See Carrier: read from the board, which the sampling rank reads as well."""
        num_ids = self._communicator.read(sequence, self._ids, deadline_s=self.watch.deadline_s)
        return self._ids[:num_ids].clone()

    def close(self) -> None:
        """See Carrier."""
        self._communicator.close()
