"""Weights of which both layouts' are there, whatever is in force: mapped by every rank, or a rank's own.

What both shares of a rank need is there once: a TP shard of an own PP layer is a view into that layer. A flip touches
none of it.
"""

from collections.abc import Mapping

from services.core.flip.work import WeightsKind
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.models.model_files import ModelFiles
from services.placement.compatibility import expanded_by
from services.placement.layouts import cut_within_blocks, shard_units
from services.placement.pieces import canonical_tensors, matrices, resident_pieces, total_bytes
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.flip_plan import Performs
from services.worker.memory.weights.mapped import WeightStore
from services.worker.memory.weights.owned_weights import OwnedWeights, load_pieces, release_mapped
from services.worker.model.stage import Weights


class KeptWeights:
    """See RankWeights."""

    kind = WeightsKind.KEPT

    def __init__(self, weights: Weights, num_bytes: int) -> None:
        """`num_bytes`: that this rank maps or owns of them."""
        self._weights, self.num_bytes = weights, num_bytes

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RankWeights: both, at any time."""
        return frozenset(LayoutKind)

    @property
    def performs(self) -> Performs:
        """See RankWeights: nothing is asked."""
        return {}

    def of(self, kind: LayoutKind) -> Weights:
        """See RankWeights: the same for both."""
        return self._weights

    def plan_hash(self, target: LayoutKind) -> int:
        """See RankWeights: nothing is sent."""
        return 0

    def obstacle(self, target: LayoutKind, wait_s: float) -> str:
        """See RankWeights: none."""
        return ""

    def make_whole(self, kind: LayoutKind) -> None:
        """See RankWeights: both are."""

    def close(self) -> None:
        """See RankWeights: the memory goes with its last view."""


def mapped_weights(store: WeightStore) -> KeptWeights:
    """One copy that every rank of the host maps."""
    return KeptWeights(store, store.file_bytes + store.expanded_bytes)


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
