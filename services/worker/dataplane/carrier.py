"""The data plane as the runner sees it: one interface, carried by shared memory on one host and by gloo elsewhere.

Every carrier raises the same CollectiveError, and its first failure is final: a timed-out pair is lost, and the
generation ends. Nothing relies on the order of a sum, although `shm` gives all ranks the same bits. Idle ranks wait in
no collective: they wait for plans. One thread per rank runs the data plane; `abort` and `counters` may come from any.

Shapes: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kernels.cpu.collectives import ShmCommunicator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.cpu.collectives import AbortReason, Purpose, ShmRegion

# Above the sentinel's 5 s, which names a stall first, and below the 30 s after which a parked step is given up.
DEFAULT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class CarrierCounters:
    """What a rank has done on the data plane since it attached; times in nanoseconds of waiting for others."""

    num_operations: int
    wait_ns: int
    abort_reason: AbortReason | None


class Carrier(Protocol):
    """What carries tensors between the ranks of a group. All tensors are contiguous and on this carrier's device."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def num_ranks(self) -> int:
        """The size of the group."""

    def all_reduce(self, tensor: Tensor, *, deadline_s: float, purpose: Purpose) -> None:
        """Sums float32 `tensor` over all ranks in place."""

    def all_gather_columns(
        self,
        part: Tensor,
        widths: Sequence[int],
        *,
        to_rank: int | None,
        deadline_s: float,
        purpose: Purpose,
    ) -> Tensor | None:
        """Puts [R, widths[rank]] of every rank side by side, as [R, sum(widths)].

        `to_rank` None means all ranks; a rank that takes nothing returns None. Widths may be uneven and zero.
        """

    def all_to_all(
        self, source: Tensor, sizes: Sequence[int], out: Tensor, *, deadline_s: float, purpose: Purpose
    ) -> None:
        """Gives every rank its part of `source`, which has `sizes[rank]` elements for each, the same sizes everywhere.

        `out`, of as many elements as ranks times the own size, takes what all have for this rank, in rank order. Sizes
        may be uneven and zero.
        """

    def broadcast(self, tensor: Tensor, from_rank: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Copies one rank's `tensor` over that of all."""

    def barrier(self, *, deadline_s: float, purpose: Purpose) -> None:
        """Returns once every rank has entered."""

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Sends; `tensor` may be changed on return. Waits only if too many earlier messages are not yet taken."""

    def recv(self, into: Tensor, from_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Takes the next message from a rank; its tag and size must be those given (MISMATCH)."""

    def publish_tokens(self, sequence: int, ids: Tensor) -> None:
        """On the sampling rank: makes a step's ids (int32 [R]) known to all. Sequences grow, gaps are allowed."""

    def take_tokens(self, sequence: int, *, deadline_s: float) -> Tensor:
        """Returns a step's ids (int32 [R]), waiting for them; may be asked again while the board still holds them."""

    def abort(self, reason: AbortReason) -> None:
        """Releases every wait of every rank."""

    def counters(self) -> CarrierCounters:
        """Returns the counts so far."""

    def close(self) -> None:
        """Lets go of what the carrier holds; no operation is in flight."""


class ShmCarrier:
    """Ranks of one host over the region they inherited. The region's owner closes it after the carrier."""

    def __init__(self, region: ShmRegion, rank: int) -> None:
        communicator = ShmCommunicator(region, rank)
        self._region = region
        self._communicator = communicator
        self._ids = torch.empty(region.max_rows, dtype=torch.int32)
        self.rank = rank
        self.num_ranks = region.num_ranks
        # The same signatures: no frame stands between the runner and these.
        self.all_reduce = communicator.all_reduce_sum
        self.all_to_all = communicator.all_to_all
        self.broadcast = communicator.broadcast
        self.barrier = communicator.barrier
        self.send = communicator.send
        self.recv = communicator.recv
        self.publish_tokens = communicator.publish
        self.abort = region.abort

    def all_gather_columns(
        self, part: Tensor, widths: Sequence[int], *, to_rank: int | None, deadline_s: float, purpose: Purpose
    ) -> Tensor | None:
        """See Carrier: shares go through the stages, straight into their columns."""
        rows, item_bytes = part.shape[0], part.element_size()
        takes = to_rank is None or to_rank == self.rank
        out = part.new_empty((rows, sum(widths))) if takes else None
        row_bytes = [width * item_bytes for width in widths]
        self._communicator.all_gather(part, row_bytes, out, deadline_s=deadline_s, purpose=purpose)
        return out

    def take_tokens(self, sequence: int, *, deadline_s: float) -> Tensor:
        """See Carrier: read from the board, which the sampling rank reads as well."""
        num_ids = self._communicator.read(sequence, self._ids, deadline_s=deadline_s)
        return self._ids[:num_ids].clone()

    def counters(self) -> CarrierCounters:
        """See Carrier: from this rank's mirror line."""
        words = self._region.rank_words(self.rank)
        reason = self._region.abort_reason()
        return CarrierCounters(words.num_operations, words.wait_ns, reason)

    def close(self) -> None:
        """See Carrier."""
        self._communicator.close()
