"""One rank's end of what a flip sends: messages, words gathered from all, and one verdict of the whole group.

Never decides what is sent. A failure before or after the exchange is reduced over the group, so that all go on or all
stop; one within it ends every peer's wait by an abort, and the generation with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.collective_status import AbortReason, Purpose
from services.core.ids import Rank
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.rank_memory import DataPlaneLostError, RestorableError

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
        self._carrier, self.bounds = carrier, bounds
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

    def agree(self, failure: Exception | None, plan_hash: int) -> None:
        """One verdict: raises RestorableError on every rank if one has failed, or means another plan."""
        found = self.gathered([int(failure is None), plan_hash])
        failed = [rank for rank, (is_well, _) in enumerate(found) if not is_well]
        if failure is not None:
            raise RestorableError(f"rank {self.rank}: {failure}") from failure
        if failed:
            raise RestorableError(f"ranks {failed} have failed and say why: all stay with the layout before")
        hashes = [found_hash for _, found_hash in found]
        if len(set(hashes)) > 1:
            raise RestorableError(f"plans differ, {[f'{value:016x}' for value in hashes]} by rank: nothing was sent")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails within ends the wait of every peer, by name, and the generation; a verdict passes."""
        try:
            yield
        except RestorableError:
            raise
        except Exception as error:
            self._carrier.watch.abort(AbortReason.STEP_FAILED)
            raise DataPlaneLostError(f"rank {self.rank}: {type(error).__name__}: {error}") from error
