"""A carrier whose tensors are on a device, for callers whose tensors are in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.collectives import Purpose
from services.worker.dataplane.carrier import Carrier


class OnDevice:
    """Implements Carrier: copies to the device, lets it move, copies back."""

    def __init__(self, carrier: Carrier, place: torch.device) -> None:
        self._carrier, self._place = carrier, place
        self.rank, self.num_ranks, self.watch = carrier.rank, carrier.num_ranks, carrier.watch
        self.barrier, self.publish_tokens, self.take_tokens = (
            carrier.barrier,
            carrier.publish_tokens,
            carrier.take_tokens,
        )

    def all_reduce(self, tensor: Tensor, *, purpose: Purpose) -> None:
        moved = tensor.to(self._place)
        self._carrier.all_reduce(moved, purpose=purpose)
        self._back(moved, tensor)

    def all_gather_columns(
        self, part: Tensor, widths: Sequence[int], *, to_rank: int | None, purpose: Purpose
    ) -> Tensor | None:
        found = self._carrier.all_gather_columns(part.to(self._place), widths, to_rank=to_rank, purpose=purpose)
        return None if found is None else self._back(found, torch.empty_like(found, device="cpu"))

    def all_to_all(self, source: Tensor, sizes: Sequence[int], out: Tensor, *, purpose: Purpose) -> None:
        moved = out.to(self._place)
        self._carrier.all_to_all(source.to(self._place), sizes, moved, purpose=purpose)
        self._back(moved, out)

    def broadcast(self, tensor: Tensor, from_rank: int, *, purpose: Purpose) -> None:
        moved = tensor.to(self._place)
        self._carrier.broadcast(moved, from_rank, purpose=purpose)
        self._back(moved, tensor)

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, purpose: Purpose) -> None:
        self._carrier.send(tensor.to(self._place), to_rank, tag, purpose=purpose)

    def recv(self, into: Tensor, from_rank: int, tag: int, *, purpose: Purpose) -> None:
        moved = into.to(self._place)
        self._carrier.recv(moved, from_rank, tag, purpose=purpose)
        self._back(moved, into)

    def _back(self, moved: Tensor, into: Tensor) -> Tensor:
        """Waits for the device, as a step does when it is collected: only then a failure there is known."""
        into.copy_(moved)
        self.watch.check()
        return into

    def close(self) -> None:
        self._carrier.close()
