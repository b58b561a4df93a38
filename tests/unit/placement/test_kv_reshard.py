"""Row plans against a reference that looks at every (layer, head, block), and a byte oracle there and back."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.blocks import block_runs
from services.core.ids import BlockId, Rank
from services.core.layout import Layout, LayoutError, ShardUnits, Span, spans
from services.placement.cuts import largest_remainder, pp_layout, tp_layout
from services.placement.rows.transfers import (
    BlockRuns,
    BlockShare,
    Holding,
    block_shares,
    kv_holdings,
    row_plan,
    state_holdings,
)

UNITS = ShardUnits(num_layers=5, num_heads=6, num_kv_heads=3, ffn=8, ffn_unit=1, vocab=4)
WIDE = ShardUnits(num_layers=4, num_heads=48, num_kv_heads=48, ffn=64, ffn_unit=1, vocab=64)
NUM_BLOCKS = 70
FULL: BlockRuns = ((BlockId(0), NUM_BLOCKS),)
LIVE = {
    "empty": (),
    "one block": ((BlockId(17), 1),),
    "some": ((BlockId(0), 3), (BlockId(5), 1), (BlockId(30), 20)),
    "full": FULL,
}

Cell = tuple[int, int, int]
"""(layer, head, block)"""


def layouts(units: ShardUnits, pp_layers: Sequence[int], weights: Sequence[int]) -> list[Layout]:
    n = len(weights)
    return [
        pp_layout(units, n, pp_layers),
        tp_layout(units, n, weights),
        tp_layout(units, n, weights, replicate_kv_heads=True),
        tp_layout(units, n, weights, kv_tokens=weights),
        tp_layout(units, n, weights, kv_tokens=weights[::-1]),
    ]


GROUPS = {
    "(2, 1)": (UNITS, layouts(UNITS, (3, 2), (2, 1))),
    "(30, 17, 17)": (WIDE, layouts(WIDE, (1, 1, 2), (30, 17, 17))),
    "(1, 1, 1, 5), more ranks than heads": (UNITS, layouts(UNITS, (2, 1, 1, 1), (1, 1, 1, 5))),
}


def held_cells(holding: Holding, live: BlockRuns) -> set[Cell]:
    return {
        (layer, head, block)
        for layer in range(holding.layers.begin, holding.layers.end)
        for head in range(holding.heads.begin, holding.heads.end)
        for begin, length in live
        for block in range(begin, begin + length)
        if BlockId(block) in holding.blocks
    }


def check_against_cells(source: Sequence[Holding], destination: Sequence[Holding], live: BlockRuns) -> None:
    plan = row_plan(source, destination, live)
    arrived = [Counter[Cell]() for _ in destination]
    for leg in plan.legs:
        cells = held_cells(Holding(leg.layers, leg.heads, BlockShare(1, Span(0, 1))), leg.runs)
        assert cells <= held_cells(source[leg.source], live)
        assert (leg.source == leg.destination) == (cells <= held_cells(source[leg.destination], live))
        assert leg.num_bytes(7) == 7 * len(cells) > 0
        arrived[leg.destination].update(cells)
    for holding, counted in zip(destination, arrived, strict=True):
        assert counted == Counter(held_cells(holding, live))


@pytest.mark.parametrize("live", LIVE.values(), ids=LIVE.keys())
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_any_way_of_holding_leads_to_any_other(group: tuple[ShardUnits, list[Layout]], live: BlockRuns) -> None:
    units, held = group
    holdings = [kv_holdings(layout, units.num_kv_heads) for layout in held]
    for source in holdings:
        for destination in holdings:
            check_against_cells(source, destination, live)


@pytest.mark.parametrize("live", LIVE.values(), ids=LIVE.keys())
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_there_and_back_leaves_every_live_row_as_it_was(
    group: tuple[ShardUnits, list[Layout]], live: BlockRuns
) -> None:
    units, (pp, *tps) = group
    before = kv_holdings(pp, units.num_kv_heads)
    for tp in tps:
        after = kv_holdings(tp, units.num_kv_heads)
        pools = [{cell: hash(cell) for cell in held_cells(holding, live)} for holding in before]
        start = [dict(pool) for pool in pools]
        for source, destination in ((before, after), (after, before)):
            moved: list[dict[Cell, int]] = [{} for _ in pools]
            for leg in row_plan(source, destination, live).legs:
                for cell in held_cells(Holding(leg.layers, leg.heads, BlockShare(1, Span(0, 1))), leg.runs):
                    moved[leg.destination][cell] = pools[leg.source][cell]
            pools = moved
        assert pools == start


def test_replicas_share_the_sending() -> None:
    units = ShardUnits(num_layers=8, num_heads=8, num_kv_heads=1, ffn=8, ffn_unit=1, vocab=4)
    tp = kv_holdings(tp_layout(units, 4, replicate_kv_heads=True), 1)
    assert all(holding.heads == Span(0, 1) for holding in tp)
    pp = kv_holdings(pp_layout(units, 4), 1)
    assert all(leg.source == leg.destination for leg in row_plan(tp, pp, FULL).legs), "each has its layers already"
    three_hold = (*tp[:3], Holding(tp[3].layers, Span(1, 1), tp[3].blocks))
    wanted = tuple(Holding(Span(layer, layer + 1), Span(0, 1 if layer == 3 else 0), tp[0].blocks) for layer in range(4))
    assert [leg.source for leg in row_plan(three_hold, wanted, FULL).legs] == [0]


def test_runs_stay_runs() -> None:
    pp, tp = kv_holdings(pp_layout(WIDE, 3), 48), kv_holdings(tp_layout(WIDE, 3), 48)
    plan = row_plan(pp, tp, FULL)
    assert len(plan.legs) == 9
    assert all(leg.runs == FULL for leg in plan.legs)
    tokens = kv_holdings(tp_layout(WIDE, 3, kv_tokens=[5, 3, 2]), 48)
    assert all(len(leg.runs) == NUM_BLOCKS // 10 for leg in row_plan(pp, tokens, FULL).legs)
    assert {leg for rank in range(3) for leg in plan.of(Rank(rank))} == set(plan.legs)


def test_hashes_tell_plans_apart() -> None:
    pp, tp = kv_holdings(pp_layout(WIDE, 3), 48), kv_holdings(tp_layout(WIDE, 3), 48)
    assert row_plan(pp, tp, FULL).hash == row_plan(pp, tp, FULL).hash
    assert len({row_plan(pp, tp, live).hash for live in LIVE.values()}) == len(LIVE)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sets(st.integers(0, 300)), st.integers(0, 301))
def test_each_block_has_one_owner_and_one_place(vector: list[int], blocks: set[int], num_blocks: int) -> None:
    shares = block_shares(vector)
    assert all(sum(BlockId(block) in share for share in shares) == 1 for block in range(num_blocks))
    live = block_runs(BlockId(block) for block in sorted(blocks))
    for share in shares:
        own = [BlockId(block) for block in range(num_blocks) if BlockId(block) in share]
        assert share.count(num_blocks) == len(own)
        assert [share.local(block) for block in own] == list(range(len(own)))
        runs = list(share.runs(live))
        in_runs = [block for begin, length in runs for block in range(begin, begin + length)]
        assert in_runs == [block for block in sorted(blocks) if BlockId(block) in share]
        for begin, length in runs:
            assert [share.local(BlockId(begin + i)) - share.local(begin) for i in range(length)] == list(range(length))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 4), st.sets(st.integers(0, 20)))
def test_states_move_part_by_part(weights: list[int], heads_per_group: int, slots: set[int]) -> None:
    num_groups = 4
    groups = spans(largest_remainder(num_groups, weights))
    whole = [Span(0, num_groups)] * len(weights)
    pp = state_holdings(pp_layout(UNITS, len(weights)), whole, heads_per_group)
    tp = state_holdings(tp_layout(UNITS, len(weights), weights), groups, heads_per_group)
    live = block_runs(BlockId(slot) for slot in sorted(slots))
    check_against_cells(pp, tp, live)
    check_against_cells(tp, pp, live)
    assert sum(len(holding.heads) for holding in tp) == num_groups * heads_per_group


def test_a_layout_before_that_lacks_rows_is_refused() -> None:
    pp, tp = kv_holdings(pp_layout(UNITS, 2), 3), kv_holdings(tp_layout(UNITS, 2), 3)
    with pytest.raises(LayoutError, match=r"rank 0 needs 70 blocks of layers \[3, 5\).*hold 0"):
        row_plan(pp[:1], tp, FULL)
