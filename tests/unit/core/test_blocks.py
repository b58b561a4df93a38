import pytest

from services.core.blocks import BlockPool, PoolCensus, block_runs, kv_block_bytes
from services.core.ids import BlockId


def test_every_block_is_taken_once_and_comes_back() -> None:
    pool = BlockPool(5)
    taken = [pool.take() for _ in range(5)]
    assert sorted(block for block in taken if block is not None) == [0, 1, 2, 3, 4]
    assert pool.take() is None and pool.num_free == 0
    pool.give(BlockId(3))
    assert pool.is_free(BlockId(3)) and pool.num_free == 1
    assert pool.take() == 3


def test_giving_back_twice_is_an_error() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    pool.give(block)
    with pytest.raises(AssertionError, match=f"block {block} is given back twice"):
        pool.give(block)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)


def test_owned_runs_are_maximal_rising_and_disjoint() -> None:
    pool = BlockPool(8)
    assert pool.owned_runs() == ()
    for _ in range(8):
        pool.take()
    assert pool.owned_runs() == ((0, 8),)
    for block in (0, 3, 4, 7):
        pool.give(BlockId(block))
    assert pool.owned_runs() == ((1, 2), (5, 2))


def test_runs_of_single_blocks_stay_apart() -> None:
    assert block_runs(map(BlockId, [1, 3, 5])) == ((1, 1), (3, 1), (5, 1))


def test_a_census_is_sound_only_if_it_adds_up() -> None:
    assert PoolCensus(4, 1, 1, 2, ()).is_sound
    assert not PoolCensus(4, 1, 1, 1, ()).is_sound
    assert not PoolCensus(4, 1, 1, 2, (BlockId(0),)).is_sound


def test_bytes_of_a_block() -> None:
    # Keys and values, 16 slots, 30 layers, 3 heads of 64 float32 elements.
    assert kv_block_bytes(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=4) == 2 * 16 * 30 * 3 * 64 * 4
