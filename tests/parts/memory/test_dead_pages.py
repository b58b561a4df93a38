"""Pages of blocks that the log calls dead, in real groups: really returned, and answers as if nothing had been."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import gguf
import pytest
import torch

from services.core.ids import BlockId, LayoutKind, RequestIndex
from services.core.step import StepPlan
from services.models.model_files import ModelFiles, open_model
from services.placement.ledger import PoolBacking
from services.worker.memory.owned_memory import OwnedMode
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.shared_rows import SharedRows
from services.worker.memory.trimmed_pages import Released
from services.worker.participation import Worked
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.parts.worker.test_runner import flip as outcome
from tests.support.private_group import flip, own_blocks, rows_of, runs
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
NUM_BLOCKS = 400
NUM_LIVE = 20
"""Blocks below are the request's; those from here on are dead."""
Mode = Literal["shared"] | OwnedMode
KEEPS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"resident": {}, "exclusive": {"backing": PoolBacking.EXCLUSIVE}}
)
CASES: list[tuple[Mode, str]] = [("shared", "resident"), ("dual", "resident"), ("exchange", "resident")] + [
    (mode, "exclusive") for mode in ("dual", "image")
]
BOTH = pytest.mark.parametrize("kind", list(LayoutKind), ids=lambda kind: kind.value)
MODES = pytest.mark.parametrize(("mode", "backing"), CASES)
Tiny = tuple[ModelFiles, TinyLlama]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q8_0)
    return open_model(path), model


def pools_of(group: Group) -> list[Pool]:
    """Pools in force, one for each memory."""
    pools = [rank.runner.pool for rank in group.ranks]
    assert all(pool is not None for pool in pools)
    is_shared = isinstance(group.ranks[0].runner.parts.memory.rows, SharedRows)
    return [pool for pool in pools[: 1 if is_shared else None] if pool is not None]


def planes_of(pool: Pool) -> list[torch.Tensor]:
    found = []
    for layer in range(4):
        for side in (pool.keys, pool.values):
            try:
                found.append(side[layer])
            except KeyError:
                continue
    return found


def held_bytes(group: Group) -> int:
    """Memory of all ranks' pools, by the system's account."""
    shared = group.ranks[0].runner.parts.memory.rows
    if isinstance(shared, SharedRows):
        assert shared.pool is not None
        return shared.pool._region.held_bytes()
    rows = [rows_of(group, rank) for rank in range(len(group.ranks))]
    total = 0
    for each in rows:
        if isinstance(each, ExclusiveRows):
            assert each._memory is not None
            total += each._memory.held_bytes()
        else:
            total += sum(resident_bytes(pool._memory.data_ptr(), pool.num_bytes) for pool in each.pools.values())
    return total


