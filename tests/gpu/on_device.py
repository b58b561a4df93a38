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
        tensor.copy_(moved)

    def all_gather_columns(
        self, part: Tensor, widths: Sequence[int], *, to_rank: int | None, purpose: Purpose
    ) -> Tensor | None:
        moved = part.to(self._place)
        found = self._carrier.all_gather_columns(moved, widths, to_rank=to_rank, purpose=purpose)
        return None if found is None else found.cpu()

    def all_to_all(self, source: Tensor, sizes: Sequence[int], out: Tensor, *, purpose: Purpose) -> None:
        moved = out.to(self._place)
        self._carrier.all_to_all(source.to(self._place), sizes, moved, purpose=purpose)
        out.copy_(moved)

    def broadcast(self, tensor: Tensor, from_rank: int, *, purpose: Purpose) -> None:
        moved = tensor.to(self._place)
        self._carrier.broadcast(moved, from_rank, purpose=purpose)
        tensor.copy_(moved)

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, purpose: Purpose) -> None:
        self._carrier.send(tensor.to(self._place), to_rank, tag, purpose=purpose)

    def recv(self, into: Tensor, from_rank: int, tag: int, *, purpose: Purpose) -> None:
        moved = into.to(self._place)
        self._carrier.recv(moved, from_rank, tag, purpose=purpose)
        into.copy_(moved)

    def close(self) -> None:
        self._carrier.close()
