"""One rank's weights in one arena, of which the layout in force has the bytes; views of both are handed out once.

Loading streams each piece from the mapped files to its pages. At start both layouts are loaded, one after the other
into the same pages, so that the checksum of every piece that may ever come is known from the files and not from who
sends it. Norms lie beside the arena, for both layouts.

A flip trades pages with the other ranks in place, and every piece is compared where it lies with the files' checksum;
one that is damaged is read from the files again.

Invariant: `active` is the layout whose every piece is in the arena with the files' bytes, None while pieces move.
"""

from collections.abc import Collection, Mapping

from torch import Tensor

from kernels.cpu.checksum import checksum
from kernels.weights import Matrix, PiecedMatrix, PlacedMatrix, Weight
from services.core.flip.work import WeightsKind
from services.core.flip.work_asks import CheckWeights, HaveWeights, TradePages
from services.core.ids import LayoutKind
from services.core.layout import Layout, Span
from services.models.ggml_types import GgmlType
from services.models.model_files import ModelFiles
from services.placement.compatibility import Device
from services.placement.exchange_plan import PAGE_BYTES, ExchangePlan, exchange_plan
from services.placement.pieces import Piece
from services.placement.shares import TensorShard
from services.worker.memory.flip_plan import NotDoneError, Performs
from services.worker.memory.pages.backing import MakeBacking
from services.worker.memory.weights.arena import Arena
from services.worker.memory.weights.owned_weights import file_vector, fill, release_mapped
from services.worker.memory.weights.page_mover import PageMover
from services.worker.memory.wire import Wire


class ArenaWeights:
    """See RankWeights."""

    kind = WeightsKind.EXCHANGED

    def __init__(self, files: ModelFiles, plan: ExchangePlan, arena: Arena, wire: Wire) -> None:
        self._files, self.plan, self._arena, self._tally = files, plan, arena, wire.tally
        self._pages = PageMover(wire, arena)
        self._maps = {kind: plan.page_map(kind, wire.rank) for kind in LayoutKind}
        self._vectors: dict[str, Tensor] = {}
        self._views = {kind: self._handed_out(kind) for kind in LayoutKind}
        self._sums: dict[LayoutKind, dict[TensorShard, int]] = {}
        self.active: LayoutKind | None = None

    @property
    def num_bytes(self) -> int:
        """Of the arena: the larger of the two layouts."""
        return self._arena.flat.numel()

    def of(self, kind: LayoutKind) -> "LayoutWeights":
        """What a stage of this layout sees; its bytes are there while the layout is active."""
        return LayoutWeights(self, self._views[kind])

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RankWeights: what the arena holds, where that is known."""
        return frozenset() if self.active is None else frozenset((self.active,))

    @property
    def performs(self) -> Performs:
        """See RankWeights."""
        return {
            TradePages: self._trade,
            CheckWeights: self._check,
            HaveWeights: lambda ask: self.make_whole(ask.layout),
        }

    def plan_hash(self, target: LayoutKind) -> int:
        """See RankWeights: of every page's way."""
        return self.plan.exchanges[target].hash

    def obstacle(self, target: LayoutKind, wait_s: float) -> str:
        """See RankWeights: pages come from peers, whoever has them."""
        return ""

    def make_whole(self, kind: LayoutKind) -> None:
        """See RankWeights: from the files, where the arena has not the layout. Raises NotDoneError."""
        if self.active is kind:
            return
        wrong = self.refill(kind)
        if wrong:
            raise NotDoneError(
                f"{len(wrong)} pieces of {kind.value} are not what was loaded at start, first {wrong[0]}: the model's "
                "files were changed; restore them"
            )

    def _trade(self, ask: TradePages) -> None:
        self.active = None
        if ask.undoes:
            away = self.plan.exchanges[ask.toward.other]
            self._pages.trade(away.restoring_phases(len(away.phases)))
        else:
            self._pages.trade(self.plan.exchanges[ask.toward].phases)

    def _check(self, ask: CheckWeights) -> None:
        with self._tally.timed("verify_ns"):
            wrong = self.wrong(ask.layout)
        if wrong:
            raise NotDoneError(f"{len(wrong)} pieces are not the files', first {wrong[0]}")
        self.active = ask.layout

    def load_both(self, kind: LayoutKind) -> None:
        """Start-up: takes the checksums of both layouts' pieces; `kind` is active then."""
        for turn in (kind.other, kind):
            self._fill(turn, self._maps[turn])
            self._sums[turn] = {piece: self._sum(turn, piece) for piece in self._maps[turn]}
            self.active = turn
        release_mapped(self._files)

    def wrong(self, kind: LayoutKind) -> list[TensorShard]:
        """Pieces of a layout that have not the files' bytes, among those that are not the same in both layouts."""
        return [piece for piece in self._moving(kind) if self._sum(kind, piece) != self._sums[kind][piece]]

    def refill(self, kind: LayoutKind) -> list[TensorShard]:
        """Makes `kind` the active layout, from the files; what is wrong even so (a damaged file)."""
        self.active = None
        self._fill(kind, self._moving(kind))
        wrong = self.wrong(kind)
        self.active = None if wrong else kind
        return wrong

    def close(self) -> None:
        """Returns the arena's memory; no view of it may be touched from here on."""
        self.active = None
        self._arena.close()

    def _moving(self, kind: LayoutKind) -> list[TensorShard]:
        return [piece for piece in self._maps[kind] if piece not in self._maps[kind.other]]

    def _num_bytes(self, piece: TensorShard) -> int:
        return self.plan.tensors[piece.tensor].num_bytes(piece.rows, piece.columns)

    def _memory(self, kind: LayoutKind, piece: TensorShard) -> Tensor:
        pages = self._maps[kind][piece]
        return self._arena.run(pages.begin, len(pages))[: self._num_bytes(piece)]

    def _sum(self, kind: LayoutKind, piece: TensorShard) -> int:
        return checksum(self._memory(kind, piece))

    def _fill(self, kind: LayoutKind, pieces: Collection[TensorShard]) -> None:
        for piece in pieces:
            memory, is_expanded = self._memory(kind, piece), piece.tensor in self.plan.expanded
            fill(memory, Piece(piece, is_expanded, 0, memory.numel()), self._files)

    def _handed_out(self, kind: LayoutKind) -> dict[str, list[tuple[TensorShard, Matrix]]]:
        views: dict[str, list[tuple[TensorShard, Matrix]]] = {}
        for piece, pages in self._maps[kind].items():
            is_expanded = piece.tensor in self.plan.expanded
            ggml_type = GgmlType.F32 if is_expanded else self._files.tensors[piece.tensor].ggml_type
            matrix = self._arena.matrix(kind, pages, ggml_type, len(piece.rows), len(piece.columns))
            views.setdefault(piece.tensor, []).append((piece, matrix))
        return views

    def whole(self, name: str) -> tuple[str, Span, Span]:
        """A tensor's source, and all of its rows and columns."""
        tensor = self.plan.tensors[name]
        return tensor.source, Span(0, tensor.rows), Span(0, tensor.columns)

    def vector(self, name: str) -> Tensor:
        """[columns] float32, read from the files once."""
        if name not in self._vectors:
            self._vectors[name] = file_vector(self._files, name).to(self._arena.flat.device)
        return self._vectors[name]


