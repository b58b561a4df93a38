"""One rank's end of what a flip sends: messages, words gathered from all, and one verdict of the whole group.

Never decides what is sent, nor what a verdict leads to. A wait that ends without its peer raises, and an abort ends
every peer's wait, and the generation with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.collective_status import AbortReason, Purpose
from services.core.flip.work_table import Answer, Verdict
from services.core.ids import Rank
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.tally import Tally

_SIGN, _WRAP = 1 << 63, 1 << 64


@dataclass(frozen=True, slots=True)
class MoveBounds:
    """Of one rank's moves."""

    chunk_bytes: int
    """Largest message; the carrier holds two of them in each direction. Not below one block of one layer."""
    verdict_wait_s: float = 2.0
    """How long a rank's verdict on a flip may wait for memory or an image to be had; serving stands still meanwhile."""


class Wire:
    """Used by the model thread, within a flip's work only."""

    def __init__(self, carrier: Carrier, bounds: MoveBounds) -> None:
        self._carrier, self.bounds, self.tally = carrier, bounds, Tally()
        self.rank, self.num_ranks = Rank(carrier.rank), carrier.num_ranks

    def send(self, tensor: Tensor, peer: Rank, number: int) -> None:
        """Sends message `number`; `tensor` may be changed on return. Raises CollectiveError."""
        self._carrier.send(tensor, peer, number, purpose=Purpose.FLIP)

    def take(self, into: Tensor, peer: Rank, number: int) -> None:
        """Takes message `number`, of exactly these bytes. Raises CollectiveError."""
        self._carrier.recv(into, peer, number, purpose=Purpose.FLIP)

    def gathered(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, each in [0, 2^64) and equally many, by rank. Raises CollectiveError."""
        signed = [value - _WRAP if value >= _SIGN else value for value in values]
        own = torch.tensor([signed], dtype=torch.int64)
        if self.num_ranks > 1:
            widths = [len(values)] * self.num_ranks
            everyone = self._carrier.all_gather_columns(own, widths, to_rank=None, purpose=Purpose.FLIP)
            assert everyone is not None
            own = everyone
        rows: list[list[int]] = own.view(self.num_ranks, -1).tolist()
        return [[value % _WRAP for value in row] for row in rows]

    def agree(self, failure: str, digest: int) -> Answer | None:
        """One verdict: None if every rank is well and means the same by `digest`. Raises CollectiveError."""
        found = self.gathered([int(not failure), digest])
        failed = [rank for rank, (is_well, _) in enumerate(found) if not is_well]
        if failure:
            return Answer(Verdict.FAILED_HERE, failure)
        if failed:
            return Answer(Verdict.FAILED_ELSEWHERE, f"ranks {failed} have failed and say why")
        if len({found_digest for _, found_digest in found}) > 1:
            digests = [f"{found_digest:016x}" for _, found_digest in found]
            return Answer(Verdict.FAILED_ELSEWHERE, f"plans differ, {digests} by rank")
        return None

    def abort(self) -> None:
        """Ends the wait of every peer, by this rank's name."""
        self._carrier.watch.abort(AbortReason.STEP_FAILED)
