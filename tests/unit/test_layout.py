"""Layouts cover the model once: property tests over geometries and vectors, and the refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ids import LayoutKind
from services.core.layout import LayoutError, ShardUnits, Span, largest_remainder, pp_layout, tp_layout

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
