"""The pressure ladder: what is given up, and in which order, as the host's free memory runs low.

Rungs, each taken only where those before do not give enough: evict prefix blocks that no request holds, least recently
used first; have ranks release the pages above the highest live row; send the youngest request back to the queue, where
it waits until there is memory again. A release is a word in the step log: ranks decide nothing, but may refuse. It
looks at most once a second, and after a release or a retraction waits for the next look to see what it gave. Never acts
while a flip is pending, when blocks belong to it, and never takes the last request.
"""

import time
from collections.abc import Callable
from enum import Enum

from services.mesh.host_memory import HostMemoryReader
from services.mesh.logs.log import Log
from services.scheduler.batch.batcher import Batcher

LOOK_EVERY_S = 1.0
RECOVERY_MARGIN = 1.1
"""Of the floor: above it, retracted requests may come back."""


class Rung(Enum):
    """In their order."""

    EVICT = "evict"
    RELEASE = "release"
    RETRACT = "retract"


def next_rung(num_needed: int, *, num_dead: int, num_cached: int, num_resident: int, is_frozen: bool) -> Rung | None:
    """What to do for `num_needed` blocks' memory; None: nothing is needed, or nothing can be done.

    `num_dead`: blocks above every owned one that may have pages. `num_cached`: those that no request holds.
    """
    if num_needed <= 0 or is_frozen:
        return None
    if num_dead < num_needed and num_cached:
        return Rung.EVICT
    if num_dead:
        return Rung.RELEASE
    return Rung.RETRACT if num_resident > 1 else None


class PressureLadder:
    """The ladder over one host's memory, for one batcher after another."""

    def __init__(
        self,
        floor_bytes: int,
        block_bytes: int,
        log: Log,
        memory: HostMemoryReader,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_bytes`: of a block's rows, all ranks together."""
        self._floor, self._block_bytes = floor_bytes, block_bytes
        self._log, self._memory, self._clock_s = log, memory, clock_s
        self._looked_s = float("-inf")

    def look(self, batcher: Batcher) -> None:
        """Reads what is free, unless it was read within the last second, and climbs as far as needed."""
        if self._clock_s() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self._clock_s()
        free_bytes = self._memory.read().left_bytes
        if free_bytes >= self._floor * RECOVERY_MARGIN:
            batcher.resume()
        num_needed = -(-(self._floor - free_bytes) // self._block_bytes)
        while (rung := _next_of(batcher, num_needed)) is not None:
            gave = _take(rung, batcher, num_needed)
            self._log.warning(
                "memory-pressure", rung=rung.value, free_bytes=free_bytes, floor_bytes=self._floor, **gave
            )
            if rung is not Rung.EVICT:
                return


def _next_of(batcher: Batcher, num_needed: int) -> Rung | None:
    if num_needed <= 0:
        return None
    load = batcher.load()
    return next_rung(
        num_needed,
        num_dead=batcher.num_dead_blocks,
        num_cached=load.cached_blocks,
        num_resident=load.resident_requests,
        is_frozen=batcher.is_frozen,
    )


def _take(rung: Rung, batcher: Batcher, num_needed: int) -> dict[str, object]:
    """Does it; what it gave, for the log."""
    match rung:
        case Rung.EVICT:
            return {"blocks": batcher.evict_cached(num_needed)}
        case Rung.RELEASE:
            num_dead = batcher.num_dead_blocks
            batcher.release_dead()
            return {"blocks": num_dead}
        case Rung.RETRACT:
            request, num_blocks = batcher.retract_youngest()
            return {"blocks": num_blocks, "request": request}
