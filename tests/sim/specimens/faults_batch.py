"""Batches, blocks and resident tables with one rule taken out."""

from dataclasses import replace

from services.core.ids import BlockId, LogIndex, RequestId, blocks_for
from services.core.radix import PrefixNode, PrefixTree, TokenKey
from services.core.request import RequestEvent
from services.core.step import StepPlan
from services.scheduler.batch.batcher import Batcher
from services.scheduler.batch.running_request import Request
from services.scheduler.batch.running_requests import RunningRequests
from tests.sim.processes.resident_places import Place, Places

Runs = tuple[tuple[BlockId, int], ...]


class FindableAfterEviction(PrefixTree):
    """P3.8: an evicted block goes back to the pool and stays in the tree."""

    def _drop(self, node: PrefixNode) -> None:
        self._pool.give(node.block)


class StaleTreeBatcher(Batcher):
    """Over a tree that still finds what it gave away."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tables.tree = FindableAfterEviction(self._tables.pool)


class SecondCopyTree(PrefixTree):
    """P3.9: a block whose content is cached already stays beside it, both held by the same request."""

    def publish(self, parent: PrefixNode | None, key: TokenKey, block: BlockId) -> PrefixNode:
        node = (self._roots if parent is None else parent.children).get(key)
        if node is None:
            return super().publish(parent, key, block)
        self.pin(node)
        return node


class SecondCopyBatcher(Batcher):
    """Over a tree that never takes a new copy for an old one."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tables.tree = SecondCopyTree(self._tables.pool)


class TwiceFreedBatcher(Batcher):
    """A request that ends while frozen frees its blocks at once and again at the thaw."""

    def _free(self, request: Request) -> None:
        if not self._is_frozen:
            super()._free(request)
            return
        path, blocks = list(request.path), list(request.blocks)
        self._tables.release(request)
        request.path, request.blocks = path, blocks
        self._unfreed.append(request)


class UnfrozenBatcher(Batcher):
    """Z6: what ends while a flip is pending is freed at once."""

    def _free(self, request: Request) -> None:
        self._running.free(request)
        self._tables.release(request)


class ForgetfulBatcher(Batcher):
    """A step does not say whose tokens it reads."""

    def next_step(self, sequence: LogIndex) -> StepPlan | None:
        plan = super().next_step(sequence)
        return None if plan is None else replace(plan, tokens_through=None)


class UnannouncedRequests(RunningRequests):
    """Freed indexes are used again and ranks never hear that they were free."""

    def announce(self) -> list:  # type: ignore[type-arg]
        self._unannounced.clear()
        return []


class UnannouncedBatcher(Batcher):
    """With a resident table that keeps releases to itself."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._running = UnannouncedRequests(self.limits.max_resident_requests)
        self._composer.running = self._running


class LengthExtentBatcher(Batcher):
    """J2: the extent is what sequences have filled, not what is allocated, nor what is cached."""

    def live_runs(self) -> Runs:
        blocks = {b for r in self._running for b in r.blocks[: blocks_for(r.num_computed)]}
        return tuple((block, 1) for block in sorted(blocks))


class OneSlotExtentBatcher(Batcher):
    """J1: the resident set is read from one microbatch."""

    def live_runs(self) -> Runs:
        runs = super().live_runs()
        if self._kind.value != "pp" or self._window.num_stages == 1:
            return runs
        residents = list(self._running)
        mine = {block for request in residents[::2] for block in request.blocks}
        cached = {node.block for node in self._tables.tree.nodes()}
        return tuple((block, 1) for block in sorted(mine | cached))


class EvictingBatcher(Batcher):
    """T: while requests are parked for the flip, whoever evicts sees no live ones."""

    def abort(self, request_id: RequestId) -> list[RequestEvent]:
        self._evict()
        return super().abort(request_id)

    def on_acknowledged(self, sequence: LogIndex) -> None:
        super().on_acknowledged(sequence)
        self._evict()

    def _evict(self) -> None:
        if self._is_frozen:
            self._tables.tree.flush()


class AnyStepPlaces(Places):
    """A request index used again without a look at when it was taken: late tokens go to the wrong request."""

    def is_of_step(self, place: Place, step: int) -> bool:
        return True
