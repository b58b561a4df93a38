"""The KV pools of both layouts of one rank where they share one memory: a flip takes it from one to the other.

Each pool has its range of addresses, so views stay valid; the pages of a block are in one of the two. A flip goes
through the pool's blocks window by window (private.seam_mover), so that what is on its way is bounded whatever is live.
Where a window fails it is restored, and the windows before it go back the way they came; where an attempt is abandoned
after all have gone, all ranks take them back at ABANDON, and a rank that is not there then ends the generation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.core.ids import LayoutKind
from services.core.layout import Layout, LayoutError, Span
from services.core.step import FlipEntry
from services.models.geometry import ModelGeometry
from services.placement.reshard import stable_hash
from services.placement.rows.block_batches import Window, windows
from services.placement.rows.transfers import Holding, kv_holdings, row_plan
from services.placement.staging import WINDOW_BYTES, row_sizes
from services.worker.memory.pages.backing import MakeBacking, MissingMemoryError, whole_pieces
from services.worker.memory.rank_memory import DataPlaneLostError, FlipPlan, Moved, RestorableError
from services.worker.memory.rows.exclusive_pools import ExclusivePools, PlaneShape
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.layout_pool import FLOAT_BYTES, LayoutPool
from services.worker.memory.rows.seam_mover import Passage, SeamMover, SeamStaging
from services.worker.memory.wire import Wire

NO_MOVE = Moved()


@dataclass(frozen=True, slots=True)
class _Pending:
    """What is to be done for one FLIP entry."""

    flip: FlipEntry
    passages: tuple[Passage, ...]


class ExclusiveRows:
    """See RowPools; pools are there from `open` on."""

    def __init__(
        self,
        geometry: ModelGeometry,
        layouts: Mapping[LayoutKind, Layout],
        wire: Wire,
        make_backing: MakeBacking,
        margin_bytes: int,
        window_bytes: int = WINDOW_BYTES,
        *,
        is_host: bool = True,
    ) -> None:
        """`margin_bytes`: must be free besides at a seam. `is_host`: all ranks' pools lie in the same memory."""
        self._geometry, self._wire, self._make_backing = geometry, wire, make_backing
        self._margin_bytes, self._is_host = margin_bytes, is_host
        self._holdings = {kind: kv_holdings(layout, geometry.num_kv_heads) for kind, layout in layouts.items()}
        self._sizes = row_sizes(layouts, geometry.num_kv_heads, geometry.head_dim, FLOAT_BYTES)
        self._window_bytes, self._window_blocks = window_bytes, self._sizes.window_blocks(window_bytes)
        self._memory: ExclusivePools | None = None
        self._mover: SeamMover | None = None
        self._pending: _Pending | None = None
        self.pools: dict[LayoutKind, LayoutPool] = {}

    def _shape(self, held: Holding) -> PlaneShape:
        return PlaneShape(2 * len(held.layers), len(held.heads) * self._sizes.head_block_bytes // 2, held.blocks)

    def _shapes(self, rank: int) -> dict[LayoutKind, PlaneShape]:
        return {kind: self._shape(held[rank]) for kind, held in self._holdings.items()}

    def open(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RowPools: both layouts have pages once, one after the other, so that what cannot be had is known now.

        Raises:
            MissingMemoryError: a pool of this size cannot be had.
        """
        self.close()
        shapes = self._shapes(self._wire.rank)
        backings = {
            each: self._make_backing(f"{each.value} pool", shape.num_bytes(num_blocks))
            for each, shape in shapes.items()
        }
        self._memory = ExclusivePools(backings, shapes, num_blocks)
        for each, held in self._holdings.items():
            own = held[self._wire.rank]
            memory = backings[each].flat
            self.pools[each] = LayoutPool(own, self._geometry.head_dim, num_blocks, memory)
        self._memory.build(kind)
        self._mover = SeamMover(
            self._wire, self._holdings, self._sizes.head_block_bytes, self._staging(backings[kind].flat.device)
        )
        return self.pools

    def _staging(self, device: torch.device) -> SeamStaging:
        of_window = self._sizes.window_bytes(self._wire.rank, self._window_bytes)
        sizes = (of_window, self._sizes.message_bytes(self._wire.bounds.chunk_bytes))
        return SeamStaging(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes))

    def release_above(self, num_blocks: int) -> int:
        """See RowPools: of the one that has pages."""
        memory, kind = self._in_force()
        return memory.keep(kind, Span(0, min(num_blocks, memory.held[kind].end)))

    def back_below(self, num_blocks: int) -> None:
        """See RowPools: its views must not be touched where there are no pages."""
        memory, kind = self._in_force()
        if num_blocks > memory.held[kind].end:
            memory.back(kind, Span(0, num_blocks))

    def _in_force(self) -> tuple[ExclusivePools, LayoutKind]:
        assert self._memory is not None, "pools are opened by RESET"
        held = self._memory.held
        return self._memory, max(held, key=lambda kind: len(held[kind]))

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RowPools: equal hashes mean equal windows and legs; refused where the seam has no room."""
        self._pending = None
        assert self._memory is not None, "pools are opened by RESET"
        num_blocks = self._memory.num_blocks
        beyond = [run for run in flip.live_runs if run[0] + run[1] > num_blocks]
        if beyond:
            return FlipPlan(0, f"live blocks {beyond[0]} (begin, length) are beyond the pool's {num_blocks}")
        try:
            passages = tuple(
                self._passages(flip.target, list(windows(flip.live_runs, num_blocks, self._window_blocks)))
            )
            self._wait_for_room(flip.target, self._wire.bounds.verdict_wait_s)
            # What was released while memory was short: the seam takes turns with a whole pool.
            self.back_below(num_blocks)
        except (LayoutError, MissingMemoryError) as error:
            return FlipPlan(0, str(error))
        self._pending = _Pending(flip, passages)
        spans = [(passage.window.blocks, passage.plan.hash) for passage in passages]
        return FlipPlan(stable_hash(spans))

    def _passages(self, target: LayoutKind, parts: Sequence[Window]) -> list[Passage]:
        assert self._memory is not None
        end = self._memory.num_blocks
        found = []
        for window in parts:
            plan = row_plan(self._holdings[target.other], self._holdings[target], window.live)
            here, there = window.blocks.begin, window.blocks.end
            source, destination = (Span(here, end), Span(there, end)), (Span(0, here), Span(0, there))
            found.append(Passage(target, window, plan, source, destination))
        return found

    def _wait_for_room(self, target: LayoutKind, deadline_s: float) -> None:
        """What all ranks of a host take together, or else this one; others release before any takes."""
        assert self._memory is not None
        ranks = range(self._wire.num_ranks) if self._is_host else (self._wire.rank,)
        piece = self._memory.piece_bytes
        needed = sum(self._growth_bytes(target, rank, piece) + self._sizes.edge_bytes(rank, piece) for rank in ranks)
        self._memory.wait_for_room(max(needed, 0), self._margin_bytes, deadline_s)

    def _growth_bytes(self, target: LayoutKind, rank: int, piece_bytes: int) -> int:
        """By how much a rank's pool is larger in the layout after; below 0: smaller."""
        assert self._memory is not None
        shapes, num_blocks = self._shapes(rank), self._memory.num_blocks
        before, after = (
            whole_pieces(shapes[kind].num_bytes(num_blocks), piece_bytes) for kind in (target.other, target)
        )
        return after - before

    def move(self, flip: FlipEntry) -> Moved:
        """See RowPools: one verdict on room, then window by window; a failure is the same on all ranks."""
        pending = self._pending
        failure: Exception | None = None
        if pending is None or pending.flip != flip:
            failure = RestorableError(f"flip {flip.flip_id} has no plan here")
        else:
            try:
                self._wait_for_room(flip.target, 0)
            except MissingMemoryError as error:
                failure = error
        with self._wire.guarded():
            self._wire.agree(failure, flip.flip_id)
        assert pending is not None, "else the verdict was against it"
        moved, done = NO_MOVE, list[Passage]()
        for passage in pending.passages:
            try:
                moved = _sum(moved, self._passed(passage))
            except RestorableError:
                self._go_back(done)
                raise
            done.append(passage)
        return moved

    def settle(self, kind: LayoutKind) -> None:
        """See RowPools: rows that have gone come back from all ranks, where the attempt was abandoned after that."""
        assert self._memory is not None
        if not len(self._memory.held[kind]):
            assert self._pending is not None, "rows have gone by the plan of an attempt"
            self._go_back(self._pending.passages)
        self._pending = None

    def _passed(self, passage: Passage) -> Moved:
        assert self._memory is not None and self._mover is not None
        return self._mover.move(passage, self._memory, self.pools)

    def _go_back(self, done: Sequence[Passage]) -> None:
        """Takes windows back, the last one first."""
        for passage in reversed(done):
            back = row_plan(self._holdings[passage.target], self._holdings[passage.target.other], passage.window.live)
            source, destination = passage.destination[::-1], passage.source[::-1]
            reverse = Passage(passage.target.other, passage.window, back, source, destination)
            try:
                self._passed(reverse)
            except RestorableError as error:
                raise DataPlaneLostError(f"rows that had gone cannot be taken back: {error}") from error

    def close(self) -> None:
        """See RowPools."""
        self.pools.clear()
        self._pending = self._mover = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _sum(one: Moved, other: Moved) -> Moved:
    return Moved(
        one.read_ns + other.read_ns,
        one.seam_ns + other.seam_ns,
        one.write_ns + other.write_ns,
        one.verify_ns + other.verify_ns,
        one.bytes_moved + other.bytes_moved,
        one.rows_moved + other.rows_moved,
    )
