"""Which blocks a request stands on: shared prefix, own blocks, and what becomes of them. Pure.

Whole blocks only. Taking a block evicts the least recently used cached one where none is free. Full blocks are
published in the prefix tree once the log writes them and their ids are known: whoever shares them comes later in the
log, and every rank executes in order. Never chooses whom to preempt.
"""

from collections.abc import Iterable

from services.core.blocks import BlockPool, PoolCensus
from services.core.ids import BLOCK_SLOTS, BlockId, blocks_for
from services.core.radix import PrefixNode, PrefixTree, block_key
from services.scheduler.batch.running_request import Request


class BlockTables:
    """The pool and the prefix tree, seen from requests."""

    __slots__ = ("pool", "tree")

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool)

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking them from a request."""
        return self.pool.num_free + self.tree.num_cached

    def shared_prefix(self, request: Request) -> list[PrefixNode]:
        """Cached blocks it could begin with; the last known token is always left to compute, as its logits are."""
        return self.tree.match(request.tokens, (len(request.tokens) - 1) // BLOCK_SLOTS)

    def attach(self, request: Request, num_spare: int) -> bool:
        """Gives an unattached request the blocks of all its known tokens, if `num_spare` more remain available.

        Its fill boundary is then behind the shared prefix. False: nothing has changed.
        """
        path = self.shared_prefix(request)
        num_own = blocks_for(len(request.tokens)) - len(path)
        num_revived = sum(1 for node in path if not node.num_pins)
        if num_own + num_spare > self.num_available - num_revived:
            return False
        for node in path:
            self.tree.pin(node)
        request.path = path
        request.blocks = [node.block for node in path]
        request.blocks.extend(self._taken() for _ in range(num_own))
        request.num_issued = request.num_computed = len(path) * BLOCK_SLOTS
        return True

    def extend(self, request: Request) -> BlockId | None:
        """One more block at the end of its table, or None where every block belongs to a request."""
        if not self.num_available:
            return None
        block = self._taken()
        request.blocks.append(block)
        return block

    def publish(self, request: Request) -> None:
        """Makes its full blocks known that the log has written and whose ids are known."""
        num_full = min(request.num_issued, len(request.tokens)) // BLOCK_SLOTS
        path = request.path
        while len(path) < num_full:
            position = len(path)
            parent = path[-1] if path else None
            path.append(self.tree.publish(parent, block_key(request.tokens, position), request.blocks[position]))

    def release(self, request: Request) -> None:
        """Takes all its blocks: published ones stay cached, the others are free.

        Where its results were not finite, the prefix it stood on becomes unfindable, whoever computed the cause.
        """
        if request.is_distrusted and request.path:
            self.tree.forget(request.path[0])
        path, blocks = request.path, request.blocks
        for position in range(len(blocks) - 1, -1, -1):
            node = path[position] if position < len(path) else None
            if node is None or node.block != blocks[position]:
                # Not published, or the same content had been published from another block.
                self.pool.give(blocks[position])
            if node is not None:
                self.tree.unpin(node)
        request.path, request.blocks = [], []

    def census(self, holders: Iterable[Request]) -> PoolCensus:
        """Counts every block by its owners: the tree and the tables of `holders`, all that have blocks."""
        owners = [0] * self.pool.num_blocks
        pins: dict[PrefixNode, int] = dict.fromkeys(self.tree.nodes(), 0)
        for request in holders:
            for node in request.path:
                pins[node] = pins.get(node, 0) + 1
            for position, block in enumerate(request.blocks):
                if position >= len(request.path) or request.path[position].block != block:
                    owners[block] += 1
        wrong = {node.block for node, count in pins.items() if count != node.num_pins}
        for node in pins:
            owners[node.block] += 1
        wrong.update(
            BlockId(b) for b, count in enumerate(owners) if count != (0 if self.pool.is_free(BlockId(b)) else 1)
        )
        num_cached = sum(1 for node in pins if node.num_pins == 0)
        return PoolCensus(
            num_total=self.pool.num_blocks,
            num_free=self.pool.num_free,
            num_cached=num_cached,
            num_referenced=sum(owners) - num_cached,
            unaccounted=tuple(sorted(wrong)),
        )

    def _taken(self) -> BlockId:
        block = self.pool.take()
        if block is None and self.tree.evict():
            block = self.pool.take()
        assert block is not None, "the caller checked that a block is available"
        return block
