"""Layouts cover the model once: property tests over geometries and vectors, and the refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ids import LayoutKind
from services.core.layout import KvSharding, LayoutError, ShardUnits, Span
from services.placement.cuts import (
    TOKEN_STEPS,
    equalising_token_vector,
    largest_remainder,
    pp_layout,
    token_capacity,
    tp_layout,
)

SMOLLM2 = ShardUnits(num_layers=30, num_heads=9, num_kv_heads=3, ffn=1536, ffn_unit=32, vocab=49152)


@st.composite
def units(draw: st.DrawFn) -> ShardUnits:
    kv_heads = draw(st.integers(1, 8))
    return ShardUnits(
        num_layers=draw(st.integers(8, 40)),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        ffn=draw(st.integers(1, 2000)),
        ffn_unit=draw(st.sampled_from([1, 32, 256])),
        vocab=draw(st.integers(1, 1000)),
    )


def covers(parts: list[Span], total: int) -> bool:
    ends = [0, *(part.end for part in parts)]
    return ends[-1] == total and all(part.begin == end for part, end in zip(parts, ends, strict=False))


@given(st.integers(0, 10_000), st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any))
def test_largest_remainder_sums_and_stays_within_one_of_the_exact_share(total: int, weights: list[int]) -> None:
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))


@given(units(), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_a_tp_layout_covers_every_axis_once_in_whole_units(model: ShardUnits, weights: list[int]) -> None:
    layout = tp_layout(model, len(weights), weights)
    shares = layout.shares
    assert layout.kind is LayoutKind.TP
    assert covers([share.kv_heads for share in shares], model.num_kv_heads)
    assert covers([share.heads for share in shares], model.num_heads)
    assert covers([share.ffn for share in shares], model.ffn)
    assert covers([share.vocab for share in shares], model.vocab)
    assert all(share.layers == Span(0, model.num_layers) for share in shares)
    for share in shares:
        assert share.heads == share.kv_heads.times(model.heads_per_kv_head)
        assert share.ffn.begin % model.ffn_unit == 0 or share.ffn.begin == model.ffn


@given(units(), st.integers(1, 8))
def test_a_pp_layout_covers_the_layers_once_and_the_last_stage_has_the_head(model: ShardUnits, num_ranks: int) -> None:
    layout = pp_layout(model, num_ranks)
    assert covers([share.layers for share in layout.shares], model.num_layers)
    assert [share.has_head for share in layout.shares] == [False] * (num_ranks - 1) + [True]
    assert layout.num_stages == num_ranks
    assert layout.sampling_rank == num_ranks - 1


def test_three_kv_groups_over_two_equal_ranks_are_two_and_one() -> None:
    assert [len(share.kv_heads) for share in tp_layout(SMOLLM2, 2).shares] == [2, 1]


def test_forty_eight_heads_under_30_17_17_are_24_12_12() -> None:
    model = ShardUnits(num_layers=8, num_heads=48, num_kv_heads=48, ffn=256, ffn_unit=1, vocab=10)
    got = [len(share.heads) for share in tp_layout(model, 3, [30, 17, 17]).shares]
    assert got == [22, 13, 13]
    grouped = ShardUnits(num_layers=8, num_heads=48, num_kv_heads=4, ffn=256, ffn_unit=1, vocab=10)
    assert [len(share.heads) for share in tp_layout(grouped, 3, [30, 17, 17]).shares] == [24, 12, 12]


@pytest.mark.parametrize(
    ("pp_layers", "message"),
    [
        ([15, 15, 0], r"2 ranks"),
        ([10, 10], r"sums to 20, the model has 30"),
        ([30, 0], r"a stage without a layer"),
    ],
)
def test_a_stage_list_that_cannot_be_is_refused_with_the_numbers(pp_layers: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pp_layout(SMOLLM2, 2, pp_layers)


@pytest.mark.parametrize("weights", [[1], [0, 0], [2, -1]])
def test_weights_that_cannot_be_shares_are_refused(weights: list[int]) -> None:
    with pytest.raises(LayoutError):
        tp_layout(SMOLLM2, 2, weights)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1, 2, 3], r"tp_weights has 3 shares for 2 ranks: give one"),
        ([2, 0], r"tp_weights \[2, 0\]: rank 1 has 0, a whole number of at least 1 .*leave a rank"),
        ([2, 0.5], r"rank 1 has 0\.5, a whole number"),
    ],
)
def test_a_vector_that_cannot_be_is_refused_with_rank_number_and_remedy(vector: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        tp_layout(SMOLLM2, 2, vector)
    with pytest.raises(LayoutError, match=message.replace("tp_weights", "kv_tokens")):
        tp_layout(SMOLLM2, 2, kv_tokens=vector)


def test_the_token_vector_is_not_the_weight_vector() -> None:
    layout = tp_layout(SMOLLM2, 2, [2, 1], kv_tokens=[10, 30])
    assert layout.kv_sharding is KvSharding.TOKENS
    assert layout.kv_tokens == (1, 3)
    assert [len(share.kv_heads) for share in layout.shares] == [2, 1]
    by_heads = tp_layout(SMOLLM2, 2, [2, 1])
    assert by_heads.kv_sharding is KvSharding.HEADS
    assert by_heads.shares == layout.shares


def test_a_token_vector_that_repeats_too_late_is_refused_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match=r"repeats after 1000001 blocks, at most 256 .* write \[1, 1\]"):
        tp_layout(SMOLLM2, 2, kv_tokens=[500_000, 500_001])


def test_the_equalising_token_vector_follows_the_memory_that_is_left() -> None:
    assert equalising_token_vector([3_000_000, 1_000_000], 1_000) == (3, 1)
    assert equalising_token_vector([100, 100, 100], 10) == (1, 1, 1)
    assert tp_layout(SMOLLM2, 2, kv_tokens=equalising_token_vector([10**9 + 7, 10**6], 100)).kv_tokens == (64, 1)
    with pytest.raises(LayoutError, match=r"rank 1 has 90 bytes left, one token takes 100: give it less weight"):
        equalising_token_vector([1_000, 90], 100)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(1, 100))
def test_the_equalising_vector_holds_what_no_short_vector_betters(tokens: list[int], token_bytes: int) -> None:
    vector = equalising_token_vector([count * token_bytes for count in tokens], token_bytes)
    capacity, binding = token_capacity(tokens, vector)
    assert capacity <= sum(tokens)
    assert tokens[binding] * sum(vector) // vector[binding] == capacity
    equal, _ = token_capacity(tokens, [1] * len(tokens))
    assert 100 * capacity >= 99 * equal
    if min(tokens) * TOKEN_STEPS >= 10 * sum(tokens):
        assert capacity >= 0.9 * sum(tokens), "no rank's share is so small that a step is much of it"


@given(st.integers(1, 4), st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_replicated_heads_cover_the_query_heads_once_and_each_has_its_own_kv_head(
    num_kv_heads: int, group: int, weights: list[int]
) -> None:
    model = ShardUnits(8, num_kv_heads * group, num_kv_heads, ffn=64, ffn_unit=1, vocab=10)
    shares = tp_layout(model, len(weights), weights, replicate_kv_heads=True).shares
    assert covers([share.heads for share in shares], model.num_heads)
    for share in shares:
        assert bool(len(share.heads)) == bool(len(share.kv_heads))
        if len(share.heads):
            assert len(share.heads) % len(share.kv_heads) == 0
            per_kv_head = len(share.heads) // len(share.kv_heads)
            for index in range(len(share.heads)):
                its_group = (share.heads.begin + index) // group
                assert share.kv_heads.begin + index // per_kv_head == its_group
    plain = max(
        len(share.heads) / w for share, w in zip(tp_layout(model, len(weights), weights).shares, weights, strict=True)
    )
    if len(weights) > num_kv_heads:
        assert max(len(share.heads) / w for share, w in zip(shares, weights, strict=True)) <= plain


def test_the_strong_rank_takes_whole_groups_and_the_weak_share_one() -> None:
    model = ShardUnits(num_layers=8, num_heads=18, num_kv_heads=3, ffn=64, ffn_unit=1, vocab=10)
    shares = tp_layout(model, 4, [1, 1, 1, 5], replicate_kv_heads=True).shares
    assert [share.kv_heads for share in shares] == [Span(0, 1), Span(0, 1), Span(0, 1), Span(1, 3)]
    assert [share.heads for share in shares] == [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 18)]


def test_equal_ranks_all_take_part() -> None:
    model = ShardUnits(num_layers=8, num_heads=8, num_kv_heads=2, ffn=64, ffn_unit=1, vocab=10)
    counts = {n: [len(s.heads) for s in tp_layout(model, n, replicate_kv_heads=True).shares] for n in (2, 3, 4, 8)}
    assert counts == {2: [4, 4], 3: [4, 2, 2], 4: [2, 2, 2, 2], 8: [1] * 8}


def test_padded_vocabulary_rows_come_after_those_of_the_files() -> None:
    model = ShardUnits(num_layers=8, num_heads=8, num_kv_heads=8, ffn=64, ffn_unit=1, vocab=1_000, vocab_unit=64)
    assert model.num_padded_vocab == 24
    shares = tp_layout(model, 3, [2, 1, 1]).shares
    assert [share.vocab for share in shares] == [Span(0, 512), Span(512, 768), Span(768, 1_000)]
    assert [share.num_padded_vocab for share in shares] == [0, 0, 24]
    assert [share.num_padded_vocab for share in pp_layout(model, 3).shares] == [0, 0, 24]
