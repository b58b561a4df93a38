"""The KV pools of both layouts of one rank, both backed, and the live rows' way from one to the other.

Ids are equal in both: a row keeps its id for life. A flip reads the pool in force and writes the other one; until
COMMIT the one in force is whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.flip.work import RowsKind
from services.core.flip.work_asks import CompareRows, KeepRows, PassRows, ReadRows
from services.core.flip.work_table import Answer
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.core.layout import Layout, LayoutError
from services.core.step import FlipEntry
from services.models.geometry import ModelGeometry
from services.placement.rows.transfers import RowPlan, kv_holdings, row_plan
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.flip_plan import FlipPlan, NotDoneError, Performs
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.layout_pool import FLOAT_BYTES, LayoutPool
from services.worker.memory.rows.row_mover import RowMover
from services.worker.memory.wire import Wire


def head_block_bytes(geometry: ModelGeometry) -> int:
    """Of one block of one KV head in one layer, keys and values."""
    return 2 * BLOCK_SLOTS * geometry.head_dim * FLOAT_BYTES


def least_message_bytes(geometry: ModelGeometry) -> int:
    """What a carrier must hold of one message, so that a block of one layer need not be cut."""
    return geometry.num_kv_heads * head_block_bytes(geometry)


@dataclass(frozen=True, slots=True)
class _Pending:
    """What is to be done for one FLIP entry."""

    flip: FlipEntry
    plan: RowPlan


class PoolPair:
    """See RowPools; pools are there from `open` on."""

    kind = RowsKind.PAIR
    num_batches = 1

    def __init__(
        self, geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout], wire: Wire, device: RankDevice = HOST
    ) -> None:
        self._geometry, self._layouts, self._rank, self._device = geometry, layouts, wire.rank, device
        self._mover = RowMover(wire, head_block_bytes(geometry), geometry.num_kv_heads, device)
        self._holdings = {kind: kv_holdings(layout, geometry.num_kv_heads) for kind, layout in layouts.items()}
        self._pending: _Pending | None = None
        self.pools: dict[LayoutKind, LayoutPool] = {}

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RowPools: both, at any time."""
        return frozenset(LayoutKind)

    @property
    def performs(self) -> Performs:
        """See RowPools."""
        return {ReadRows: self._read, PassRows: self._pass, CompareRows: self._compare, KeepRows: self._keep}

    def open(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RowPools."""
        self.pools.clear()
        for each, holdings in self._holdings.items():
            self.pools[each] = LayoutPool(
                holdings[self._rank], self._geometry.head_dim, num_blocks, device=self._device
            )
        return self.pools

    def release_above(self, num_blocks: int) -> int:
        """See RowPools: nothing on a CUDA device, whose allocations are only released whole."""
        if self._device.is_cuda:
            return 0
        return sum(pool.release_above(num_blocks) for pool in self.pools.values())

    def back_below(self, num_blocks: int) -> None:
        """See RowPools: by touching."""

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RowPools: equal hashes mean equal transfers."""
        self._pending = None
        num_blocks = self.pools[flip.target].num_blocks
        beyond = [run for run in flip.live_runs if run[0] + run[1] > num_blocks]
        if beyond:
            return FlipPlan(0, f"live blocks {beyond[0]} (begin, length) are beyond the pool's {num_blocks}")
        try:
            plan = row_plan(self._holdings[flip.target.other], self._holdings[flip.target], flip.live_runs)
        except LayoutError as error:
            return FlipPlan(0, str(error))
        self._pending = _Pending(flip, plan)
        return FlipPlan(plan.hash)

    def obstacle(self, flip: FlipEntry) -> str:
        """See RowPools: both pools are there, so a plan is all that it takes."""
        has_plan = self._pending is not None and self._pending.flip == flip
        return "" if has_plan else f"flip {flip.flip_id} has no plan of rows here"

    def _read(self, ask: ReadRows) -> None:
        if self._pending is None:
            raise NotDoneError("no plan of rows")
        self._mover.prepare(self._pending.plan, self.pools[ask.toward.other], self.pools[ask.toward])

    def _pass(self, _: PassRows) -> None:
        self._mover.pass_rows()

    def _compare(self, _: CompareRows) -> Answer | None:
        return self._mover.compare()

    def _keep(self, _: KeepRows) -> None:
        """The pool of the layout before was never written."""
        self._pending = None

    def close(self) -> None:
        """See RowPools."""
        self.pools.clear()
