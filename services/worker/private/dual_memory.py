"""Mode `dual`: a rank owns the weights of both its shares and a KV pool for each layout; only live rows move.

What both shares need is there once: a TP shard of an own PP layer is a view into that layer. A flip reads the pool in
force, writes the other one, and leaves the one in force untouched until COMMIT, so that a flip that fails is restored
by doing nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.ids import BLOCK_SLOTS, LayoutKind, Rank
from services.core.kv_reshard import RowPlan, kv_holdings, row_plan
from services.core.layout import Layout, LayoutError
from services.core.step import FlipEntry
from services.formats.geometry import ModelGeometry
from services.mesh.model_files import ModelFiles
from services.worker.collectives import Carrier
from services.worker.kv_cache import Pool
from services.worker.layouts import cut_within_blocks, shard_units
from services.worker.model.stage import Weights
from services.worker.private.layout_pool import FLOAT_BYTES, LayoutPool
from services.worker.private.owned_weights import OwnedWeights
from services.worker.private.pieces import canonical_tensors, resident_pieces
from services.worker.private.row_mover import MoveBounds, RowMover
from services.worker.rank_memory import FlipPlan, Moved, RestorableError

MAX_CHUNK_BYTES = 1 << 20
"""Of one message of rows: large against a message's cost, small against the caches it goes through."""


def head_block_bytes(geometry: ModelGeometry) -> int:
    """Of one block of one KV head in one layer, keys and values."""
    return 2 * BLOCK_SLOTS * geometry.head_dim * FLOAT_BYTES


def least_message_bytes(geometry: ModelGeometry) -> int:
    """What a carrier must hold of one message, so that a block of one layer need not be cut."""
    return geometry.num_kv_heads * head_block_bytes(geometry)


def owned_weights(files: ModelFiles, rank: Rank, layouts: Mapping[LayoutKind, Layout]) -> OwnedWeights:
    """Loads what the rank needs for both layouts.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
    """
    geometry = files.geometry
    cut = cut_within_blocks(geometry, files.tensors, layouts.values())
    tensors = canonical_tensors(files.tensors, cut, is_tied=geometry.tied_embeddings)
    units = shard_units(geometry, files.tensors)
    pieces = resident_pieces(rank, tuple(layouts.values()), units, tensors, cut)
    return OwnedWeights(files, pieces, {tensor.name: tensor.source for tensor in tensors})


@dataclass(frozen=True, slots=True)
class _Pending:
    """What is to be done for one FLIP entry."""

    flip: FlipEntry
    plan: RowPlan


class DualMemory:
    """See RankMemory. Pools are there from RESET on."""

    def __init__(
        self, weights: OwnedWeights, geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout], mover: RowMover
    ) -> None:
        self._weights, self._geometry, self._layouts, self._mover = weights, geometry, layouts, mover
        self._rank = mover.rank
        self._holdings = {kind: kv_holdings(layout, geometry.num_kv_heads) for kind, layout in layouts.items()}
        self._pools: dict[LayoutKind, LayoutPool] = {}
        self._pending: _Pending | None = None

    @property
    def weights_bytes(self) -> int:
        """See RankMemory: owned."""
        return self._weights.num_bytes

    def weights(self, kind: LayoutKind) -> Weights:
        """See RankMemory."""
        return self._weights

    def open_pools(self, num_blocks: int) -> Mapping[LayoutKind, Pool]:
        """See RankMemory: equal ids in both."""
        self._pools.clear()
        for kind, layout in self._layouts.items():
            share = layout.shares[self._rank]
            self._pools[kind] = LayoutPool(share.layers, share.kv_heads, self._geometry.head_dim, num_blocks)
        return self._pools

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RankMemory: equal hashes mean equal legs."""
        self._pending = None
        pool = self._pools[flip.target]
        beyond = [run for run in flip.live_runs if run[0] + run[1] > pool.num_blocks]
        if beyond:
            return FlipPlan(0, f"live blocks {beyond[0]} (begin, length) are beyond the pool's {pool.num_blocks}")
        try:
            plan = row_plan(self._holdings[flip.target.other], self._holdings[flip.target], flip.live_runs)
        except LayoutError as error:
            return FlipPlan(0, str(error))
        self._pending = _Pending(flip, plan)
        return FlipPlan(plan.hash)

    def move(self, flip: FlipEntry) -> Moved:
        """See RankMemory."""
        if self._pending is None or self._pending.flip != flip:
            raise RestorableError(f"flip {flip.flip_id} has no plan here: nothing was moved")
        return self._mover.move(self._pending.plan, self._pools[flip.target.other], self._pools[flip.target])


def dual_memory(
    files: ModelFiles, layouts: Mapping[LayoutKind, Layout], carrier: Carrier, bounds: MoveBounds
) -> DualMemory:
    """Loads one rank's weights and makes its mover; raises LayoutError like `owned_weights`."""
    geometry = files.geometry
    mover = RowMover(carrier, head_block_bytes(geometry), geometry.num_kv_heads, bounds)
    return DualMemory(owned_weights(files, Rank(carrier.rank), layouts), geometry, layouts, mover)
