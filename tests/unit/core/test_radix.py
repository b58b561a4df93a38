import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.blocks import BlockPool
from services.core.ids import BLOCK_SLOTS, TokenId
from services.core.radix import PrefixNode, PrefixTree, block_key


def tokens(*letters: int) -> list[TokenId]:
    """One full block of each letter."""
    return [TokenId(letter) for letter in letters for _ in range(BLOCK_SLOTS)]


def publish(pool: BlockPool, tree: PrefixTree, letters: list[int]) -> list[PrefixNode]:
    """As a request does that computes all of `letters` in blocks of its own; duplicates are given back."""
    ids, path = tokens(*letters), []
    for position in range(len(letters)):
        block = pool.take()
        assert block is not None
        node = tree.publish(path[-1] if path else None, block_key(ids, position), block)
        if node.block != block:
            pool.give(block)
        path.append(node)
    return path


def let_go(tree: PrefixTree, path: list[PrefixNode]) -> None:
    for node in reversed(path):
        tree.unpin(node)


def found(tree: PrefixTree, *letters: int) -> int:
    return len(tree.match(tokens(*letters), len(letters)))


def test_the_longest_known_prefix_is_found() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool)
    path = publish(pool, tree, [1, 2, 3])
    assert tree.match(tokens(1, 2, 9), 3) == path[:2]
    assert tree.match(tokens(1, 2, 3), 2) == path[:2], "never more than asked for"
    assert found(tree, 2) == 0, "the same block behind another prefix is another block"


def test_a_known_prefix_keeps_its_block() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool)
    first = publish(pool, tree, [1, 2])
    second = publish(pool, tree, [1, 3])
    assert second[0] is first[0] and first[0].num_pins == 2
    assert pool.num_free == 5


def test_a_known_prefix_that_nobody_holds_takes_the_new_copy_and_frees_its_own() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool)
    first = publish(pool, tree, [1, 2])
    let_go(tree, first)
    old = [node.block for node in first]
    second = publish(pool, tree, [1])
    assert second == first[:1] and second[0].block != old[0]
    assert pool.is_free(old[0]) and not pool.is_free(old[1])
    assert pool.num_free == 6 and tree.num_cached == 1 and found(tree, 1, 2) == 2


def test_eviction_is_least_recently_used_and_leaves_first() -> None:
    pool = BlockPool(8)
    tree = PrefixTree(pool)
    old, new = publish(pool, tree, [1, 2]), publish(pool, tree, [3, 4])
    let_go(tree, old)
    let_go(tree, new)
    for node in old:
        tree.pin(node)
    let_go(tree, old)
    assert tree.evict() and found(tree, 3, 4) == 1 and found(tree, 1, 2) == 2
    assert tree.evict() and found(tree, 3, 4) == 0
    assert tree.evict() and found(tree, 1, 2) == 1
    assert tree.evict() and not tree.evict()
    assert pool.num_free == 8


def test_pinned_blocks_are_not_evicted() -> None:
    pool = BlockPool(4)
    tree = PrefixTree(pool)
    path = publish(pool, tree, [1])
    assert not tree.evict() and tree.num_cached == 0
    let_go(tree, path)
    assert tree.evict()


def test_an_evicted_block_is_never_found_again() -> None:
    """P3.8"""
    pool = BlockPool(2)
    tree = PrefixTree(pool)
    let_go(tree, publish(pool, tree, [1, 2]))
    assert tree.evict() and tree.evict()
    let_go(tree, publish(pool, tree, [3, 4]))
    assert found(tree, 1, 2) == 0 and found(tree, 3, 4) == 2


def test_what_is_forgotten_frees_with_its_last_pin() -> None:
    pool = BlockPool(4)
    tree = PrefixTree(pool)
    held = publish(pool, tree, [1, 2])
    let_go(tree, publish(pool, tree, [1, 3]))
    tree.forget(held[0])
    assert found(tree, 1) == 0
    assert pool.num_free == 2, "the unpinned branch is free at once, the pinned one is not"
    again = publish(pool, tree, [1])
    assert again[0] is not held[0]
    let_go(tree, held)
    assert pool.num_free == 3
    assert found(tree, 1) == 1, "the successor under the same key stays"


def test_what_is_published_behind_a_forgotten_prefix_is_not_found() -> None:
    pool = BlockPool(4)
    tree = PrefixTree(pool)
    path = publish(pool, tree, [1])
    tree.forget(path[0])
    block = pool.take()
    assert block is not None
    path.append(tree.publish(path[0], block_key(tokens(1, 2), 1), block))
    assert found(tree, 1, 2) == 0
    let_go(tree, path)
    assert pool.num_free == 4 and tree.num_cached == 0


def test_unpinning_too_often_is_an_error() -> None:
    pool = BlockPool(2)
    tree = PrefixTree(pool)
    path = publish(pool, tree, [1])
    let_go(tree, path)
    with pytest.raises(AssertionError, match="unpinned more often"):
        tree.unpin(path[0])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=40))
def test_the_tree_and_the_pool_always_agree(operations: list[tuple[int, list[int]]]) -> None:
    pool = BlockPool(24)
    tree = PrefixTree(pool)
    held: list[list[PrefixNode]] = []
    for kind, letters in operations:
        if kind == 0 and pool.num_free + tree.num_cached > len(letters):
            while pool.num_free <= len(letters):
                assert tree.evict()
            held.append(publish(pool, tree, letters))
        elif kind == 1 and held:
            let_go(tree, held.pop(0))
        elif kind == 2:
            tree.evict()
        elif held and not held[-1][0].is_detached:
            tree.forget(held[-1][0])
        nodes = list(tree.nodes())
        detached = {node for path in held for node in path if node.is_detached}
        assert len({node.block for node in nodes}) == len(nodes)
        assert pool.num_free + len(nodes) + len(detached) == pool.num_blocks
        assert tree.num_cached == sum(1 for node in nodes if node.num_pins == 0)
        assert all(node.parent is None or node.parent.num_pins >= node.num_pins for node in nodes)
