"""Flips of a real mesh whose ranks own their memory: rows move between processes, and answers are those without."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.ids import Rank
from services.mesh.codec.common import layout_to_proto
from tests.mesh.support.flipping import ASKS, PP, TP, bench_of, flip_until_ended, hold_answers
from tests.mesh.support.meshes import Mesh, started
from tests.mesh.support.moving import HEAD_BLOCK_BYTES, flip_some, moved_prefix, reported
from tools.load.load import Heard


@pytest.fixture(scope="module")
def private_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("dual")
    with started(directory, group={"mode": "dual"}, policy={"mode": "manual"}) as mesh:
        yield mesh


async def test_answers_hold_while_rows_move_between_ranks(private_mesh: Mesh, control: list[Heard]) -> None:
    async with bench_of(private_mesh) as bench:
        async with bench.streaming(ASKS, 16) as load:
            committed = await flip_until_ended(bench, load)
        hold_answers(control, load.heard)
        records = [await bench.record(flip_id) for flip_id in committed]
        assert {record.target for record in records} == {layout_to_proto(PP), layout_to_proto(TP)}
        for record in records:
            # Of 30 layers of 3 heads a rank of two has 15, or 2 and 1: what is not where it is needed is 15 layers of
            # the other's heads, each way.
            assert record.bytes_moved == record.num_live_blocks * 15 * 3 * HEAD_BLOCK_BYTES
        await bench.settled()
        reported(records)


@pytest.mark.parametrize("kind", [PP, pytest.param(TP, marks=pytest.mark.slow)])
async def test_prefixes_that_moved_are_hits(private_mesh: Mesh, kind: object) -> None:
    async with bench_of(private_mesh) as bench:
        await moved_prefix(bench, 2000 if kind is PP else 3000, to_pp=kind is TP)


WEIGHTS_BYTES = 30_000_000
"""Less than what a flip between two even layouts of SmolLM2-135M brings to both ranks together."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "carrier"),
    [(2, "shm"), (3, "shm"), (2, "gloo")],
)
async def test_answers_hold_while_weights_move_as_well(
    tmp_path: Path, control: list[Heard], num_ranks: int, carrier: str
) -> None:
    group = {"mode": "exchange", "num_ranks": num_ranks, "carrier": carrier}
    with started(tmp_path, group=group, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                committed = await flip_until_ended(bench, load)
            hold_answers(control, load.heard)
            records = [await bench.record(flip_id) for flip_id in committed]
            assert {record.target for record in records} == {layout_to_proto(PP), layout_to_proto(TP)}
            assert all(record.bytes_moved > WEIGHTS_BYTES for record in records)
            await bench.settled()
            reported(records)


@pytest.mark.slow
async def test_answers_hold_while_weights_come_from_images(tmp_path: Path, control: list[Heard]) -> None:
    """One image a rank is in memory, the other one on disk; only rows cross between ranks."""
    group = {"mode": "image", "cold_image": True}
    with started(tmp_path, group=group, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                records = await flip_some(bench, load)
            hold_answers(control, load.heard)
            for record in records:
                assert record.bytes_moved == record.num_live_blocks * 15 * 3 * HEAD_BLOCK_BYTES
    images = [path.name for path in (tmp_path / "state" / "images").iterdir() if path.suffix == ".image"]
    assert sorted(images) == [f"worker-{rank}-{kind}.image" for rank in (0, 1) for kind in ("pp", "tp")]


async def test_answers_hold_while_pools_take_turns(tmp_path: Path, control: list[Heard]) -> None:
    """Weights change places as well."""
    group, pool = {"mode": "exchange"}, {"backing": "exclusive", "num_blocks": 128}
    with started(tmp_path, group=group, pool=pool, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                records = await flip_some(bench, load)
            hold_answers(control, load.heard)
            assert all(work.seam_ns > 0 for record in records for work in record.ranks)
            assert all(record.bytes_moved > WEIGHTS_BYTES for record in records)
            await bench.settled()


async def hold_a_killed_rank(mesh: Mesh, control: list[Heard], rank: Rank) -> None:
    """A rank is killed after a flip, under streams: they go on as without, and so do those of the next generation."""
    async with bench_of(mesh) as bench:
        async with bench.streaming(ASKS, 16) as load:
            assert (await bench.flip(PP)).committed
            pid = await bench.pid("worker", rank)
            os.kill(pid, signal.SIGKILL)
            await bench.until_reborn("worker", pid, rank)
        hold_answers(control, load.heard)
        await asyncio.to_thread(mesh.wait_ready)
        async with bench.streaming(ASKS, 16) as load:
            assert await flip_until_ended(bench, load)
        hold_answers(control, load.heard)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rank_killed_between_flips_takes_rows_with_it_that_no_other_has(
    tmp_path: Path, control: list[Heard]
) -> None:
    group, pool = {"mode": "image"}, {"backing": "exclusive", "num_blocks": 128}
    with started(tmp_path, group=group, pool=pool, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                assert (await bench.flip(PP)).committed
                pid = await bench.pid("worker", Rank(1))
                os.kill(pid, signal.SIGKILL)
                await bench.until_reborn("worker", pid, Rank(1))
            hold_answers(control, load.heard)
            await asyncio.to_thread(mesh.wait_ready)
            async with bench.streaming(ASKS, 16) as load:
                await flip_some(bench, load)
            hold_answers(control, load.heard)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rank_killed_between_flips_reads_its_images_again(tmp_path: Path, control: list[Heard]) -> None:
    group = {"mode": "image", "cold_image": True, "num_ranks": 3, "pp_layers": [8, 12, 10]}
    with started(tmp_path, group=group, policy={"mode": "manual"}) as mesh:
        await hold_a_killed_rank(mesh, control, Rank(2))


@pytest.mark.slow
async def test_a_rank_killed_between_flips_costs_no_stream(tmp_path: Path, control: list[Heard]) -> None:
    """Weights that have moved are gone with the rank: the next generation loads its own and flips as well."""
    with started(tmp_path, group={"mode": "exchange"}, policy={"mode": "manual"}) as mesh:
        await hold_a_killed_rank(mesh, control, Rank(1))


@pytest.mark.slow
async def test_three_uneven_ranks_and_a_full_pool(tmp_path: Path, control: list[Heard]) -> None:
    """Streams that do not fit together, so that some are preempted, and every block moves."""
    group = {"mode": "dual", "num_ranks": 3, "pp_layers": [6, 14, 10], "tp_weights": [1.0, 2.0, 1.0]}
    with started(tmp_path, group=group, pool={"num_blocks": 12}, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                committed = await flip_until_ended(bench, load)
            hold_answers(control, load.heard)
            records = [await bench.record(flip_id) for flip_id in committed]
            assert max(record.num_live_blocks for record in records) == 12
            assert all(record.bytes_moved > 0 for record in records)
            await bench.settled()
