"""What a flip takes beside pools and weights while bytes are on their way: the bounds, and what they add up to.

Pure. Ranks take what is said here at start and nothing while a flip runs; the ledger prices the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.blocks import kv_block_bytes
from services.core.ids import LayoutKind
from services.core.layout import Layout

MIB = 1 << 20
MAX_CHUNK_BYTES = 1 * MIB
"""Of one message: large against a message's cost, small against the caches it goes through."""
PAGE_STAGING_BYTES = 4 * MIB
"""Of each rank, beside an arena whose pages change places."""
BATCH_BYTES = 32 * MIB
"""Of each rank, where pools take turns with one memory: rows that leave a pool and rows that come into one are held
here, some blocks at a time. Smaller batches mean more verdicts of the group in a flip."""
POOL_PIECE_BYTES = 16 * 1024
"""What such pools are backed by at a time on a host."""
EDGE_PIECES = 2
"""Of each plane of such a pool, what lies across the border between blocks that have gone and blocks that have not."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Rows of one model as its ranks move them."""

    layouts: Mapping[LayoutKind, Layout]
    num_kv_heads: int
    head_block_bytes: int
    """Of one block of one KV head in one layer, keys and values."""

    @property
    def least_message_bytes(self) -> int:
        """What a carrier must hold of one message, so that a block of one layer need not be cut."""
        return self.num_kv_heads * self.head_block_bytes

    def message_bytes(self, chunk_bytes: int) -> int:
        """Of one message's buffer."""
        return max(chunk_bytes, self.least_message_bytes)

    def batch_blocks(self, batch_bytes: int = BATCH_BYTES) -> int:
        """Live blocks that go at a time between pools that take turns: as many on every rank."""
        ranks = range(next(iter(self.layouts.values())).num_ranks)
        most = max(sum(self._block_bytes(layout, rank) for layout in self.layouts.values()) for rank in ranks)
        return max(1, batch_bytes // max(most, 1))

    def batch_bytes(self, rank: int, batch_bytes: int = BATCH_BYTES) -> int:
        """Of a batch's rows on one rank, as they leave one pool and as they come into the other."""
        own = sum(self._block_bytes(layout, rank) for layout in self.layouts.values())
        return self.batch_blocks(batch_bytes) * own

    def edge_bytes(self, rank: int, piece_bytes: int) -> int:
        """What both pools of a rank may hold at a seam beyond their rows."""
        num_planes = sum(2 * len(layout.shares[rank].layers) for layout in self.layouts.values())
        return EDGE_PIECES * piece_bytes * num_planes

    def _block_bytes(self, layout: Layout, rank: int) -> int:
        """Of one block that the rank holds whole; by tokens it holds all heads of some blocks."""
        share = layout.shares[rank]
        num_heads = len(share.kv_heads) if layout.kv_tokens is None else self.num_kv_heads
        return len(share.layers) * num_heads * self.head_block_bytes


def row_sizes(layouts: Mapping[LayoutKind, Layout], num_kv_heads: int, head_dim: int, element_bytes: int) -> RowSizes:
    """`element_bytes`: of one number of the cache."""
    return RowSizes(layouts, num_kv_heads, kv_block_bytes(1, 1, head_dim, element_bytes))


def chunk_bytes(message_bytes: int) -> int:
    """Largest message of a flip on a carrier whose messages are bounded."""
    return min(MAX_CHUNK_BYTES, message_bytes)
