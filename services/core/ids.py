"""The names of things that are counted, one type each, so that a block is never passed where a slot is meant."""

from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", str)
"""Made by the router; unique among its open requests."""

RequestIndex = NewType("RequestIndex", int)
"""Place in every rank's request table, in [0, max_resident_requests); reused once released."""

BlockId = NewType("BlockId", int)
"""One block of `BLOCK_SLOTS` slots, in [0, num_blocks); the same id in both layouts."""

TokenId = NewType("TokenId", int)
"""An entry of the model's vocabulary."""

Rank = NewType("Rank", int)
"""One member of the group, in [0, num_ranks); also its stage in PP and its tp_rank in TP."""

Generation = NewType("Generation", int)
"""One incarnation of the group; minted by the scheduler, grows over restarts, never 0."""

Epoch = NewType("Epoch", int)
"""Version of the layout within a generation: 1 at its start, +1 per committed flip."""

LogIndex = NewType("LogIndex", int)
"""Place of an entry in the step log, from 1, rising by one."""

FlipId = NewType("FlipId", int)
"""One attempt at a flip within a generation; never reused, whether it commits or not."""

BLOCK_SLOTS = 16
"""Slots of a block: the unit of allocation, of prefix reuse and of paged attention."""


class LayoutKind(Enum):
    """How the model is cut over the ranks."""

    PP = "pp"
    TP = "tp"

    @property
    def other(self) -> "LayoutKind":
        """Where a flip from here leads."""
        return LayoutKind.TP if self is LayoutKind.PP else LayoutKind.PP


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // BLOCK_SLOTS)
