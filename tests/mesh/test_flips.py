"""Flips of a real mesh under streams: answers as without, every block in its place, and who may flip when."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from flipmesh.mover.v1 import mover_service_pb2

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from tests.mesh.support.flipping import (
    ASKS,
    LONG_TOKENS,
    PP,
    TP,
    Bench,
    bench_of,
    flip_until_ended,
    hold_answers,
    long_ask,
    stopped,
)
from tests.mesh.support.meshes import Mesh, started
from tools.load.load import Ask, Heard

log = logging.getLogger(__name__)
TEN_MS = 0.01
CACHED_TOKENS = 400


@pytest.fixture
async def bench(mesh: Mesh) -> AsyncIterator[Bench]:
    async with bench_of(mesh) as bench:
        yield bench


async def test_answers_hold_across_flips_both_ways(bench: Bench, control: list[Heard]) -> None:
    """J1, J3, K, L, Z7: every stream is carried, in both directions, and none is lost or doubled."""
    async with bench.streaming(ASKS, 16) as load:
        committed = await flip_until_ended(bench, load)
    hold_answers(control, load.heard)
    records = [await bench.record(flip_id) for flip_id in committed]
    full = [record for record in records if record.num_carried_requests == len(ASKS)]
    assert all(record.longest_token_gap_ns > 0 for record in full)
    # Of two flips with no step between them neither has a pause of its own.
    paused = [record for record in full if record.HasField("pause_ns")]
    assert {record.target for record in paused} == {layout_to_proto(PP), layout_to_proto(TP)}
    assert all(record.bytes_moved == 0 for record in records), "shared mode moves no byte"


@pytest.mark.slow
async def test_three_ranks_and_a_full_pool(tmp_path: Path, control: list[Heard]) -> None:
    """T, V: eight streams that do not fit together, so that some are preempted, and every block lives at a flip."""
    num_blocks, num_tokens = 12, 30
    with started(tmp_path, group={"num_ranks": 3}, pool={"num_blocks": num_blocks}, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            asks = [Ask(ask.prompt, num_tokens) for ask in ASKS]
            async with bench.streaming(asks, 16) as load:
                committed = await flip_until_ended(bench, load)
            hold_answers([shortened(heard, num_tokens) for heard in control], load.heard)
            records = [await bench.record(flip_id) for flip_id in committed]
            assert {record.target for record in records} == {layout_to_proto(PP), layout_to_proto(TP)}
            assert max(record.num_live_blocks for record in records) == num_blocks
            assert (await bench.settled()).num_preemptions_total > 0


async def test_a_partly_prefilled_prompt_is_carried(bench: Bench) -> None:
    """J2: a prompt stops at a chunk's end, in the middle of a block or not, and goes on in the other layout."""
    ask = long_ask(700)
    async with bench.streaming([*ASKS[:2], ask], 2) as load:
        committed = await flip_until_ended(bench, load)
    records = [await bench.record(flip_id) for flip_id in committed]
    assert {record.target for record in records if record.num_partly_prefilled} >= {layout_to_proto(PP)}
    # Cached rows were made under both layouts; what follows from them must be what follows from none of them.
    [warm] = await bench.ask([ask])
    [cold] = await bench.ask([Ask(f" {ask.prompt}", ask.max_tokens)])
    assert load.heard[2].token_ids == warm.token_ids
    assert (warm.num_cached_tokens > LONG_TOKENS // 2, cold.num_cached_tokens) == (True, 0)


@pytest.mark.parametrize("kind", list(LayoutKind))
async def test_prefixes_of_the_other_layout_are_hits(bench: Bench, kind: LayoutKind) -> None:
    ask = long_ask(2000 if kind is PP else 3000, max_tokens=16, num_tokens=CACHED_TOKENS)
    await bench.flip_to(kind)
    [cold] = await bench.ask([ask])
    await bench.flip_to(kind.other)
    [warm] = await bench.ask([ask])
    assert (cold.num_cached_tokens, warm.token_ids) == (0, cold.token_ids)
    assert warm.num_cached_tokens >= CACHED_TOKENS // 2
    await bench.flip_to(TP)


async def test_of_two_triggers_one_commits(bench: Bench, control: list[Heard]) -> None:
    async with bench.streaming(ASKS, 16) as load:
        with stopped(await bench.pid("mover")):
            first = asyncio.create_task(bench.flip(PP))
            flip_id = await bench.until_pending()
            await anyio.sleep(TEN_MS)
            second = await bench.flip(PP)
        assert not second.committed
        assert second.reason == f"flip {flip_id} is under way: one at a time"
        assert (await first).committed
    hold_answers(control, load.heard)
    assert (await first).flip_id == flip_id
    assert (await bench.record(flip_id)).state == mover_service_pb2.FLIP_STATE_COMMITTED


async def test_two_triggers_at_once(bench: Bench) -> None:
    answers = await asyncio.gather(*(bench.flip(PP) for _ in range(2)))
    assert sorted(answer.committed for answer in answers) == [False, True]
    [refused] = [answer for answer in answers if not answer.committed]
    assert "under way" in refused.reason or "already" in refused.reason


async def test_aborts_while_a_flip_is_pending(bench: Bench, control: list[Heard]) -> None:
    """Z6, J3: clients hang up between FLIP and its outcome; the rest is right and no block is left behind."""
    async with bench.streaming(ASKS[4:], 8) as load, anyio.create_task_group() as hung_up:
        gone = bench.load(ASKS[:4])
        hung_up.start_soon(gone.run)
        await gone.until(8)
        with stopped(await bench.pid("mover")):
            flip = asyncio.create_task(bench.flip(PP))
            await bench.until_pending()
            hung_up.cancel_scope.cancel()
            await bench.until_open(4)
        assert (await flip).committed
    assert gone.num_tokens < sum(ask.max_tokens for ask in ASKS[:4])
    hold_answers(control[4:], load.heard)
    await bench.settled()


async def test_a_flip_of_an_empty_group(bench: Bench, control: list[Heard]) -> None:
    """L, X: nothing is asked of nobody, and nobody was paused."""
    answer = await bench.flip(PP)
    assert answer.committed
    assert (answer.layout, answer.epoch) == (layout_to_proto(PP), (await bench.scheduler()).epoch)
    record = await bench.record(answer.flip_id)
    assert record.num_carried_requests == 0
    assert not record.HasField("longest_token_gap_ns")
    hold_answers(control, await bench.ask(ASKS))
    record = await bench.record(answer.flip_id)
    assert all(steps.HasField("first_step_unix_ns") for steps in record.ranks)
    assert not record.HasField("pause_ns")


async def test_a_flip_to_the_layout_there_is_refused(bench: Bench) -> None:
    epoch = (await bench.scheduler()).epoch
    found = await asyncio.to_thread(bench.mesh.command, "flip", "tp", "--json")
    answer = json.loads(found.stdout)
    assert (found.returncode, answer["committed"], answer["reason"]) == (1, False, "the layout is TP already")
    assert (await bench.scheduler()).epoch == epoch


async def test_auto_goes_to_pp_for_prompts_and_back_for_decoding(bench: Bench, control: list[Heard]) -> None:
    decoding = [Ask(ask.prompt, 150) for ask in ASKS[:4]]
    await bench.policy("auto")
    async with bench.streaming(decoding, 8) as load:
        burst = bench.load([long_ask(4000), long_ask(5000)])
        await burst.run()
        await bench.until_layout(TP)
    hold_answers([shortened(heard, 60) for heard in control[:4]], [shortened(heard, 60) for heard in load.heard])
    spans = (await bench.scheduler()).timeline
    reasons = [span.reason.partition(":")[0] for span in spans if not span.reason.startswith("by hand")]
    assert reasons[-2:] == ["prefill", "decode"]


async def test_a_pinned_layout_is_gone_to_and_kept(bench: Bench) -> None:
    await bench.policy("pp")
    await bench.until_layout(PP)
    epoch = (await bench.scheduler()).epoch
    await bench.ask(ASKS[:2])
    await bench.policy("auto")
    await bench.until_layout(TP)
    status = await bench.scheduler()
    assert status.epoch == epoch + 1, "decoding alone moved nothing while pinned"


async def test_manual_moves_nothing_by_itself(bench: Bench) -> None:
    epoch = (await bench.scheduler()).epoch
    await bench.ask([long_ask(9000, max_tokens=2)])
    assert (await bench.scheduler()).epoch == epoch


async def test_the_oracle_passes_and_says_so(bench: Bench) -> None:
    await bench.policy("auto")
    found = await asyncio.to_thread(bench.mesh.command, "oracle", "--json", "--requests", "2", "--tokens", "45")
    report = json.loads(found.stdout)
    assert (found.returncode, report["verdict"], report["reasons"]) == (0, "pass", [])
    assert [probe["target"] for probe in report["probes"]] == ["pp", "tp"]
    assert (await bench.status("policy")).policy.mode == "auto", "as it was before"


def shortened(heard: Heard, num_tokens: int) -> Heard:
    """The first tokens of an answer."""
    return Heard(heard.token_ids[:num_tokens], heard.margins[:num_tokens], error=heard.error)
