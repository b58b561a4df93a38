"""The KV pool's blocks: which are free, and in which runs the others lie.

One allocator per group, in the scheduler, issues block ids for the life of a generation; an id means the same rows in
both layouts. Never knows what a block holds or who owns it: owners are request tables and the prefix tree.

Invariants: a block is free or it has exactly one owner; taking from nothing and giving back twice are errors, not
states.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.core.ids import BLOCK_SLOTS, BlockId


class BlockPool:
    """Free blocks of [0, num_blocks), last freed first: what was just in use is what caches still hold."""

    __slots__ = ("_free", "_is_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        """Begins with every block free.

        Raises:
            ValueError: no block at all.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def is_free(self, block: BlockId) -> bool:
        """Whether nobody owns `block`."""
        return bool(self._is_free[block])

    def take(self) -> BlockId | None:
        """A block for a new owner, or None where all are owned."""
        if not self._free:
            return None
        block = self._free.pop()
        self._is_free[block] = 0
        return block

    def give(self, block: BlockId) -> None:
        """Takes back a block from its owner; the next `take` may hand it out."""
        assert not self._is_free[block], f"block {block} is given back twice: it has no owner"
        self._is_free[block] = 1
        self._free.append(block)

    @property
    def owned_end(self) -> int:
        """One above the highest block with an owner; 0: none has."""
        return self._is_free.rfind(0) + 1

    def prefer_low(self) -> None:
        """Hands out low ids first from here on, of those that are free now."""
        self._free.sort(reverse=True)

    def owned_runs(self) -> tuple[tuple[BlockId, int], ...]:
        """Every owned block as runs (begin, length): rising, disjoint, none empty."""
        return block_runs(BlockId(block) for block in range(self.num_blocks) if not self._is_free[block])


def block_runs(blocks: Iterable[BlockId]) -> tuple[tuple[BlockId, int], ...]:
    """Rising block ids as maximal runs (begin, length) of neighbours."""
    runs: list[tuple[BlockId, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class PoolCensus:
    """Every block counted from its owners' side, not from the allocator's: what does not add up is a leak."""

    num_total: int
    num_free: int
    num_cached: int
    """In the prefix tree, held by no request."""
    num_referenced: int
    """Held by at least one request."""
    unaccounted: tuple[BlockId, ...]
    """Blocks with no owner, or with owners that contradict each other; empty in a sound pool."""

    @property
    def is_sound(self) -> bool:
        """Whether free + cached + referenced is the whole pool and every block has its owner."""
        return not self.unaccounted and self.num_free + self.num_cached + self.num_referenced == self.num_total


def kv_block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of keys and values of one block over all layers, whichever way ranks share it."""
    return 2 * BLOCK_SLOTS * num_layers * num_kv_heads * head_dim * element_bytes
