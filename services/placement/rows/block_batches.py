"""The blocks of a pool in parts, each with few enough live ones: what a flip moves at a time where memory is shared.

Pure, and the same on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.core.layout import Span
from services.placement.rows.chunks import split_runs
from services.placement.rows.transfers import BlockRuns


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks that lie side by side, and which of them are live."""

    blocks: Span
    live: BlockRuns


def block_batches(live: BlockRuns, num_blocks: int, max_live: int) -> Iterator[BlockBatch]:
    """Yields parts that cover [0, num_blocks), rising, of at most `max_live` live blocks each; at least one."""
    parts = list(split_runs(live, max_live)) or [()]
    begin = 0
    for index, part in enumerate(parts):
        end = num_blocks if index == len(parts) - 1 else part[-1][0] + part[-1][1]
        yield BlockBatch(Span(begin, end), part)
        begin = end
