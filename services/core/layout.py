"""Layouts as data: which rank holds which layers, heads, columns and vocabulary rows under PP and under TP.

A layout is a value; model code is written once against a `RankShare`. All ranges are half-open; a share may be empty.
How layouts are computed from a model's units: placement.cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
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

    def covers(self, other: "Span") -> bool:
        """Whether all of `other` lies within."""
        return self.begin <= other.begin and other.end <= self.end

    def times(self, factor: int) -> "Span":
        """The same range in units `factor` times smaller."""
        return Span(self.begin * factor, self.end * factor)


class KvSharding(Enum):
    """How the ranks of a TP layout share the KV cache."""

    HEADS = "heads"
    """Each rank has all rows of its own KV heads."""
    TOKENS = "tokens"
    """Each rank has some rows, of all KV heads; attention merges partial results."""


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
    """Rows that the files have."""
    vocab_unit: int = 1
    """Rows of the vocabulary that stay together; above 1 the last unit may reach past the files' rows."""

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads of one KV group."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_padded_vocab(self) -> int:
        """Rows past the vocabulary that fill its last unit: zeros that exist in no file."""
        return -self.vocab % self.vocab_unit


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank computes under one layout."""

    layers: Span
    kv_heads: Span
    heads: Span
    ffn: Span
    vocab: Span
    """Rows that exist in the files."""
    num_padded_vocab: int = 0
    """Rows of zeros after those of `vocab`."""

    @property
    def has_head(self) -> bool:
        """Whether this rank computes any logits."""
        return len(self.vocab) > 0


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement of the whole model; `shares[rank]`."""

    kind: LayoutKind
    shares: tuple[RankShare, ...]
    kv_tokens: tuple[int, ...] | None = None
    """Shares of the KV cache's rows, reduced; None: the cache is cut by layers and heads."""
    embedding_by_rows: bool = False
    """Whether a rank holds its vocabulary share of the embedding, not the whole."""

    @property
    def kv_sharding(self) -> KvSharding:
        """How ranks with the same layers share the KV cache."""
        return KvSharding.HEADS if self.kv_tokens is None else KvSharding.TOKENS

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


def spans(parts: Sequence[int], limit: int | None = None) -> tuple[Span, ...]:
    """Consecutive spans of these lengths; ends are cut at `limit` (a last unit that is not whole)."""
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part)
    if limit is not None:
        bounds = [min(bound, limit) for bound in bounds]
    return tuple(Span(begin, end) for begin, end in pairwise(bounds))
