"""The KV pools of both layouts of one rank where they share one memory: a flip takes it from one to the other.

Each pool has its range of addresses, so views stay valid; the pages of a block are in one of the two. A flip goes
through the pool's blocks batch by batch (batch_mover), so that what is on its way is bounded whatever is live. Here is
what is done to pages and rows at each ask; the order of asks, and the ways back, are core.flip.work's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.core.flip.work import RowsKind
from services.core.flip.work_asks import (
    CompareRows,
    KeepRows,
    PassRows,
    ReadRows,
    TrimPages,
    WriteKeptRows,
    WriteRows,
)
from services.core.flip.work_table import Answer
from services.core.ids import LayoutKind
from services.core.layout import Layout, LayoutError, Span
from services.core.step import FlipEntry
from services.models.geometry import ModelGeometry
from services.placement.reshard import stable_hash
from services.placement.rows.block_batches import BlockBatch, block_batches
from services.placement.rows.transfers import Holding, kv_holdings, row_plan
from services.placement.staging import BATCH_BYTES, row_sizes
from services.worker.memory.flip_plan import FlipPlan, NotDoneError, Performs
from services.worker.memory.pages.backing import MakeBacking, MissingMemoryError, whole_pieces
from services.worker.memory.rows.batch_mover import BatchMove, BatchMover, BatchStaging
from services.worker.memory.rows.exclusive_pools import ExclusivePools, PlaneShape
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.layout_pool import FLOAT_BYTES, LayoutPool
from services.worker.memory.wire import Wire


@dataclass(frozen=True, slots=True)
class _Pending:
    """What is to be done for one FLIP entry."""

    flip: FlipEntry
    moves: tuple[BatchMove, ...]
    """Of each batch, from the layout before to the layout after."""


class ExclusiveRows:
    """See RowPools; pools are there from `open` on."""

    kind = RowsKind.TURNS

    def __init__(
        self,
        geometry: ModelGeometry,
        layouts: Mapping[LayoutKind, Layout],
        wire: Wire,
        make_backing: MakeBacking,
        margin_bytes: int,
        batch_bytes: int = BATCH_BYTES,
        *,
        is_host: bool = True,
    ) -> None:
        """`margin_bytes`: must be free besides at a seam. `is_host`: all ranks' pools lie in the same memory."""
        self._geometry, self._wire, self._make_backing = geometry, wire, make_backing
        self._margin_bytes, self._is_host = margin_bytes, is_host
        self._holdings = {kind: kv_holdings(layout, geometry.num_kv_heads) for kind, layout in layouts.items()}
        self._sizes = row_sizes(layouts, geometry.num_kv_heads, geometry.head_dim, FLOAT_BYTES)
        self._batch_bytes, self._batch_blocks = batch_bytes, self._sizes.batch_blocks(batch_bytes)
        self._memory: ExclusivePools | None = None
        self._mover: BatchMover | None = None
        self._pending: _Pending | None = None
        self._in_force = LayoutKind.PP
        self._is_trimmed = False
        """Whether pages have been given up for a flip since the last outcome."""
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
        self._in_force, self._is_trimmed = kind, False
        self._mover = BatchMover(
            self._wire, self._holdings, self._sizes.head_block_bytes, self._staging(backings[kind].flat.device)
        )
        return self.pools

    def _staging(self, device: torch.device) -> BatchStaging:
        of_batch = self._sizes.batch_bytes(self._wire.rank, self._batch_bytes)
        sizes = (of_batch, self._sizes.message_bytes(self._wire.bounds.chunk_bytes))
        return BatchStaging(*(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes))

    @property
    def num_batches(self) -> int:
        """See RowPools."""
        return 0 if self._pending is None else len(self._pending.moves)

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RowPools: the one that has its turn."""
        return frozenset((self._in_force,))

    @property
    def performs(self) -> Performs:
        """See RowPools."""
        return {
            ReadRows: self._read,
            PassRows: self._pass,
            CompareRows: self._compare,
            TrimPages: self._trim,
            WriteRows: self._write,
            WriteKeptRows: self._write_kept,
            KeepRows: self._keep,
        }

    def release_above(self, num_blocks: int) -> int:
        """See RowPools: of the one that is in force."""
        memory, kind = self._opened, self._in_force
        return memory.keep(kind, Span(0, min(num_blocks, memory.held[kind].end)))

    def back_below(self, num_blocks: int) -> None:
        """See RowPools: its views must not be touched where there are no pages."""
        memory, kind = self._opened, self._in_force
        if num_blocks > memory.held[kind].end:
            memory.back(kind, Span(0, num_blocks))

    @property
    def _opened(self) -> ExclusivePools:
        assert self._memory is not None, "pools are opened by RESET"
        return self._memory

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RowPools: equal hashes mean equal batches and transfers; refused where the seam has no room."""
        self._pending = None
        num_blocks = self._opened.num_blocks
        beyond = [run for run in flip.live_runs if run[0] + run[1] > num_blocks]
        if beyond:
            return FlipPlan(0, f"live blocks {beyond[0]} (begin, length) are beyond the pool's {num_blocks}")
        try:
            moves = self._moves(flip.target, list(block_batches(flip.live_runs, num_blocks, self._batch_blocks)))
            self._wait_for_room(flip.target, self._wire.bounds.verdict_wait_s)
            # What was released while memory was short: the seam takes turns with a whole pool.
            self.back_below(num_blocks)
        except (LayoutError, MissingMemoryError) as error:
            return FlipPlan(0, str(error))
        self._pending = _Pending(flip, moves)
        return FlipPlan(stable_hash([(move.batch.blocks, move.plan.hash) for move in moves]))

    def _moves(self, target: LayoutKind, batches: Sequence[BlockBatch]) -> tuple[BatchMove, ...]:
        end, moves = self._opened.num_blocks, []
        for batch in batches:
            plan = row_plan(self._holdings[target.other], self._holdings[target], batch.live)
            here, there = batch.blocks.begin, batch.blocks.end
            source, destination = (Span(here, end), Span(there, end)), (Span(0, here), Span(0, there))
            moves.append(BatchMove(target, batch, plan, source, destination))
        return tuple(moves)

    def obstacle(self, flip: FlipEntry) -> str:
        """See RowPools: memory that was free at the verdict may be others' now."""
        if self._pending is None or self._pending.flip != flip:
            return f"flip {flip.flip_id} has no plan of rows here"
        try:
            self._wait_for_room(flip.target, 0)
        except MissingMemoryError as error:
            return str(error)
        return ""

    def _wait_for_room(self, target: LayoutKind, deadline_s: float) -> None:
        """What all ranks of a host take together, or else this one; others release before any takes."""
        memory = self._opened
        ranks = range(self._wire.num_ranks) if self._is_host else (self._wire.rank,)
        piece = memory.piece_bytes
        needed = sum(self._growth_bytes(target, rank, piece) + self._sizes.edge_bytes(rank, piece) for rank in ranks)
        memory.wait_for_room(max(needed, 0), self._margin_bytes, deadline_s)

    def _growth_bytes(self, target: LayoutKind, rank: int, piece_bytes: int) -> int:
        """By how much a rank's pool is larger in the layout after; below 0: smaller."""
        shapes, num_blocks = self._shapes(rank), self._opened.num_blocks
        before, after = (
            whole_pieces(shapes[kind].num_bytes(num_blocks), piece_bytes) for kind in (target.other, target)
        )
        return after - before

    # A flip's work, ask by ask.

    def _move(self, batch: int, toward: LayoutKind) -> BatchMove:
        """A batch's way, in either direction."""
        if self._pending is None:
            raise NotDoneError("no plan of rows")
        move = self._pending.moves[batch]
        if toward is move.target:
            return move
        back = row_plan(self._holdings[move.target], self._holdings[toward], move.batch.live)
        return BatchMove(toward, move.batch, back, move.destination[::-1], move.source[::-1])

    @property
    def _moving(self) -> BatchMover:
        assert self._mover is not None, "pools are opened by RESET"
        return self._mover

    def _read(self, ask: ReadRows) -> None:
        self._moving.read(self._move(ask.batch, ask.toward), self.pools)

    def _pass(self, _: PassRows) -> None:
        self._moving.pass_rows()

    def _compare(self, _: CompareRows) -> Answer | None:
        return self._moving.compare()

    def _trim(self, ask: TrimPages) -> None:
        self._is_trimmed = True
        with self._wire.tally.timed("seam_ns"):
            self._opened.keep(ask.layout, self._move(ask.batch, ask.layout.other).source[1])

    def _write(self, ask: WriteRows) -> None:
        self._back(ask.batch, ask.toward)
        self._moving.write()

    def _write_kept(self, ask: WriteKeptRows) -> None:
        try:
            self._back(ask.batch, ask.layout)
        except MissingMemoryError as error:
            raise NotDoneError(f"rows that were kept cannot be written back: {error}") from error
        self._moving.write_kept()

    def _back(self, batch: int, layout: LayoutKind) -> None:
        with self._wire.tally.timed("seam_ns"):
            self._opened.back(layout, self._move(batch, layout).destination[1])

    def _keep(self, ask: KeepRows) -> None:
        """Rows that a flip has moved must be in this layout, all of them; nobody waits for a peer to have them back."""
        memory = self._opened
        if self._is_trimmed and memory.held[ask.layout] != memory.every_block:
            held = {kind.value: (blocks.begin, blocks.end) for kind, blocks in memory.held.items()}
            raise NotDoneError(
                f"{ask.layout.value} is in force, and of {memory.num_blocks} blocks the pools have {held} (begin, end)"
            )
        self._in_force, self._is_trimmed, self._pending = ask.layout, False, None

    def close(self) -> None:
        """See RowPools."""
        self.pools.clear()
        self._pending = self._mover = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
