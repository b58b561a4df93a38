"""The prefix tree: which full blocks hold which token prefix, who pins them, which to give up first.

A node is one full block behind its parent's prefix. Requests pin the whole path of the prefix that they stand on, from
the root down, so a pinned node never has an unpinned parent. Never holds a block that is not full, nor decides when a
block's content is final: the caller publishes what the log has already written.

Invariants: a path leads to at most one block; a node is pinned or it is in `_unpinned`; in `_unpinned`, ordered by
when the last pin went, children come before their parents, so that its first entry is always a leaf and the least
recently used one. A detached node is found by nobody and frees its block with its last pin.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.core.blocks import BlockPool
from services.core.ids import BLOCK_SLOTS, BlockId, TokenId

TokenKey = tuple[TokenId, ...]
"""The `BLOCK_SLOTS` ids of one full block."""


class PrefixNode:
    """One full block at the end of one prefix."""

    __slots__ = ("block", "children", "is_detached", "key", "num_pins", "parent")

    def __init__(self, key: TokenKey, block: BlockId, parent: "PrefixNode | None") -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[TokenKey, PrefixNode] = {}
        self.num_pins = 0
        self.is_detached: bool = parent is not None and parent.is_detached


def block_key(token_ids: Sequence[TokenId], position: int) -> TokenKey:
    """Ids of the full block at `position` of a sequence's block table."""
    return tuple(token_ids[position * BLOCK_SLOTS : (position + 1) * BLOCK_SLOTS])


class PrefixTree:
    """Full blocks by prefix, over one pool; gives their blocks back to it."""

    __slots__ = ("_pool", "_roots", "_unpinned")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[TokenKey, PrefixNode] = {}
        self._unpinned: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds: all of them can be evicted."""
        return len(self._unpinned)

    def match(self, token_ids: Sequence[TokenId], max_blocks: int) -> list[PrefixNode]:
        """The longest known prefix of at most `max_blocks` full blocks, from the root down; pins nothing."""
        path: list[PrefixNode] = []
        children = self._roots
        for position in range(max_blocks):
            node = children.get(block_key(token_ids, position))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def pin(self, node: PrefixNode) -> None:
        """Holds a node; the caller pins paths from the root down."""
        if node.num_pins == 0:
            del self._unpinned[node]
        node.num_pins += 1

    def unpin(self, node: PrefixNode) -> None:
        """Lets go of a node; the caller unpins paths from the end up."""
        assert node.num_pins > 0, f"block {node.block} is unpinned more often than pinned"
        node.num_pins -= 1
        if node.num_pins:
            return
        if node.is_detached:
            self._drop(node)
        else:
            self._unpinned[node] = None

    def publish(self, parent: PrefixNode | None, key: TokenKey, block: BlockId) -> PrefixNode:
        """Makes a full block known behind `parent` (None: the root) and pins it; the tree owns `block` from here on.

        Where the same prefix is known already, that node is pinned instead and `block` stays the caller's; unless
        nobody pins it: then it takes `block`, and its own is free, so that no request holds two copies of its prefix.
        """
        children = self._roots if parent is None else parent.children
        node = children.get(key)
        if node is None:
            node = children[key] = PrefixNode(key, block, parent)
            node.num_pins = 1
        else:
            if node.num_pins == 0:
                self._pool.give(node.block)
                node.block = block
            self.pin(node)
        return node

    def evict(self) -> bool:
        """Gives the least recently used unpinned block back to the pool; False where there is none."""
        if not self._unpinned:
            return False
        node, _ = self._unpinned.popitem(last=False)
        assert not node.children, f"block {node.block} is evicted before the blocks behind it"
        self._drop(node)
        return True

    def forget(self, node: PrefixNode) -> None:
        """Makes `node` and all behind it unfindable: its content is not to be trusted.

        Unpinned blocks are free at once, pinned ones with their last pin.
        """
        if node.is_detached:
            return
        self._unlink(node)
        for member in list(_subtree(node)):
            member.is_detached = True
            if member.num_pins == 0:
                del self._unpinned[member]
                self._drop(member)

    def flush(self) -> int:
        """Evicts every unpinned block and returns how many they were."""
        num_evicted = self.num_cached
        while self.evict():
            pass
        return num_evicted

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node that can be found, in no order."""
        for root in self._roots.values():
            yield from _subtree(root)

    def _drop(self, node: PrefixNode) -> None:
        self._unlink(node)
        self._pool.give(node.block)

    def _unlink(self, node: PrefixNode) -> None:
        # A forgotten node may have a successor under its key by the time its last pin goes.
        siblings = self._roots if node.parent is None else node.parent.children
        if siblings.get(node.key) is node:
            del siblings[node.key]


def _subtree(node: PrefixNode) -> Iterator[PrefixNode]:
    """`node` and everything behind it; without recursion, since a prefix may be thousands of blocks long."""
    pending = [node]
    while pending:
        member = pending.pop()
        pending.extend(member.children.values())
        yield member
