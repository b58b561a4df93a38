"""Where each piece of the weights lies in a rank's arena of pages, under both layouts at once.

A piece is a part of a tensor that neither layout cuts: a PP stage holds a layer as the pieces that TP will own, so
that a flip moves whole pieces only. Every piece is one run of pages, begins at a page and is padded to whole pages.
Pages are numbers here, never addresses.

Invariants: a piece that a rank holds in both layouts has the same pages in both; an arena is as large as the larger of
the two layouts; within a layout no page has two pieces.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from services.core.ids import Rank
from services.core.layout import Span, spans
from services.placement.reshard import TransferPlan, cut_at, transfer_plan
from services.placement.shares import CanonicalTensor, RankShards, TensorShard

PageMap = Mapping[TensorShard, Span]
"""Pages of each piece that a rank holds under one layout."""


def common_pieces(
    tensors: Sequence[CanonicalTensor], first: RankShards, second: RankShards
) -> tuple[RankShards, RankShards]:
    """Both layouts in pieces that neither of them cuts, each named after its tensor's source and listed once a rank."""
    by_name = {tensor.name: tensor for tensor in tensors}
    shards: dict[str, list[TensorShard]] = defaultdict(list)
    for layout in (first, second):
        for shard in (shard for held in layout for shard in held):
            shards[by_name[shard.tensor].source].append(shard)
    cuts = {
        source: ({shard.rows for shard in held}, {shard.columns for shard in held}) for source, held in shards.items()
    }

    def pieces(shard: TensorShard) -> list[TensorShard]:
        source = by_name[shard.tensor].source
        rows, columns = cuts[source]
        parts = product(cut_at(shard.rows, rows), cut_at(shard.columns, columns))
        return [TensorShard(source, *part) for part in parts]

    def cut(layout: RankShards) -> RankShards:
        return tuple(tuple(dict.fromkeys(piece for shard in held for piece in pieces(shard))) for held in layout)

    return cut(first), cut(second)


@dataclass(frozen=True, slots=True)
class Arenas:
    """The page maps of both layouts, `[rank]`, and what each rank's arena holds."""

    page_bytes: int
    num_pages: tuple[int, ...]
    first: tuple[PageMap, ...]
    second: tuple[PageMap, ...]
    to_second: TransferPlan
    """In whole pieces; its local legs are the pieces that stay."""
    to_first: TransferPlan


def place_pieces(tensors: Sequence[CanonicalTensor], first: RankShards, second: RankShards, page_bytes: int) -> Arenas:
    """Places of all pieces of two layouts, given in shards (`held_shards`)."""
    first, second = common_pieces(tensors, first, second)
    to_second, to_first = transfer_plan(tensors, first, second), transfer_plan(tensors, second, first)
    by_name = {tensor.name: tensor for tensor in tensors}

    def num_pages(piece: TensorShard) -> int:
        return -(-by_name[piece.tensor].num_bytes(piece.rows, piece.columns) // page_bytes)

    maps = [
        _two_maps(before, after, _peers(to_second, Rank(rank)), num_pages)
        for rank, (before, after) in enumerate(zip(first, second, strict=True))
    ]
    sizes = tuple(max((span.end for page_map in pair for span in page_map.values()), default=0) for pair in maps)
    return Arenas(
        page_bytes, sizes, tuple(pair[0] for pair in maps), tuple(pair[1] for pair in maps), to_second, to_first
    )


def _peers(plan: TransferPlan, rank: Rank) -> dict[TensorShard, Rank]:
    """Whom a piece that moves goes to, or comes from; of several, the first. Pieces that nobody takes are absent."""
    peers: dict[TensorShard, Rank] = {}
    for run in plan.of(rank):
        if run.source != run.destination:
            peers.setdefault(run.source_shard, run.destination if run.source == rank else run.source)
    return peers


def _two_maps(
    before: Sequence[TensorShard],
    after: Sequence[TensorShard],
    peers: Mapping[TensorShard, Rank],
    num_pages: Callable[[TensorShard], int],
) -> tuple[PageMap, PageMap]:
    """A rank's pieces packed: what stays, then what moves, by peer, so that what two ranks exchange lies in step."""
    taken = set(after)
    stays = dict.fromkeys(piece for piece in before if piece in taken)
    nobody = len(before) + len(after)

    def packed(held: Sequence[TensorShard]) -> PageMap:
        moves = sorted((piece for piece in held if piece not in stays), key=lambda piece: peers.get(piece, nobody))
        pieces = [*stays, *moves]
        return dict(zip(pieces, spans([num_pages(piece) for piece in pieces]), strict=True))

    return packed(before), packed(after)
