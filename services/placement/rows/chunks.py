"""A leg of rows in parts of bounded size, the same parts on both of its ends.

Pure. A part has some layers and some of the runs' blocks, all heads of the leg; a block of one layer is never cut. As
many blocks as fit come first, since those of one layer lie side by side; layers are added where all blocks fit. The
leg's parts, one after the other, are all of it once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.core.ids import BlockId
from services.core.layout import Span
from services.placement.rows.transfers import BlockRuns, RowTransfer


@dataclass(frozen=True, slots=True)
class RowChunk:
    """One message's worth of a leg."""

    layers: Span
    heads: Span
    runs: BlockRuns
    num_bytes: int


def row_chunks(leg: RowTransfer, head_block_bytes: int, max_bytes: int) -> Iterator[RowChunk]:
    """Yields a leg's parts of at most `max_bytes`, and at least one block of one layer.

    `head_block_bytes`: of one block of one head in one layer, keys and values.
    """
    unit_bytes = len(leg.heads) * head_block_bytes
    if not unit_bytes or not leg.num_blocks:
        return
    num_blocks = max(1, min(leg.num_blocks, max_bytes // unit_bytes))
    num_layers = max(1, max_bytes // (num_blocks * unit_bytes))
    parts = [(runs, sum(length for _, length in runs)) for runs in split_runs(leg.runs, num_blocks)]
    for begin in range(leg.layers.begin, leg.layers.end, num_layers):
        layers = Span(begin, min(begin + num_layers, leg.layers.end))
        for runs, count in parts:
            yield RowChunk(layers, leg.heads, runs, count * len(layers) * unit_bytes)


def split_runs(runs: BlockRuns, max_blocks: int) -> Iterator[BlockRuns]:
    """Yields the same blocks in parts of `max_blocks`, the last one shorter."""
    part: list[tuple[BlockId, int]] = []
    room = max_blocks
    for first, length in runs:
        begin, end = int(first), first + length
        while begin < end:
            taken = min(end - begin, room)
            part.append((BlockId(begin), taken))
            begin, room = begin + taken, room - taken
            if not room:
                yield tuple(part)
                part, room = [], max_blocks
    if part:
        yield tuple(part)
