"""The other ranks of a group as model code sees them: sums and exchanges by purpose, without deadlines or carriers.

A layer's collectives are part of its own sequence of calls. Every call raises CollectiveError where a peer does not
come within the deadline. A group of one rank has no peers: its sums are whole.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.collective_status import Purpose
from services.core.layout import RankShare
from services.worker.dataplane.carrier import Carrier
from services.worker.steps.wait_clock import WaitClock


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's end, under one layout."""

    carrier: Carrier
    shares: tuple[RankShare, ...]
    """`[rank]`"""
    clock: WaitClock
    deadline_s: float

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.carrier.rank

    def sum(self, partial: Tensor, purpose: Purpose) -> None:
        """Sums a contiguous tensor over the ranks, in place."""
        self.clock.timed(self.carrier.all_reduce, partial, deadline_s=self.deadline_s, purpose=purpose)

    def gather(self, part_TW: Tensor, widths: list[int], purpose: Purpose) -> Tensor:
        """Everybody's [T, width] side by side, on every rank."""
        everyone = self.clock.timed(
            self.carrier.all_gather_columns, part_TW, widths, to_rank=None, deadline_s=self.deadline_s, purpose=purpose
        )
        assert everyone is not None, "every rank takes it"
        return everyone

    def exchange(self, source: Tensor, sizes: list[int], out: Tensor, purpose: Purpose) -> None:
        """Gives every rank its part of `source` and takes what all have for this one; see Carrier.all_to_all."""
        self.clock.timed(self.carrier.all_to_all, source, sizes, out, deadline_s=self.deadline_s, purpose=purpose)