def resident_bytes(address: int, num_bytes: int) -> int:
    """Pages of a range that are in memory: bit 63 of an entry of the kernel's page map."""
    page = 4096
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // page * 8)
        entries = pagemap.read(-(-num_bytes // page) * 8)
    return page * sum(entries[at] >> 7 for at in range(7, len(entries), 8))


def begin(group: Group, kind: LayoutKind) -> None:
    """A prompt in low blocks, and every other row of every pool poisoned."""
    log = group.log
    log.reset(kind, NUM_BLOCKS, 8, 256)
    for pool in pools_of(group):
        for plane in planes_of(pool):
            plane.fill_(torch.nan)
    log.num_blocks = NUM_LIVE
    log.prefill({0: PROMPT}, 16)


def write_release(group: Group, dead_from: int, start: int) -> None:
    """A decode step at a position that calls blocks dead; not waited for."""
    log = group.log
    plan = StepPlan(
        row_request_index=[RequestIndex(0)],
        row_start=[start],
        row_num_tokens=[1],
        sampled_row=[0],
        tokens_through=log.sequence,  # type: ignore[arg-type]
        dead_from=BlockId(dead_from),
    )
    log.in_flight.append((0,))
    log.write(plan)


def release(group: Group, dead_from: int) -> list[Released]:
    """One such step; what each rank made of it, in no order."""
    heard: list[Released] = []
    for rank in group.ranks:
        rank.runner.on_release = heard.append
    write_release(group, dead_from, len(group.log.requests[0]) - 1)
    group.log.settle()
    assert len(heard) == len(group.ranks)
    return heard


@BOTH
@MODES
def test_memory_is_returned_and_answers_go_on(tiny: Tiny, mode: Mode, backing: str, kind: LayoutKind) -> None:
    files, model = tiny
    with group_of(files, 2, pp_layers=(1, 3), tp_weights=(2.0, 1.0), mode=mode, keeps=KEEPS[backing]) as group:
        begin(group, kind)
        before = held_bytes(group)
        told = release(group, NUM_LIVE)
        freed = before - held_bytes(group)
        assert not any(released.is_refused for released in told)
        assert freed > 0.8 * before, "19 blocks of 20 are dead"
        assert sum(released.num_bytes for released in told) == freed
        group.log.decode([0], 6)
        # Ids above are issued again: they read as zero, and take memory again.
        log = group.log
        log.num_blocks, log.num_blocks_used = 3 * NUM_LIVE, 0
        log.prefill({1: PROMPT[::-1]}, 16)
        log.decode([0, 1], 5)
        check_greedy(model, log.requests[0], 40, 13)
        check_greedy(model, log.requests[1], 40, 6)
        assert before - freed < held_bytes(group) < before


@MODES
def test_flips_go_on_after_a_release(tiny: Tiny, mode: Mode, backing: str) -> None:
    files, model = tiny
    with group_of(files, 2, mode=mode, keeps=KEEPS[backing]) as group:
        begin(group, PP)
        for target in (TP, PP):
            release(group, NUM_LIVE)
            flipped = flip(group, target, runs((0, NUM_LIVE)))
            assert all(isinstance(answer, Worked) for answer in flipped.answers), flipped.answers
            group.log.decode([0], 4)
        release(group, NUM_LIVE)
        group.log.decode([0], 4)
        check_greedy(model, group.log.requests[0], 40, 16)


@MODES
def test_a_rank_keeps_what_its_own_tables_have(tiny: Tiny, mode: Mode, backing: str) -> None:
    """The scheduler's word alone loses no row: check and safety net do not share a blind spot."""
    files, model = tiny
    with group_of(files, 2, mode=mode, keeps=KEEPS[backing]) as group:
        begin(group, TP)
        before = held_bytes(group)
        for dead_from in (0, NUM_LIVE - 3, NUM_LIVE - 1):
            told = release(group, dead_from)
            assert all(released.is_refused and released.own_end == NUM_LIVE for released in told)
            assert not any(released.num_bytes for released in told)
        assert held_bytes(group) == before
        group.log.decode([0], 4)
        check_greedy(model, group.log.requests[0], 40, 8)


@BOTH
@MODES
def test_ranks_that_are_behind_lose_nothing(tiny: Tiny, mode: Mode, backing: str, kind: LayoutKind) -> None:
    """Steps in flight, each with a release: one rank gives back while others are steps behind it."""
    files, model = tiny
    with group_of(files, 3, mode=mode, keeps=KEEPS[backing]) as group:
        begin(group, kind)
        first = len(group.log.requests[0]) - 1
        for offset in range(7):
            write_release(group, NUM_LIVE, first + offset)
        while group.log.in_flight:
            group.log.settle()
        check_greedy(model, group.log.requests[0], 40, 8)


@BOTH
@pytest.mark.parametrize(
    ("mode", "backing", "kv_tokens"),
    [(*case, None) for case in CASES] + [(*case, (3, 2)) for case in CASES if case[0] != "shared"],
)
def test_no_row_below_loses_a_bit(
    tiny: Tiny, mode: Mode, backing: str, kv_tokens: tuple[int, ...] | None, kind: LayoutKind
) -> None:
    with group_of(tiny[0], 2, mode=mode, keeps=KEEPS[backing], kv_tokens=kv_tokens) as group:
        group.log.reset(kind, NUM_BLOCKS, 8, 256)
        pools, generator = pools_of(group), torch.Generator().manual_seed(5)
        planes = [(pool, plane) for pool in pools for plane in planes_of(pool)]
        written = [torch.randn(plane.shape, generator=generator) for _, plane in planes]
        for (_, plane), rows in zip(planes, written, strict=True):
            plane.copy_(rows)
        ends = (333, 332, 331, 150, 149, 19, 18, 17, 2, 1)
        for end in ends:
            for rank in group.ranks:
                rank.runner.parts.memory.rows.release_above(end)
            for (pool, plane), rows in zip(planes, written, strict=True):
                own = own_blocks(pool) if isinstance(pool, LayoutPool) else list(range(NUM_BLOCKS))
                num_kept = sum(block < end for block in own)
                assert torch.equal(plane[:num_kept], rows[:num_kept]), f"blocks below {end}"


@pytest.mark.parametrize("mode", ["dual", "image"])
def test_a_seam_finds_a_whole_pool(tiny: Tiny, mode: OwnedMode) -> None:
    """Its room is reckoned from whole pools: what was released is had again before the verdict."""
    with group_of(tiny[0], 2, mode=mode, keeps=KEEPS["exclusive"]) as group:
        begin(group, PP)
        before = held_bytes(group)
        release(group, NUM_LIVE)
        assert held_bytes(group) < 0.2 * before
        outcome(group, TP, commit=False)
        assert held_bytes(group) == before
        group.log.decode([0], 4)
        check_greedy(tiny[1], group.log.requests[0], 40, 6)
