"""Flips of a group whose ranks own their memory, driven entry by entry: arm, park, work, outcome."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.ids import BlockId, FlipId, LayoutKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry
from services.placement.rows.transfers import BlockRuns
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.pool_pair import PoolPair
from services.worker.participation import FlipAnswer, Parked, Worked, WorkLost
from tests.support.rank_threads import DEADLINE_S, Group

Answer = Worked | WorkLost


@dataclass(frozen=True, slots=True)
class Flipped:
    """One attempt, by rank."""

    parked: list[Parked]
    answers: list[Answer]


def runs(*pairs: tuple[int, int]) -> BlockRuns:
    return tuple((BlockId(begin), length) for begin, length in pairs)


def rows_of(group: Group, rank: int) -> PoolPair | ExclusiveRows:
    rows = group.ranks[rank].runner.parts.memory.rows
    assert isinstance(rows, PoolPair | ExclusiveRows)
    return rows


def pools_of(group: Group, kind: LayoutKind) -> list[LayoutPool]:
    return [rows_of(group, rank).pools[kind] for rank in range(len(group.ranks))]


def flip(group: Group, target: LayoutKind, live: BlockRuns, *, working: Sequence[int] | None = None) -> Flipped:
    """One attempt: committed if every rank has done its work, abandoned if all that have not are restored.

    Where one is broken there is no outcome: the generation ends. `working`: the ranks that do it.
    """
    driver = group.log
    flip_id = FlipId(driver.sequence + 1)
    heard: list[list[FlipAnswer]] = [[] for _ in group.ranks]
    for rank, said in zip(group.ranks, heard, strict=True):
        rank.runner.notice = said.append
    driver.write(FlipEntry(flip_id, target, live))
    driver.answers()
    parked = [answer for said in heard for answer in said if isinstance(answer, Parked)]
    at_work: list[Future[Answer]] = [
        group.ranks[rank].thread.submit(group.ranks[rank].runner.work, flip_id)
        for rank in (range(len(group.ranks)) if working is None else working)
    ]
    answers = [future.result(timeout=DEADLINE_S) for future in at_work]
    if any(isinstance(answer, WorkLost) and not answer.restored for answer in answers):
        return Flipped(parked, answers)
    is_committed = all(isinstance(answer, Worked) for answer in answers)
    driver.write(CommitEntry(flip_id, target) if is_committed else AbandonEntry(flip_id, "work lost"))
    driver.answers()
    driver.epoch += is_committed
    return Flipped(parked, answers)


def live_blocks(live: BlockRuns) -> list[int]:
    return [block for begin, length in live for block in range(begin, begin + length)]


def whole_cache(num_layers: int, num_blocks: int, num_heads: int, head_dim: int, seed: int = 3) -> Tensor:
    """[L, 2, B, H, 16, D] random: what all ranks' pools together should hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_layers, 2, num_blocks, num_heads, 16, head_dim), generator=generator)


def own_blocks(pool: LayoutPool) -> list[int]:
    """The ids of a pool's blocks in the order of its planes, counted out one by one."""
    blocks = pool.holding.blocks
    whose = [index in blocks.part for index in range(blocks.period)]
    return [block for block in range(pool.num_blocks) if whose[block % blocks.period]]


def fill(pool: LayoutPool, cache: Tensor) -> None:
    """Writes a rank's part of the cache to its pool."""
    own = cache[:, :, own_blocks(pool), pool.kv_heads.begin : pool.kv_heads.end]
    for side, planes in enumerate((pool.keys, pool.values)):
        for layer, plane in planes.items():
            plane.copy_(own[layer, side])


def poison(pool: LayoutPool) -> None:
    for planes in (pool.keys, pool.values):
        for plane in planes.values():
            plane.fill_(torch.nan)


def check_rows(pool: LayoutPool, cache: Tensor, live: BlockRuns) -> None:
    """Live blocks of the rank hold the cache's bits, all its others are poisoned still."""
    blocks, moved = own_blocks(pool), set(live_blocks(live))
    own = cache[:, :, blocks, pool.kv_heads.begin : pool.kv_heads.end]
    is_live = torch.tensor([block in moved for block in blocks], dtype=torch.bool)
    for side, planes in enumerate((pool.keys, pool.values)):
        for layer, plane in planes.items():
            assert len(plane) == len(blocks)
            assert torch.equal(plane[is_live].view(torch.int32), own[layer, side, is_live].view(torch.int32))
            assert plane[~is_live].isnan().all()


def there_and_back(group: Group, cache: Tensor, live: BlockRuns) -> None:
    """Opens a log with a filled PP cache and flips three times: each time all live rows have their bits."""
    num_blocks = cache.shape[2]
    group.log.reset(LayoutKind.PP, num_blocks, 8, 256)
    for pool in pools_of(group, LayoutKind.PP):
        fill(pool, cache)
    for target in (LayoutKind.TP, LayoutKind.PP, LayoutKind.TP):
        for pool in pools_of(group, target):
            poison(pool)
        flipped = flip(group, target, live)
        assert all(isinstance(answer, Worked) for answer in flipped.answers), flipped.answers
        assert len({parked.plan_hash for parked in flipped.parked}) == 1
        for pool in pools_of(group, target):
            check_rows(pool, cache, live)


def check_live(pool: LayoutPool, cache: Tensor, live: BlockRuns) -> None:
    """Live blocks hold the cache's bits."""
    blocks, moved = own_blocks(pool), set(live_blocks(live))
    own = cache[:, :, blocks, pool.kv_heads.begin : pool.kv_heads.end]
    is_live = torch.tensor([block in moved for block in blocks], dtype=torch.bool)
    for side, planes in enumerate((pool.keys, pool.values)):
        for layer, plane in planes.items():
            assert torch.equal(plane[is_live].view(torch.int32), own[layer, side, is_live].view(torch.int32))
