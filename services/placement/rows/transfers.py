"""Which rows of the KV cache, and which parts of linear-attention states, go from which rank to which in a flip.

Pure and address-free: every rank computes the same legs from the FLIP entry's live blocks. Three ways to hold a cache,
and a flip leads from any to any: some layers with all heads and all blocks (PP); all layers with some heads and all
blocks (TP by heads); all layers and heads with some blocks (TP by tokens). A state is held like a cache whose blocks
are state slots, part by part, since each part has heads of its own.

Invariants: the legs into a rank cover its part of everything live once; a rank that holds a part is its own source;
whose a block is depends on its id and the token vector alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from services.core.ids import BlockId, LayoutKind, Rank
from services.core.layout import Layout, LayoutError, Span, spans
from services.placement.reshard import SourceChoice, cut_at, stable_hash

BlockRuns = tuple[tuple[BlockId, int], ...]
"""(begin, length): rising, disjoint, none empty."""


@dataclass(frozen=True, slots=True)
class BlockShare:
    """A rank's blocks under a token vector: those that lie within `part` of every `period` blocks."""

    period: int
    part: Span

    def __contains__(self, block: BlockId) -> bool:
        return block % self.period in self.part

    def count(self, num_blocks: int) -> int:
        """How many of the blocks [0, num_blocks): what the rank's pool has to hold."""
        periods, rest = divmod(num_blocks, self.period)
        return periods * len(self.part) + min(max(rest - self.part.begin, 0), len(self.part))

    def local(self, block: BlockId) -> int:
        """The place of an own block in the rank's pool, in [0, count): a run of own blocks is a run there."""
        assert block in self, f"block {block} belongs to another rank"
        return block // self.period * len(self.part) + block % self.period - self.part.begin

    def runs(self, live: Iterable[tuple[BlockId, int]]) -> Iterator[tuple[BlockId, int]]:
        """The own blocks among `live`, in runs."""
        if len(self.part) == self.period:
            yield from live
            return
        for begin, length in live:
            end = begin + length
            for first in range(begin // self.period * self.period, end, self.period):
                low, high = max(begin, first + self.part.begin), min(end, first + self.part.end)
                if low < high:
                    yield BlockId(low), high - low


def block_shares(kv_tokens: Sequence[int]) -> tuple[BlockShare, ...]:
    """Each rank's blocks under a token vector."""
    return tuple(BlockShare(sum(kv_tokens), part) for part in spans(kv_tokens))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a cache or of a state's part."""

    layers: Span
    heads: Span
    blocks: BlockShare
    """All blocks: a share with the whole period."""


ALL_BLOCKS = BlockShare(1, Span(0, 1))


def kv_holdings(layout: Layout, num_kv_heads: int) -> tuple[Holding, ...]:
    """What each rank holds of the KV cache."""
    if layout.kv_tokens is None:
        return tuple(Holding(share.layers, share.kv_heads, ALL_BLOCKS) for share in layout.shares)
    parts = zip(layout.shares, block_shares(layout.kv_tokens), strict=True)
    return tuple(Holding(share.layers, Span(0, num_kv_heads), blocks) for share, blocks in parts)


@dataclass(frozen=True, slots=True)
class PooledHeads:
    """The columns of one pool that all ranks map: every head's own, then one for each further rank that has it."""

    places: tuple[Span, ...]
    """Where each rank's KV heads lie."""
    copied: tuple[int, ...]
    """Heads that there are once more, in the order of their columns behind all heads."""


def pooled_heads(layout: Layout, num_kv_heads: int) -> PooledHeads:
    """The columns that a layout's ranks read; no two of them that have the same layers share one."""
    places: list[Span] = []
    copied: list[int] = []
    num_seen = 0
    for share in layout.shares:
        heads = share.kv_heads
        if layout.kind is LayoutKind.TP and layout.kv_tokens is None and heads.begin < min(num_seen, heads.end):
            assert len(heads) == 1, "a rank shares one head with others, or none"
            place = num_kv_heads + len(copied)
            copied.append(heads.begin)
            heads = Span(place, place + 1)
        else:
            num_seen = max(num_seen, heads.end)
        places.append(heads)
    return PooledHeads(tuple(places), tuple(copied))


def state_holdings(layout: Layout, groups: Sequence[Span], heads_per_group: int) -> tuple[Holding, ...]:
    """What each rank holds of one part of a linear-attention state, whose heads are cut in whole groups.

    `groups[rank]`: the rank's groups; every part of a state is cut at the same ones. Layers count those of this kind.
    """
    owned = zip(layout.shares, groups, strict=True)
    return tuple(Holding(share.layers, span.times(heads_per_group), ALL_BLOCKS) for share, span in owned)


@dataclass(frozen=True, slots=True)
class RowTransfer:
    """Rows on their way: of these layers and heads, all of these blocks. Equal ranks: a local leg.

    Packed in this order, outermost first: layer, run, block, head.
    """

    source: Rank
    destination: Rank
    layers: Span
    heads: Span
    runs: BlockRuns

    @property
    def num_blocks(self) -> int:
        """Blocks, or state slots, in all runs."""
        return _num_blocks(self.runs)

    def num_bytes(self, head_block_bytes: int) -> int:
        """`head_block_bytes`: of one block of one head in one layer, keys and values."""
        return self.num_blocks * len(self.layers) * len(self.heads) * head_block_bytes


@dataclass(frozen=True, slots=True)
class RowPlan:
    """All legs, by destination."""

    legs: tuple[RowTransfer, ...]
    hash: int
    """64 bits over the legs and what their runs follow from; equal on all ranks or not the same plan."""

    def of(self, rank: Rank) -> tuple[RowTransfer, ...]:
        """The part that a rank sends, receives or copies."""
        return tuple(leg for leg in self.legs if rank in (leg.source, leg.destination))


def row_plan(source: Sequence[Holding], destination: Sequence[Holding], live: BlockRuns) -> RowPlan:
    """How the live blocks come from one way of holding them to another.

    Raises:
        LayoutError: the source lacks a part that the destination needs.
    """
    choice, live_runs = SourceChoice(), _LiveRuns(live)
    legs = tuple(
        leg
        for rank, wanted in enumerate(destination)
        for leg in _legs_into(Rank(rank), wanted, source, live_runs, choice)
    )
    parts = ((leg.source, leg.destination, leg.layers, leg.heads) for leg in legs)
    return RowPlan(legs, stable_hash([live, tuple(source), tuple(destination), *parts]))


class _LiveRuns:
    """The live blocks that two shares have in common, worked out once for each pair: many legs have the same runs."""

    __slots__ = ("_common", "_live")

    def __init__(self, live: BlockRuns) -> None:
        self._live = live
        self._common: dict[tuple[BlockShare, BlockShare], BlockRuns] = {}

    def common(self, first: BlockShare, second: BlockShare) -> BlockRuns:
        """Live blocks of both."""
        if (first, second) not in self._common:
            self._common[first, second] = tuple(second.runs(first.runs(self._live)))
        return self._common[first, second]


def _legs_into(
    destination: Rank, wanted: Holding, source: Sequence[Holding], live: _LiveRuns, choice: SourceChoice
) -> Iterator[RowTransfer]:
    num_wanted = _num_blocks(live.common(wanted.blocks, ALL_BLOCKS))
    for layers, heads in product(
        cut_at(wanted.layers, (held.layers for held in source)), cut_at(wanted.heads, (held.heads for held in source))
    ):
        num_found = 0
        for blocks, holders in _holders(source, layers, heads).items():
            runs = live.common(wanted.blocks, blocks)
            num_blocks = _num_blocks(runs)
            num_found += num_blocks
            if runs:
                chosen = choice.choose(holders, destination, num_blocks * len(layers) * len(heads))
                yield RowTransfer(chosen, destination, layers, heads, runs)
        if num_found != num_wanted:
            raise LayoutError(
                f"rank {destination} needs {num_wanted} blocks of layers [{layers.begin}, {layers.end}), heads "
                f"[{heads.begin}, {heads.end}); the ranks of the layout before hold {num_found}: compute both layouts "
                "from the same model"
            )


def _num_blocks(runs: BlockRuns) -> int:
    return sum(length for _, length in runs)


def _holders(source: Sequence[Holding], layers: Span, heads: Span) -> dict[BlockShare, list[Rank]]:
    """Who holds these layers and heads, by blocks; several with the same blocks hold the same bytes."""
    holders: dict[BlockShare, list[Rank]] = {}
    for rank, held in enumerate(source):
        if held.layers.covers(layers) and held.heads.covers(heads):
            holders.setdefault(held.blocks, []).append(Rank(rank))
    return holders
