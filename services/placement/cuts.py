"""How a model is cut over ranks: the PP and the TP layout from its units and the configured vectors.

Pure. Shares are whole units (a KV group with its query heads, a quantisation block of FFN columns, a row of the
vocabulary), rounded by largest remainder; a share may be empty. Two vectors, never mixed: `tp_weights` shares weights
and compute, `kv_tokens` shares the rows of the KV cache where they are cut by tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout, LayoutError, RankShare, ShardUnits, Span, spans

MAX_TOKEN_PERIOD = 256
"""Blocks after which the ownership of KV rows by a token vector repeats: longer, and short contexts lie on one rank."""
TOKEN_STEPS = 64
"""Largest sum of a proposed token vector, unless there are more ranks."""


def checked_vector(name: str, vector: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The vector itself, if it has one positive whole number per rank.

    Raises:
        LayoutError: it has another length, or an entry is not whole or not positive.
    """
    if len(vector) != num_ranks:
        raise LayoutError(f"{name} has {len(vector)} shares for {num_ranks} ranks: give one weight per rank")
    for rank, entry in enumerate(vector):
        if not isinstance(entry, int) or entry < 1:
            raise LayoutError(
                f"{name} {list(vector)}: rank {rank} has {entry}, a whole number of at least 1 expected; leave a rank "
                "that is to hold nothing out of the group"
            )
    return tuple(vector)


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
        RankShare(
            layers=layers,
            vocab=Span(0, units.vocab if rank == last else 0),
            num_padded_vocab=units.num_padded_vocab if rank == last else 0,
            **whole,
        )
        for rank, layers in enumerate(spans(pp_layers))
    )
    return Layout(LayoutKind.PP, shares)


