"""One KV pool that all ranks of a host map: both layouts are views of it, and a flip moves no row."""

from collections.abc import Mapping

from services.core.flip.work import RowsKind
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.core.step import FlipEntry
from services.models.geometry import ModelGeometry
from services.placement.rows.transfers import pooled_heads
from services.worker.memory.flip_plan import FlipPlan, Performs
from services.worker.memory.rows.kv_cache import KvPool, Pool


class SharedRows:
    """See RowPools."""

    kind = RowsKind.SHARED
    num_batches = 0

    def __init__(self, rank: Rank, pool_fd: int, geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout]) -> None:
        self._rank, self._pool_fd, self._geometry = rank, pool_fd, geometry
        self.pool: KvPool | None = None
        tp = layouts[LayoutKind.TP]
        self._pooled = pooled_heads(tp, geometry.num_kv_heads)
        self._first_kv_head = tp.shares[rank].kv_heads.begin - self._pooled.places[rank].begin

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RowPools: both, at any time."""
        return frozenset(LayoutKind)

    @property
    def performs(self) -> Performs:
        """See RowPools: nothing is asked."""
        return {}

    def open(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RowPools: one pool for both."""
        copied = self._pooled.copied
        self.pool = pool = KvPool(self._pool_fd, self._geometry, num_blocks, len(copied))
        return {LayoutKind.PP: pool.seen(0, copied), LayoutKind.TP: pool.seen(self._first_kv_head)}

    def release_above(self, num_blocks: int) -> int:
        """See RowPools: by rank 0 for all; no rank is beyond the step that it is about to begin."""
        return 0 if self._rank or self.pool is None else self.pool.release_above(num_blocks)

    def back_below(self, num_blocks: int) -> None:
        """See RowPools: by touching."""

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RowPools: nothing moves, everything fits."""
        return FlipPlan(0)

    def obstacle(self, flip: FlipEntry) -> str:
        """See RowPools: both views are there."""
        return ""

    def close(self) -> None:
        """See RowPools: the mapping is the process's."""
        self.pool = None
