"""One flat row of 32-bit words where the device is: what a step changes in it goes there in one upload and one scatter.

On a host the words are numpy's own memory, so an upload moves nothing. Never reads a word back. Addresses of one
scatter are distinct; who makes them keeps them in range.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WordChanges:
    """Which words become what; [M] each."""

    addresses: Int64s
    values: Int32s


NO_CHANGES = WordChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


def joined(changes: Iterable[WordChanges]) -> WordChanges:
    """All of them as one."""
    every = [change for change in changes if len(change.addresses)]
    if not every:
        return NO_CHANGES
    return WordChanges(
        np.concatenate([change.addresses for change in every]), np.concatenate([change.values for change in every])
    )


class DeviceWords:
    """`words`: int32 [num_words], zero at first; of a host backed when they are first touched."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.words = torch.from_numpy(np.zeros(num_words, np.int32)).to(device)

    def change(self, changes: WordChanges) -> None:
        """Enqueues one upload and one scatter; nothing where nothing changes."""
        count = len(changes.addresses)
        if not count:
            return
        packed = np.empty(3 * count, np.int32)
        packed[: 2 * count].view(np.int64)[:] = changes.addresses
        packed[2 * count :] = changes.values
        here = torch.from_numpy(packed).to(self.words.device, non_blocking=True)
        self.words.index_copy_(0, here[: 2 * count].view(torch.int64), here[2 * count :])

    def put(self, addresses: Int64s, values: Tensor) -> None:
        """Enqueues a scatter of values, int32 [M], that are on the device already."""
        self.words.index_copy_(0, torch.from_numpy(addresses).to(self.words.device, non_blocking=True), values)
