"""The order of partners and the parts of a leg: pure, checked against what they must never do."""

import random
from collections import deque

import pytest

from services.core.ids import Rank
from services.core.layout import Span
from services.placement.pair_order import Turn, partners, turns
from services.placement.rows.chunks import row_chunks
from services.placement.rows.transfers import BlockRuns, RowTransfer
from tests.support.private_group import live_blocks, runs


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_everybody_meets_everybody_once_and_nobody_waits_in_a_circle(num_ranks: int) -> None:
    left = {rank: deque(partners(Rank(rank), num_ranks)) for rank in range(num_ranks)}
    assert all(sorted(met) == [other for other in range(num_ranks) if other != rank] for rank, met in left.items())
    num_rounds = 0
    while any(left.values()):
        met = {(rank, met[0]) for rank, met in left.items() if met}
        pairs = [pair for pair in met if pair[::-1] in met]
        assert pairs, f"a circle of waits among {left}"
        for rank, _ in pairs:
            left[rank].popleft()
        num_rounds += 1
    assert num_rounds == (num_ranks - 1 + num_ranks % 2 if num_ranks > 1 else 0)


class Channel:
    """Holds two messages, like a carrier's."""

    def __init__(self) -> None:
        self.held = 0


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 9), (9, 9), (2, 7), (30, 1)])
@pytest.mark.parametrize("seed", range(20))
def test_one_ahead_never_blocks_both(counts: tuple[int, int], seed: int) -> None:
    """Steps of two partners, in any interleaving, over channels of two messages: all end."""
    script = [[turn for turn, _ in turns(*pair)] for pair in (counts, counts[::-1])]
    draw, channels, at = random.Random(seed), [Channel(), Channel()], [0, 0]
    while at != [len(script[0]), len(script[1])]:
        able = [side for side in (0, 1) if at[side] < len(script[side]) and can(script[side][at[side]], side, channels)]
        assert able, f"both wait at {at}"
        side = draw.choice(able)
        sends = script[side][at[side]] is Turn.SEND
        channels[side if sends else 1 - side].held += 1 if sends else -1
        at[side] += 1
    assert [channel.held for channel in channels] == [0, 0]


def can(step: Turn, side: int, channels: list[Channel]) -> bool:
    return channels[side].held < 2 if step is Turn.SEND else channels[1 - side].held > 0


@pytest.mark.parametrize("max_bytes", [1, 700, 5_000, 10**9])
@pytest.mark.parametrize("live", [runs(), runs((3, 1)), runs((0, 9), (20, 1), (22, 13))])
def test_parts_cover_a_leg_once_within_their_bound(live: BlockRuns, max_bytes: int) -> None:
    leg = RowTransfer(Rank(0), Rank(1), Span(2, 7), Span(1, 3), live)
    chunks = list(row_chunks(leg, 300, max_bytes))
    cells = [
        (layer, block)
        for chunk in chunks
        for layer in range(chunk.layers.begin, chunk.layers.end)
        for block in live_blocks(chunk.runs)
    ]
    assert sorted(cells) == [(layer, block) for layer in range(2, 7) for block in live_blocks(live)]
    assert all(chunk.heads == leg.heads for chunk in chunks)
    assert sum(chunk.num_bytes for chunk in chunks) == leg.num_bytes(300)
    assert all(chunk.num_bytes <= max(max_bytes, 2 * 300) for chunk in chunks)


def test_a_leg_without_heads_has_no_parts() -> None:
    assert not list(row_chunks(RowTransfer(Rank(0), Rank(1), Span(0, 2), Span(1, 1), runs((0, 4))), 300, 1_000))