def tp_layout(
    units: ShardUnits,
    num_ranks: int,
    tp_weights: Sequence[int] | None = None,
    *,
    kv_tokens: Sequence[int] | None = None,
    replicate_kv_heads: bool = False,
    embedding_by_rows: bool = False,
) -> Layout:
    """A share of every layer per rank, in proportion to `tp_weights` (equal by default), in whole units.

    `kv_tokens`: the KV cache is cut by tokens in these proportions, not by heads. `replicate_kv_heads`: where ranks
    outnumber KV heads, several ranks hold the same KV head and share its query heads; otherwise some hold no head.

    Raises:
        LayoutError: a vector's length does not fit or its entries cannot be shares.
    """
    weights = checked_vector("tp_weights", [1] * num_ranks if tp_weights is None else tp_weights, num_ranks)
    if replicate_kv_heads and num_ranks > units.num_kv_heads:
        heads = _replicated_heads(units, weights)
    else:
        kv_heads = spans(largest_remainder(units.num_kv_heads, weights))
        heads = tuple((owned, owned.times(units.heads_per_kv_head)) for owned in kv_heads)
    ffn_units = largest_remainder(-(-units.ffn // units.ffn_unit), weights)
    ffn = spans([count * units.ffn_unit for count in ffn_units], limit=units.ffn)
    vocab_units = largest_remainder(-(-units.vocab // units.vocab_unit), weights)
    vocab = spans([count * units.vocab_unit for count in vocab_units], limit=units.vocab)
    shares = tuple(
        RankShare(
            layers=Span(0, units.num_layers),
            kv_heads=heads[rank][0],
            heads=heads[rank][1],
            ffn=ffn[rank],
            vocab=vocab[rank],
            num_padded_vocab=units.num_padded_vocab if len(vocab[rank]) and vocab[rank].end == units.vocab else 0,
        )
        for rank in range(num_ranks)
    )
    tokens = None if kv_tokens is None else _reduced_tokens(kv_tokens, num_ranks)
    return Layout(LayoutKind.TP, shares, tokens, embedding_by_rows)


@dataclass(frozen=True, slots=True)
class _HeadAssignment:
    """KV heads dealt to the first ranks."""

    load: Fraction
    """The most query heads per weight of any rank."""
    unevenness: Fraction
    """Sum of squared heads per weight: the least where all ranks take part."""
    num_copies: int
    """KV heads held, each counted on every rank that holds it."""
    heads: tuple[tuple[Span, Span], ...] = ()
    """Per rank, its KV heads and its query heads."""

    def followed_by(self, weights: Sequence[int], heads: Sequence[tuple[Span, Span]]) -> "_HeadAssignment":
        """The same, and these to the next ranks."""
        counts = [(len(query), weight) for weight, (_, query) in zip(weights, heads, strict=True)]
        return _HeadAssignment(
            load=max(self.load, *(Fraction(count, weight) for count, weight in counts)),
            unevenness=self.unevenness + sum(Fraction(count * count, weight) for count, weight in counts),
            num_copies=self.num_copies + sum(len(kv) for kv, _ in heads),
            heads=(*self.heads, *heads),
        )

    @property
    def cost(self) -> tuple[Fraction, Fraction, int]:
        """The lower the better."""
        return self.load, self.unevenness, self.num_copies


def _replicated_heads(units: ShardUnits, weights: Sequence[int]) -> tuple[tuple[Span, Span], ...]:
    """KV heads and query heads per rank: a rank owns whole groups alone, or shares one group's query heads with others.

    So every rank has the same number of query heads to each of its KV heads. The least loaded way, among those the most
    even one, and then the one with the fewest copies: dealt from left to right, keeping the best for every number of
    ranks and of heads.
    """
    num_ranks, num_kv_heads = len(weights), units.num_kv_heads
    best: dict[tuple[int, int], _HeadAssignment] = {(0, 0): _HeadAssignment(Fraction(0), Fraction(0), 0)}
    for rank in range(num_ranks):
        for kv_head in range(num_kv_heads + 1):
            dealt = best.get((rank, kv_head))
            for heads in () if dealt is None else _next_deals(units, weights[rank:], kv_head):
                assert dealt is not None
                after = dealt.followed_by(weights[rank : rank + len(heads)], heads)
                place = (rank + len(heads), max((kv_head, *(kv.end for kv, _ in heads))))
                if place not in best or after.cost < best[place].cost:
                    best[place] = after
    return best[num_ranks, num_kv_heads].heads


def _next_deals(units: ShardUnits, weights: Sequence[int], kv_head: int) -> Iterator[tuple[tuple[Span, Span], ...]]:
    """What the next ranks may hold from `kv_head` on: one rank any number of groups, or several one group together."""
    group = units.heads_per_kv_head
    for end in range(kv_head, units.num_kv_heads + 1):
        yield ((Span(kv_head, end), Span(kv_head, end).times(group)),)
    if kv_head < units.num_kv_heads:
        for num_sharing in range(2, min(len(weights), group) + 1):
            begins = kv_head * group
            shared = spans(largest_remainder(group, weights[:num_sharing]))
            yield tuple(
                (Span(kv_head, kv_head + 1 if len(part) else kv_head), Span(begins + part.begin, begins + part.end))
                for part in shared
            )


def _reduced_tokens(kv_tokens: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    vector = checked_vector("kv_tokens", kv_tokens, num_ranks)
    reduced = tuple(share // math.gcd(*vector) for share in vector)
    if sum(reduced) > MAX_TOKEN_PERIOD:
        raise LayoutError(
            f"kv_tokens {list(vector)} repeats after {sum(reduced)} blocks, at most {MAX_TOKEN_PERIOD} are allowed: "
            f"write {list(_fairest_vector(reduced))}"
        )
    return reduced


def equalising_token_vector(free_bytes: Sequence[int], token_bytes: int) -> tuple[int, ...]:
    """The `kv_tokens` under which ranks with so much memory left after their weights fill up together.

    `token_bytes`: of one token's keys and values over all layers and heads.

    Raises:
        LayoutError: a rank has no room for a token.
    """
    tokens = [free // token_bytes for free in free_bytes]
    for rank, count in enumerate(tokens):
        if count < 1:
            raise LayoutError(
                f"rank {rank} has {free_bytes[rank]} bytes left, one token takes {token_bytes}: give it less weight in "
                "tp_weights, or more memory"
            )
    return _fairest_vector(tokens)


def token_capacity(tokens: Sequence[int], kv_tokens: Sequence[int]) -> tuple[int, Rank]:
    """Tokens that the group holds under a token vector, and the rank that binds: the first to be full.

    `tokens[rank]`: that the rank has room for.
    """
    capacities = [room * sum(kv_tokens) // share for room, share in zip(tokens, kv_tokens, strict=True)]
    return min(capacities), Rank(capacities.index(min(capacities)))


def _fairest_vector(weights: Sequence[int]) -> tuple[int, ...]:
    """The shortest vector in these proportions that wastes at most a hundredth more than the best of the short ones."""
    vectors = [
        tuple(max(share, 1) for share in largest_remainder(total, weights))
        for total in range(len(weights), max(TOKEN_STEPS, len(weights)) + 1)
    ]
    capacities = [token_capacity(weights, vector)[0] for vector in vectors]
    good = next(index for index, capacity in enumerate(capacities) if 100 * capacity >= 99 * max(capacities))
    return vectors[good]
