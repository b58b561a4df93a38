"""One rank's end of a flip's row transfers, in messages: which rows of which pool each carries, for both ends alike."""

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.cpu.reshard import Planes, Runs
from services.core.ids import Rank
from services.core.layout import Span
from services.placement.rows.chunks import row_chunks
from services.placement.rows.transfers import BlockRuns, RowTransfer
from services.worker.memory.rows.layout_pool import LayoutPool


@dataclass(frozen=True, slots=True)
class RowPart:
    """One message's worth of rows in one pool."""

    planes: Planes
    heads: Span
    runs: Runs
    num_bytes: int


def row_parts(
    pool: LayoutPool, transfers: Iterable[tuple[Rank, RowTransfer]], head_block_bytes: int, max_bytes: int
) -> dict[Rank, list[RowPart]]:
    """The parts of transfers to and from each peer, in order; `max_bytes`: of a message.

    `head_block_bytes`: of one block of one head in one layer, keys and values.
    """
    parts: dict[Rank, list[RowPart]] = {}
    planes: dict[Span, Planes] = {}
    runs: dict[BlockRuns, Runs] = {}
    for peer, transfer in transfers:
        for chunk in row_chunks(transfer, head_block_bytes, max_bytes):
            if chunk.layers not in planes:
                planes[chunk.layers] = pool.planes(chunk.layers)
            if chunk.runs not in runs:
                runs[chunk.runs] = Runs.of_blocks(pool.own_runs(chunk.runs))
            part = RowPart(planes[chunk.layers], pool.own_heads(chunk.heads), runs[chunk.runs], chunk.num_bytes)
            parts.setdefault(peer, []).append(part)
    return parts
