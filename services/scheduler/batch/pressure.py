"""The pressure ladder: what is given up, and in which order, as the host's free memory runs low.

Rungs, each taken only where those before do not give enough: evict prefix blocks that no request holds, least recently
used first; have ranks release the pages above the highest live row; send the youngest request back to the queue, where
it waits until there is memory again. A release is a word in the step log: ranks decide nothing, but may refuse. After a
release or a retraction the next look shows what it gave. Never acts while a flip is pending, when blocks belong to it,
never takes the last request, and never looks at memory itself.
"""

from dataclasses import dataclass
from enum import Enum

from services.core.ids import RequestId
from services.scheduler.batch.batcher import Batcher


class Rung(Enum):
    """In their order."""

    EVICT = "evict"
    RELEASE = "release"
    RETRACT = "retract"


def next_rung(num_needed: int, *, num_dead: int, num_cached: int, num_running: int, is_frozen: bool) -> Rung | None:
    """What to do for `num_needed` blocks' memory; None: nothing is needed, or nothing can be done.

    `num_dead`: blocks above every owned one that may have pages. `num_cached`: those that no request holds.
    """
    if num_needed <= 0 or is_frozen:
        return None
    if num_dead < num_needed and num_cached:
        return Rung.EVICT
    if num_dead:
        return Rung.RELEASE
    return Rung.RETRACT if num_running > 1 else None


@dataclass(frozen=True, slots=True)
class Relief:
    """A rung that was taken."""

    rung: Rung
    num_blocks: int
    """What it gives, once ranks have heard of it."""
    request_id: RequestId | None = None
    """Who was sent back."""


def climb(batcher: Batcher, num_needed: int, *, is_enough: bool) -> list[Relief]:
    """Takes rungs for `num_needed` blocks' memory, as far as can be seen before ranks have given any back.

    `is_enough`: there is memory again, so that whoever was sent back may return.
    """
    if is_enough:
        batcher.resume()
    taken: list[Relief] = []
    while (rung := _next_of(batcher, num_needed)) is not None:
        taken.append(_take(rung, batcher, num_needed))
        if rung is not Rung.EVICT:
            break
    return taken


def _next_of(batcher: Batcher, num_needed: int) -> Rung | None:
    if num_needed <= 0:
        return None
    load = batcher.load()
    return next_rung(
        num_needed,
        num_dead=batcher.num_dead_blocks,
        num_cached=load.cached_blocks,
        num_running=load.running_requests,
        is_frozen=batcher.is_frozen,
    )


def _take(rung: Rung, batcher: Batcher, num_needed: int) -> Relief:
    match rung:
        case Rung.EVICT:
            return Relief(rung, batcher.evict_cached(num_needed))
        case Rung.RELEASE:
            num_dead = batcher.num_dead_blocks
            batcher.release_dead()
            return Relief(rung, num_dead)
        case Rung.RETRACT:
            request_id, num_blocks = batcher.retract_youngest()
            return Relief(rung, num_blocks, request_id)
