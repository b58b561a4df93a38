"""The other ranks of a group as model code sees them: sums and exchanges by purpose, without deadlines or carriers.

A layer's collectives are part of its own sequence of calls, and enqueue as the carrier's calls do; each raises
CollectiveError where one has failed. A group of one rank has no peers: its sums are whole.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.collective_status import Purpose
from services.core.layout import RankShare
from services.worker.dataplane.carrier import Carrier


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's end, under one layout."""

    carrier: Carrier
    shares: tuple[RankShare, ...]
    """`[rank]`"""

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.carrier.rank

    def sum(self, partial: Tensor, purpose: Purpose) -> None:
        """Sums a contiguous tensor over the ranks, in place."""
        self.carrier.all_reduce(partial, purpose=purpose)

    def gather(self, part_TW: Tensor, widths: list[int], purpose: Purpose) -> Tensor:
        """Everybody's [T, width] side by side, on every rank."""
        everyone = self.carrier.all_gather_columns(part_TW, widths, to_rank=None, purpose=purpose)
        assert everyone is not None, "every rank takes it"
        return everyone

    def exchange(self, source: Tensor, sizes: list[int], out: Tensor, purpose: Purpose) -> None:
        """Gives every rank its part of `source` and takes what all have for this one; see Carrier.all_to_all."""
        self.carrier.all_to_all(source, sizes, out, purpose=purpose)
