"""The data plane as steps and flips see it: one interface, carried by shared memory on one host and by gloo or NCCL
elsewhere.

Every call **enqueues**: it may return before a peer has come, its results are there for whatever is enqueued after it,
and it never waits for the stream that computes. On a host that stream is the calling thread, so there a call returns
when it is done. Where a peer does not come within the watch's deadline the call raises CollectiveError, or, where it
had returned, a later call or the watch's `check` does; the first failure is final, and the generation ends. Nothing
relies on the order of a sum, although `shm` gives all ranks the same bits. Idle ranks wait in no collective: they wait
for plans. One thread per rank runs the data plane; its watch may be used from any.

Shapes: R rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.cpu.collective_status import Purpose
    from services.worker.dataplane.watch import Watch


class Carrier(Protocol):
    """What carries tensors between the ranks of a group. All tensors are contiguous and on this carrier's device."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""

    @property
    def num_ranks(self) -> int:
        """The size of the group."""

    @property
    def watch(self) -> Watch:
        """What bounds its waits."""

    def all_reduce(self, tensor: Tensor, *, purpose: Purpose) -> None:
        """Sums float32 `tensor` over all ranks in place."""

    def all_gather_columns(
        self, part: Tensor, widths: Sequence[int], *, to_rank: int | None, purpose: Purpose
    ) -> Tensor | None:
        """Puts [R, widths[rank]] of every rank side by side, as [R, sum(widths)].

        `to_rank` None means all ranks; a rank that takes nothing returns None. Widths may be uneven and zero.
        """

    def all_to_all(self, source: Tensor, sizes: Sequence[int], out: Tensor, *, purpose: Purpose) -> None:
        """Gives every rank its part of `source`, which has `sizes[rank]` elements for each, the same sizes everywhere.

        `out`, of as many elements as ranks times the own size, takes what all have for this rank, in rank order. Sizes
        may be uneven and zero.
        """

    def broadcast(self, tensor: Tensor, from_rank: int, *, purpose: Purpose) -> None:
        """Copies one rank's `tensor` over that of all."""

    def barrier(self, *, purpose: Purpose) -> None:
        """Returns once every rank has entered: the one call that waits wherever it is made."""

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, purpose: Purpose) -> None:
        """Sends; `tensor` may be changed by what is enqueued after. Waits only for room in the channel."""

    def recv(self, into: Tensor, from_rank: int, tag: int, *, purpose: Purpose) -> None:
        """Takes the next message from a rank; its tag and size must be those given (MISMATCH)."""

    def publish_tokens(self, sequence: int, ids: Tensor) -> None:
        """On the sampling rank: makes a step's ids (int32 [R]) known to all. Sequences grow, gaps are allowed."""

    def take_tokens(self, sequence: int) -> Tensor:
        """A step's ids (int32 [R], on the host) once they have come; may be asked again while the board holds them."""

    def close(self) -> None:
        """Lets go of what the carrier holds; no operation is in flight."""
