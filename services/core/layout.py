"""Layouts as data: which rank holds which layers, heads, columns and vocabulary rows under PP and under TP.

A layout is a value computed from the model's geometry and two vectors; model code is written once against a
`RankShare`. All ranges are half-open. Shares are whole units (a KV group with its query heads, a quantisation block of
FFN columns, a row of the vocabulary), rounded by largest remainder; a share may be empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.core.ids import LayoutKind, Rank


class LayoutError(ValueError):
    """A vector that cannot be a layout of this model; the message names the vector and both numbers."""


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of indexes [begin, end)."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise LayoutError(f"a span needs 0 <= begin <= end, got [{self.begin}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, index: int) -> bool:
        return self.begin <= index < self.end

    def times(self, factor: int) -> "Span":
        """The same range in units `factor` times smaller."""
        return Span(self.begin * factor, self.end * factor)


@dataclass(frozen=True, slots=True)
class ShardUnits:
    """What is cut, and how finely: taken from the model's geometry and its weight types."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    """FFN columns."""
    ffn_unit: int
    """Columns that stay together: the longest quantisation block along the FFN axis."""
    vocab: int

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads of one KV group."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank computes under one layout."""

    layers: Span
    kv_heads: Span
    heads: Span
    ffn: Span
    vocab: Span

    @property
    def has_head(self) -> bool:
        """Whether this rank computes any logits."""
        return len(self.vocab) > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement of the whole model; `shares[rank]`."""

    kind: LayoutKind
    shares: tuple[RankShare, ...]

    @property
    def num_ranks(self) -> int:
        """Members of the group."""
        return len(self.shares)

    @property
    def num_stages(self) -> int:
        """Batches that can be at work at once."""
        return self.num_ranks if self.kind is LayoutKind.PP else 1

    @property
    def sampling_rank(self) -> Rank:
        """The last stage's rank, in both layouts, so that sampler state never moves."""
        return Rank(self.num_ranks - 1)


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Parts of `total` in proportion to `weights`, summing to it; leftovers go to the largest remainders.

    Raises:
        LayoutError: no weight, a weight below 0 or a sum of 0.
    """
    weight_sum = sum(weights)
    if not weights or min(weights) < 0 or weight_sum == 0:
        raise LayoutError(f"weights must be non-negative with a positive sum, got {list(weights)}")
    parts = [total * weight // weight_sum for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(total * weights[rank] % weight_sum), rank))
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def spans(parts: Sequence[int], limit: int | None = None) -> tuple[Span, ...]:
    """Consecutive spans of these lengths; ends are cut at `limit` (a last unit that is not whole)."""
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part)
    if limit is not None:
        bounds = [min(bound, limit) for bound in bounds]
    return tuple(Span(begin, end) for begin, end in pairwise(bounds))


def pp_layout(units: ShardUnits, num_ranks: int, pp_layers: Sequence[int] | None = None) -> Layout:
    """Whole layers per rank: `pp_layers`, or as even as whole layers allow; the last stage holds the head.

    Raises:
        LayoutError: the list's length or sum does not fit, or a stage would have no layer.
    """
    if pp_layers is None:
        pp_layers = largest_remainder(units.num_layers, [1] * num_ranks)
    if len(pp_layers) != num_ranks:
        raise LayoutError(f"pp_layers has {len(pp_layers)} stages for {num_ranks} ranks: give one count per rank")
    if sum(pp_layers) != units.num_layers:
        raise LayoutError(f"pp_layers sums to {sum(pp_layers)}, the model has {units.num_layers} layers")
    if min(pp_layers) < 1:
        raise LayoutError(f"pp_layers {list(pp_layers)}: a stage without a layer; use at most {units.num_layers} ranks")
    last = num_ranks - 1
    whole = {
        "kv_heads": Span(0, units.num_kv_heads),
        "heads": Span(0, units.num_heads),
        "ffn": Span(0, units.ffn),
    }
    shares = tuple(
        RankShare(layers=layers, vocab=Span(0, units.vocab if rank == last else 0), **whole)
        for rank, layers in enumerate(spans(pp_layers))
    )
    return Layout(LayoutKind.PP, shares)


def tp_layout(units: ShardUnits, num_ranks: int, tp_weights: Sequence[int] | None = None) -> Layout:
    """A share of every layer per rank, in proportion to `tp_weights` (equal by default), in whole units.

    Raises:
        LayoutError: the vector's length does not fit or its weights cannot be shares.
    """
    if tp_weights is None:
        tp_weights = [1] * num_ranks
    if len(tp_weights) != num_ranks:
        raise LayoutError(f"tp_weights has {len(tp_weights)} shares for {num_ranks} ranks: give one weight per rank")
    kv_heads = spans(largest_remainder(units.num_kv_heads, tp_weights))
    ffn_units = largest_remainder(-(-units.ffn // units.ffn_unit), tp_weights)
    ffn = spans([count * units.ffn_unit for count in ffn_units], limit=units.ffn)
    vocab = spans(largest_remainder(units.vocab, tp_weights))
    shares = tuple(
        RankShare(
            layers=Span(0, units.num_layers),
            kv_heads=kv_heads[rank],
            heads=kv_heads[rank].times(units.heads_per_kv_head),
            ffn=ffn[rank],
            vocab=vocab[rank],
        )
        for rank in range(num_ranks)
    )
    return Layout(LayoutKind.TP, shares)
