"""One rank's weights in one arena, of which the layout in force has the bytes; views of both are handed out once.

Loading streams each piece from the mapped files to its pages. At start both layouts are loaded, one after the other
into the same pages, so that the checksum of every piece that may ever come is known from the files and not from who
sends it. Norms lie beside the arena, for both layouts.

Invariant: `held` is the layout whose every piece is in the arena with the files' bytes, None while pieces move.
"""

from collections.abc import Collection, Mapping

from torch import Tensor

from kernels.cpu.checksum import checksum
from kernels.weights import Matrix, PiecedMatrix, PlacedMatrix, Weight
from services.core.ids import LayoutKind, Rank
from services.core.layout import Span
from services.models.ggml_types import GgmlType
from services.models.model_files import ModelFiles
from services.placement.exchange_plan import ExchangePlan
from services.placement.pieces import Piece
from services.placement.shares import TensorShard
from services.worker.memory.weights.arena import Arena
from services.worker.memory.weights.owned_weights import file_vector, fill, release_mapped


class ArenaWeights:
    """See RankMemory for the order of calls. Use from one thread."""

    def __init__(self, files: ModelFiles, plan: ExchangePlan, arena: Arena, rank: Rank) -> None:
        self._files, self._plan, self._arena = files, plan, arena
        self._maps = {kind: plan.page_map(kind, rank) for kind in LayoutKind}
        self._vectors: dict[str, Tensor] = {}
        self._views = {kind: self._handed_out(kind) for kind in LayoutKind}
        self._sums: dict[LayoutKind, dict[TensorShard, int]] = {}
        self.held: LayoutKind | None = None

    @property
    def num_bytes(self) -> int:
        """Of the arena: the larger of the two layouts."""
        return self._arena.flat.numel()

    def of(self, kind: LayoutKind) -> "LayoutWeights":
        """What a stage of this layout sees; its bytes are there while the layout is held."""
        return LayoutWeights(self, self._views[kind])

    def load_both(self, kind: LayoutKind) -> None:
        """Start-up: takes the checksums of both layouts' pieces; `kind` is held then."""
        for turn in (kind.other, kind):
            self._fill(turn, self._maps[turn])
            self._sums[turn] = {piece: self._sum(turn, piece) for piece in self._maps[turn]}
            self.held = turn
        release_mapped(self._files)

    def wrong(self, kind: LayoutKind) -> list[TensorShard]:
        """Pieces of a layout that have not the files' bytes, among those that are not the same in both layouts."""
        return [piece for piece in self._moving(kind) if self._sum(kind, piece) != self._sums[kind][piece]]

    def refill(self, kind: LayoutKind) -> list[TensorShard]:
        """Makes `kind` the layout that is held, from the files; what is wrong even so (a damaged file)."""
        self.held = None
        self._fill(kind, self._moving(kind))
        wrong = self.wrong(kind)
        self.held = None if wrong else kind
        return wrong

    def close(self) -> None:
        """Returns the arena's memory; no view of it may be touched from here on."""
        self.held = None
        self._arena.close()

    def _moving(self, kind: LayoutKind) -> list[TensorShard]:
        return [piece for piece in self._maps[kind] if piece not in self._maps[kind.other]]

    def _num_bytes(self, piece: TensorShard) -> int:
        return self._plan.tensors[piece.tensor].num_bytes(piece.rows, piece.columns)

    def _memory(self, kind: LayoutKind, piece: TensorShard) -> Tensor:
        pages = self._maps[kind][piece]
        return self._arena.run(pages.begin, len(pages))[: self._num_bytes(piece)]

    def _sum(self, kind: LayoutKind, piece: TensorShard) -> int:
        return checksum(self._memory(kind, piece))

    def _fill(self, kind: LayoutKind, pieces: Collection[TensorShard]) -> None:
        for piece in pieces:
            memory, is_expanded = self._memory(kind, piece), piece.tensor in self._plan.expanded
            fill(memory, Piece(piece, is_expanded, 0, memory.numel()), self._files)

    def _handed_out(self, kind: LayoutKind) -> dict[str, list[tuple[TensorShard, Matrix]]]:
        views: dict[str, list[tuple[TensorShard, Matrix]]] = {}
        for piece, pages in self._maps[kind].items():
            is_expanded = piece.tensor in self._plan.expanded
            ggml_type = GgmlType.F32 if is_expanded else self._files.tensors[piece.tensor].ggml_type
            matrix = self._arena.matrix(kind, pages, ggml_type, len(piece.rows), len(piece.columns))
            views.setdefault(piece.tensor, []).append((piece, matrix))
        return views

    def whole(self, name: str) -> tuple[str, Span, Span]:
        """A tensor's source, and all of its rows and columns."""
        tensor = self._plan.tensors[name]
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
