"""Mode `dual`: a rank owns the weights of both its shares and a KV pool for each layout; only live rows move.

What both shares need is there once: a TP shard of an own PP layer is a view into that layer. A flip leaves the pool in
force untouched until COMMIT, so that one that fails is restored by doing nothing.
"""

from collections.abc import Mapping

from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.core.step import FlipEntry
from services.models.model_files import ModelFiles
from services.placement.compatibility import expanded_by
from services.placement.layouts import cut_within_blocks, shard_units
from services.placement.pieces import canonical_tensors, matrices, resident_pieces, total_bytes
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.rank_memory import FlipPlan, Moved
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.weights.owned_weights import OwnedWeights, load_pieces, release_mapped
from services.worker.model.stage import Weights


def owned_weights(
    files: ModelFiles, rank: Rank, layouts: Mapping[LayoutKind, Layout], device: RankDevice = HOST
) -> OwnedWeights:
    """Loads what the rank needs for both layouts.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
    """
    geometry = files.geometry
    cut = cut_within_blocks(geometry, files.tensors, layouts.values()) | expanded_by(device.kind, files.tensors)
    tensors = matrices(canonical_tensors(files.tensors, cut, is_tied=geometry.tied_embeddings))
    units = shard_units(geometry, files.tensors)
    pieces = resident_pieces(rank, tuple(layouts.values()), units, tensors, cut)
    memory = device.zeros(total_bytes(pieces), wants_large_pages=True)
    load_pieces(memory, pieces, files)
    release_mapped(files)
    return OwnedWeights(files, pieces, {tensor.name: tensor.source for tensor in tensors}, memory)


class DualMemory:
    """See RankMemory."""

    def __init__(self, weights: OwnedWeights, rows: RowPools) -> None:
        self._weights, self._rows = weights, rows

    @property
    def weights_bytes(self) -> int:
        """See RankMemory: owned."""
        return self._weights.num_bytes

    def weights(self, kind: LayoutKind) -> Weights:
        """See RankMemory: of both layouts."""
        return self._weights

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RankMemory."""
        return self._rows.open(num_blocks, kind)

    def release_above(self, num_blocks: int) -> int:
        """See RankMemory."""
        return self._rows.release_above(num_blocks)

    def back_below(self, num_blocks: int) -> None:
        """See RankMemory."""
        self._rows.back_below(num_blocks)

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RankMemory."""
        return self._rows.plan(flip)

    def move(self, flip: FlipEntry) -> Moved:
        """See RankMemory."""
        return self._rows.move(flip)

    def settle(self, kind: LayoutKind) -> None:
        """See RankMemory: both layouts' weights are there."""
        self._rows.settle(kind)

    def close(self) -> None:
        """Returns the pools' memory; no view of it may be touched from here on."""
        self._rows.close()