class LayoutWeights:
    """One layout's views; see Weights."""

    def __init__(self, weights: ArenaWeights, views: Mapping[str, list[tuple[TensorShard, Matrix]]]) -> None:
        self._weights, self._views = weights, views

    def vector(self, name: str) -> Tensor:
        """See Weights."""
        return self._weights.vector(name)

    def matrix(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Weight:
        """See Weights: a view of one piece, or all the pieces that lie within.

        Raises:
            KeyError: the pieces of this layout do not cover the part.
        """
        source, all_rows, all_columns = self._weights.whole(name)
        rows, columns = rows or all_rows, columns or all_columns
        held = self._views.get(source, [])
        for piece, matrix in held:
            if piece.columns == columns and piece.rows.covers(rows):
                return matrix.rows(rows.begin - piece.rows.begin, rows.end - piece.rows.begin)
        within = sorted(
            (piece.rows.begin - rows.begin, piece.columns.begin - columns.begin, index)
            for index, (piece, _) in enumerate(held)
            if rows.covers(piece.rows) and columns.covers(piece.columns)
        )
        try:
            pieces = tuple(PlacedMatrix(row, column, held[index][1]) for row, column, index in within)
            return PiecedMatrix(len(rows), len(columns), pieces)
        except ValueError as error:
            raise KeyError(f"{name}: {error}; pieces and stages were made from different layouts") from error


def arena_weights(
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    wire: Wire,
    kind: LayoutKind,
    make_backing: MakeBacking,
    page_bytes: int = PAGE_BYTES,
    device: Device = Device.CPU,
) -> ArenaWeights:
    """Plans, takes the memory and loads the layout `kind`.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        MissingMemoryError: there is no memory for the arena.
    """
    plan = exchange_plan(files, layouts, page_bytes, device)
    sizes = {"weights arena": plan.arenas.num_pages[wire.rank], "weights staging": plan.staging_pages}
    arena, staging = (make_backing(name, num_pages * page_bytes) for name, num_pages in sizes.items())
    weights = ArenaWeights(files, plan, Arena(wire.rank, arena, staging, page_bytes), wire)
    weights.load_both(kind)
    return weights
