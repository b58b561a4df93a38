"""What a test asks rank processes to do between entries: fill pools, poison them, check rows, change a byte on its way.

Functions of a module, since they go to the ranks by name; every rank makes the same cache from the same seed.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from services.core.ids import BlockId, FlipId, LayoutKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry
from services.placement.rows.transfers import BlockRuns
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.participation import Worked, WorkLost
from services.worker.steps.execute import Runner
from tests.parts.memory.test_private_flips import FaultyWire
from tests.support.private_group import check_rows, fill, poison, whole_cache
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import RankCall, RankProcess


def pool_of(runner: Runner, kind: LayoutKind) -> LayoutPool:
    memory: Any = runner.parts.memory
    pool = memory.rows.pools[kind]
    assert isinstance(pool, LayoutPool)
    return pool


def cache_of(runner: Runner, kind: LayoutKind, seed: int) -> Tensor:
    geometry = runner._geometry
    num_blocks = pool_of(runner, kind).num_blocks
    return whole_cache(geometry.num_layers, num_blocks, geometry.num_kv_heads, geometry.head_dim, seed)


def fill_rows(runner: Runner, kind: LayoutKind, seed: int) -> None:
    fill(pool_of(runner, kind), cache_of(runner, kind, seed))


def poison_rows(runner: Runner, kind: LayoutKind) -> None:
    poison(pool_of(runner, kind))


def hold_rows(runner: Runner, kind: LayoutKind, seed: int, live: BlockRuns) -> None:
    check_rows(pool_of(runner, kind), cache_of(runner, kind, seed), live)


def change_a_byte(runner: Runner, at_message: int) -> None:
    FaultyWire(runner.parts.carrier, at_message)


def work(runner: Runner, flip_id: FlipId) -> Worked | WorkLost:
    return runner.work(flip_id)


def everywhere(ranks: Sequence[RankProcess], call: RankCall) -> list[Any]:
    """Every rank's result, by rank."""
    for rank in ranks:
        rank.submit(call)
    return [rank.result() for rank in ranks]


def flip(log: LogDriver, ranks: Sequence[RankProcess], target: LayoutKind, live: BlockRuns | None = None) -> list[Any]:
    """One attempt with its work, of all blocks by default; committed if every rank has done its part."""
    flip_id = FlipId(log.sequence)
    log.write(FlipEntry(flip_id, target, ((BlockId(0), log.num_blocks),) if live is None else live))
    log.answers()
    answers = everywhere(ranks, RankCall(work, (flip_id,)))
    is_committed = all(isinstance(answer, Worked) for answer in answers)
    log.write(CommitEntry(flip_id, target) if is_committed else AbandonEntry(flip_id, "work lost"))
    log.answers()
    log.epoch += is_committed
    return answers
