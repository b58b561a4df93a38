"""Faults of the flip in the placement of rows, on the pure functions that place them: the fault put back, and shipped.

U: the weights' vector where the tokens' was meant. V: a pool smaller than the ids that are given out.
"""

from collections.abc import Sequence

import pytest

from services.core.ids import BlockId, Rank
from services.core.layout import ShardUnits
from services.placement.cuts import pp_layout, tp_layout
from services.placement.rows.transfers import BlockShare, block_shares, kv_holdings, row_plan

UNITS = ShardUnits(num_layers=6, num_heads=12, num_kv_heads=6, ffn=64, ffn_unit=1, vocab=64)
NUM_BLOCKS = 61
VECTORS = [((2, 1), (1, 3)), ((30, 17, 17), (1, 1, 2)), ((1, 1, 1, 5), (3, 2, 2, 1))]
"""Weights, tokens."""


def misplaced(pools: Sequence[BlockShare], used: Sequence[BlockShare]) -> list[tuple[int, int]]:
    """(rank, block) of each row that is put where its rank's pool, sized by `pools`, has no place."""
    return [
        (rank, block)
        for rank, share in enumerate(used)
        for block in map(BlockId, range(NUM_BLOCKS))
        if block in share and share.local(block) >= pools[rank].count(NUM_BLOCKS)
    ]


@pytest.mark.parametrize(("weights", "tokens"), VECTORS, ids=str)
def test_u_the_weights_vector_puts_rows_out_of_range(weights: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    assert misplaced(block_shares(tokens), block_shares(weights))


@pytest.mark.parametrize(("weights", "tokens"), VECTORS, ids=str)
def test_u_a_layout_places_rows_by_its_tokens(weights: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """What a flip moves, from the layout's own vectors: each live row to one rank, to a place that its pool has."""
    num_ranks = len(weights)
    layout = tp_layout(UNITS, num_ranks, weights, kv_tokens=tokens)
    holdings = kv_holdings(layout, UNITS.num_kv_heads)
    shares = [holding.blocks for holding in holdings]
    assert not misplaced(block_shares(layout.kv_tokens or ()), shares)
    owners = [[rank for rank, share in enumerate(shares) if BlockId(block) in share] for block in range(NUM_BLOCKS)]
    assert all(len(ranks) == 1 for ranks in owners)
    source = kv_holdings(pp_layout(UNITS, num_ranks), UNITS.num_kv_heads)
    plan = row_plan(source, holdings, ((BlockId(0), NUM_BLOCKS),))
    received = [
        (leg.destination, block)
        for rank in range(num_ranks)
        for leg in plan.of(Rank(rank))
        if leg.destination == rank
        for begin, length in leg.runs
        for block in range(begin, begin + length)
    ]
    assert received and all(owners[block] == [rank] for rank, block in received)


@pytest.mark.parametrize("tokens", [tokens for _, tokens in VECTORS], ids=str)
def test_v_a_pool_that_is_smaller_than_the_ids_has_no_place_for_some(tokens: tuple[int, ...]) -> None:
    """Each rank's pool is sized for the ids that the allocator issues: with one fewer, the last has no place."""
    shares = block_shares(tokens)
    short = [share.count(NUM_BLOCKS) - 1 for share in shares]
    for share, room in zip(shares, short, strict=True):
        places = [share.local(BlockId(block)) for block in range(NUM_BLOCKS) if BlockId(block) in share]
        assert max(places) == share.count(NUM_BLOCKS) - 1 >= room
