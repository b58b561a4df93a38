"""Mode `exchange`: one arena a rank holds the layout in force; a flip exchanges weights in place, and moves live rows.

Rows go first, into a pool that is nobody's until COMMIT, and the group says that all of them are right before a page of
the weights moves. Then pages move, and every piece is compared with the files' checksum where it lies. On a mismatch
all ranks go back: pages are exchanged back and compared again, and a rank where one is wrong even so (it was damaged on
the way, and its first copy overwritten) takes its pieces from the files. Where an attempt is abandoned after its pages
have moved, each rank takes them from the files: no peer is waited for then.
"""

import time
from collections.abc import Mapping

from services.core.ids import LayoutKind
from services.core.layout import Layout
from services.core.step import FlipEntry
from services.models.model_files import ModelFiles
from services.placement.compatibility import Device
from services.placement.exchange import Exchange
from services.placement.exchange_plan import PAGE_BYTES, ExchangePlan, exchange_plan
from services.placement.reshard import stable_hash
from services.worker.memory.pages.backing import MakeBacking
from services.worker.memory.rank_memory import DataPlaneLostError, FlipPlan, Moved, RestorableError
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.weights.arena import Arena
from services.worker.memory.weights.arena_weights import ArenaWeights
from services.worker.memory.weights.page_mover import Exchanged, PageMover
from services.worker.memory.wire import Wire
from services.worker.model.stage import Weights


class ExchangeMemory:
    """See RankMemory."""

    def __init__(self, weights: ArenaWeights, plan: ExchangePlan, rows: RowPools, pages: PageMover, wire: Wire) -> None:
        self._weights, self._plan, self._rows, self._pages, self._wire = weights, plan, rows, pages, wire

    @property
    def weights_bytes(self) -> int:
        """See RankMemory: owned."""
        return self._weights.num_bytes

    def weights(self, kind: LayoutKind) -> Weights:
        """See RankMemory: there while the layout is in force."""
        return self._weights.of(kind)

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RankMemory."""
        self._settle_weights(kind)
        return self._rows.open(num_blocks, kind)

    def release_above(self, num_blocks: int) -> int:
        """See RankMemory."""
        return self._rows.release_above(num_blocks)

    def back_below(self, num_blocks: int) -> None:
        """See RankMemory."""
        self._rows.back_below(num_blocks)

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RankMemory: of rows and pages together."""
        rows = self._rows.plan(flip)
        return FlipPlan(stable_hash([rows.hash, self._plan.exchanges[flip.target].hash]), rows.refusal)

    def move(self, flip: FlipEntry) -> Moved:
        """See RankMemory."""
        exchange = self._plan.exchanges[flip.target]
        moved, failure = self._moved_rows(flip)
        with self._wire.guarded():
            try:
                self._wire.agree(failure, exchange.hash)
            except RestorableError:
                self._rows.settle(flip.target.other)
                raise
            self._weights.held = None
            exchanged = self._pages.exchange(exchange.phases)
        began_ns = time.perf_counter_ns()
        self._verify(flip.target, exchange)
        verify_ns = time.perf_counter_ns() - began_ns
        return _sum(moved, exchanged, verify_ns)

    def _moved_rows(self, flip: FlipEntry) -> tuple[Moved, RestorableError | None]:
        try:
            return self._rows.move(flip), None
        except RestorableError as error:
            return Moved(), error

    def _verify(self, target: LayoutKind, exchange: Exchange) -> None:
        """One verdict on all pieces of all ranks; back to the layout before if one is wrong."""
        wrong = self._weights.wrong(target)
        failure = RestorableError(f"{len(wrong)} pieces are not the files', first {wrong[0]}") if wrong else None
        with self._wire.guarded():
            try:
                self._wire.agree(failure, exchange.hash)
            except RestorableError:
                self._go_back(target.other, exchange)
                raise
        self._weights.held = target

    def _go_back(self, kind: LayoutKind, exchange: Exchange) -> None:
        """All ranks: takes back every phase of the exchange that led away from `kind`."""
        self._pages.exchange(exchange.restoring_phases(len(exchange.phases)))
        if not self._weights.wrong(kind):
            self._weights.held = kind
        self.settle(kind)

    def settle(self, kind: LayoutKind) -> None:
        """See RankMemory: takes weights from the files where they are not there."""
        self._settle_weights(kind)
        self._rows.settle(kind)

    def _settle_weights(self, kind: LayoutKind) -> None:
        if self._weights.held is kind:
            return
        wrong = self._weights.refill(kind)
        if wrong:
            raise DataPlaneLostError(
                f"{len(wrong)} pieces of {kind.value} are not what was loaded at start, first {wrong[0]}: the model's "
                "files were changed; restore them"
            )

    def close(self) -> None:
        """Returns the memory of arena and pools; no view of it may be touched from here on."""
        self._weights.close()
        self._rows.close()


def _sum(rows: Moved, pages: Exchanged, verify_ns: int) -> Moved:
    return Moved(
        read_ns=rows.read_ns + pages.read_ns,
        seam_ns=rows.seam_ns,
        write_ns=rows.write_ns + pages.write_ns,
        verify_ns=rows.verify_ns + verify_ns,
        bytes_moved=rows.bytes_moved + pages.bytes_received,
        rows_moved=rows.rows_moved,
    )


def exchange_memory(
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    wire: Wire,
    rows: RowPools,
    kind: LayoutKind,
    make_backing: MakeBacking,
    page_bytes: int = PAGE_BYTES,
    device: Device = Device.CPU,
) -> ExchangeMemory:
    """Plans, takes the memory and loads the layout `kind`.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        MissingMemoryError: there is no memory for the arena.
    """
    plan = exchange_plan(files, layouts, page_bytes, device)
    sizes = {"weights arena": plan.arenas.num_pages[wire.rank], "weights staging": plan.staging_pages}
    arena, staging = (make_backing(name, num_pages * page_bytes) for name, num_pages in sizes.items())
    pages = Arena(wire.rank, arena, staging, page_bytes)
    weights = ArenaWeights(files, plan, pages, wire.rank)
    weights.load_both(kind)
    return ExchangeMemory(weights, plan, rows, PageMover(wire, pages), wire)
