"""Blocks under pressure: prefix reuse, eviction, preemption, and every block accounted for."""

import random

import pytest

from services.core.ids import BLOCK_SLOTS, BlockId, LayoutKind, RequestId
from services.core.request import Finished, FinishReason
from tests.support.toy_rank import Bench, answer, layout_of, limits_of

BOTH = pytest.mark.parametrize("kind", list(LayoutKind))


def bench_of(kind: LayoutKind = LayoutKind.TP, **changes: int | None) -> Bench:
    return Bench(limits_of(**changes), layout_of(kind, 2))


@BOTH
def test_a_finished_answer_is_a_prefix_for_what_follows(kind: LayoutKind) -> None:
    bench = bench_of(kind)
    prompt = list(range(40))
    bench.submit("a", prompt, 24)
    bench.run()
    follow_up = [*prompt, *bench.outputs["a"], 7, 8, 9]
    bench.submit("b", follow_up, 5)
    bench.run()
    assert bench.cached["b"] == 48, "the last output token was never computed, so its block is not full"
    assert bench.outputs["b"] == answer(follow_up, 5)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [16, 32])
def test_a_wholly_cached_prompt_computes_its_last_token_again(num_blocks: int, chunk_tokens: int) -> None:
    """P3.9"""
    bench = bench_of(chunk_tokens=chunk_tokens)
    prompt = list(range(num_blocks * BLOCK_SLOTS))
    for name in ("a", "b"):
        bench.submit(name, prompt, 3)
        bench.run()
    assert bench.outputs["b"] == bench.outputs["a"] == answer(prompt, 3)
    assert bench.cached["b"] == (num_blocks - 1) * BLOCK_SLOTS


def test_an_evicted_prefix_is_a_miss() -> None:
    """P3.8"""
    bench = bench_of(num_blocks=20)
    first, second = list(range(160)), list(range(500, 780))
    for name, prompt in (("a", first), ("b", second), ("again", first)):
        bench.submit(name, prompt, 8)
        bench.run()
        assert bench.outputs[name] == answer(prompt, 8)
    assert bench.cached["again"] <= 3 * BLOCK_SLOTS


def test_a_prefix_is_shared_while_it_is_being_computed() -> None:
    bench = bench_of(LayoutKind.PP)
    prompt = list(range(200))
    bench.submit("a", prompt, 4)
    bench.issue()
    bench.submit("b", prompt, 4)
    bench.run()
    assert bench.cached["b"] >= 32
    assert bench.outputs["a"] == bench.outputs["b"] == answer(prompt, 4)


@BOTH
def test_twins_in_one_step_keep_their_own_blocks(kind: LayoutKind) -> None:
    bench = bench_of(kind, max_batch_tokens=128)
    prompt = list(range(31))
    for name in ("a", "b", "c"):
        bench.submit(name, prompt, 40)
    for _ in range(12):
        bench.step()
        assert bench.batcher.census().is_sound
    bench.run()
    assert all(bench.outputs[name] == answer(prompt, 40) for name in "abc")
    assert bench.batcher.flush_prefix_cache() == (31 + 39) // BLOCK_SLOTS, "one copy stays"
    assert bench.batcher.load().free_blocks == 64


def test_nothing_is_allocated_that_was_not_counted() -> None:
    """P3.11: chunks that are no multiple of a block, a pool that is nearly full."""
    bench = bench_of(num_blocks=24, chunk_tokens=25)
    for number in range(8):
        bench.submit(f"r{number}", [number, *range(70)], 60)
    bench.run()
    for number in range(8):
        assert bench.outputs[f"r{number}"] == answer([number, *range(70)], 60)


@BOTH
def test_preempted_requests_lose_and_repeat_nothing(kind: LayoutKind) -> None:
    bench = bench_of(kind, num_blocks=16)
    prompts = {f"r{number}": [number * 31 + item for item in range(20)] for number in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 100)
    bench.run()
    assert bench.batcher.tally.num_preemptions > 0
    for name, prompt in prompts.items():
        assert bench.outputs[name] == answer(prompt, 100)
    assert max(len(bench.indexes(name)) for name in prompts) > 1


def test_the_oldest_is_never_preempted_and_the_lowest_priority_is_first() -> None:
    bench = bench_of(num_blocks=16)
    bench.submit("low", list(range(100, 120)), 100, priority=5)
    bench.step()
    for number in range(3):
        bench.submit(f"r{number}", [number * 31 + item for item in range(20)], 100)
    bench.run()
    assert len(bench.indexes("r0")) == 1
    assert len(bench.indexes("low")) > 1


def test_two_that_do_not_fit_together_both_end() -> None:
    """No livelock: each alone needs nearly the whole pool."""
    bench = bench_of(num_blocks=12)
    for number in range(2):
        bench.submit(f"r{number}", [number, *range(60)], 110)
    bench.run(max_steps=2_000)
    for number in range(2):
        assert bench.outputs[f"r{number}"] == answer([number, *range(60)], 110)


def test_recomputed_tokens_are_no_prefix_hits() -> None:
    """P3.19"""
    bench = bench_of(num_blocks=16)
    for number in range(6):
        bench.submit(f"r{number}", [number * 31 + item for item in range(20)], 100)
    bench.run()
    tally = bench.batcher.tally
    assert tally.num_preemptions > 0 and tally.num_resumed_cached_tokens > 0
    assert tally.num_cached_tokens == 0 and tally.num_prompt_tokens == 120
    assert set(bench.cached.values()) == {0}


def test_results_of_a_preempted_request_still_count_until_it_returns() -> None:
    bench = bench_of(num_blocks=5, max_context_tokens=80)
    bench.submit("old", list(range(31)), 40)
    bench.submit("young", list(range(100, 131)), 40)
    while not bench.batcher.tally.num_preemptions:
        bench.issue_all()
        if not bench.batcher.tally.num_preemptions:
            bench.report()
    emitted = len(bench.outputs["young"])
    while bench.unreported:
        bench.report()
    assert len(bench.outputs["young"]) > emitted
    bench.run()
    assert bench.outputs["young"] == answer(list(range(100, 131)), 40)


def test_late_results_of_an_earlier_residence_are_dropped() -> None:
    """The request is back in the batch, computing again, when a result from before its preemption arrives."""
    bench = bench_of(num_blocks=5, max_context_tokens=80, steps_ahead=4)
    bench.submit("old", list(range(31)), 40)
    bench.submit("young", list(range(100, 131)), 40)
    while not bench.batcher.tally.num_preemptions:
        if bench.issue() is None:
            bench.report()
    young = bench.indexes("young")[0]
    late = [
        bench.plans[sequence] for sequence, _ in bench.unreported if young in bench.plans[sequence].row_request_index
    ]
    bench.take(bench.batcher.abort(RequestId("old")))
    assert bench.issue() is not None and len(bench.indexes("young")) == 2
    [request] = [one for one in bench.batcher._running if one.request_id == "young"]
    plan = bench.plans[max(bench.plans)]
    samples = plan.row_request_index.index(bench.indexes("young")[-1]) in plan.sampled_row
    assert request.num_in_flight == samples, "what was in flight before its return is not waited for"
    before = (len(bench.outputs["young"]), bench.batcher.load().uncomputed_prefill_tokens)
    assert late, "results from before the preemption are still to come"
    for _ in late:
        bench.report()
    assert (len(bench.outputs["young"]), bench.batcher.load().uncomputed_prefill_tokens) == before
    bench.run()
    assert bench.outputs["young"] == answer(list(range(100, 131)), 40)


def test_a_newcomer_leaves_a_block_for_everyone_who_decodes() -> None:
    bench = bench_of(num_blocks=8, max_context_tokens=128)
    bench.submit("old", list(range(20)), 30)
    bench.step()
    bench.submit("new", list(range(200, 296)), 2)
    bench.run()
    assert bench.batcher.tally.num_preemptions == 0
    assert bench.outputs["new"] == answer(list(range(200, 296)), 2)


def test_a_preempted_request_can_be_aborted() -> None:
    bench = bench_of(num_blocks=5, max_context_tokens=80)
    bench.submit("old", list(range(31)), 40)
    bench.submit("young", list(range(100, 131)), 40)
    while not bench.batcher.tally.num_preemptions:
        bench.step()
    bench.take(bench.batcher.abort(RequestId("young")))
    assert bench.ends["young"] == Finished(RequestId("young"), FinishReason.ABORT, len(bench.outputs["young"]), 0)
    bench.run()
    assert bench.outputs["old"] == answer(list(range(31)), 40)


def test_thousands_of_mixed_requests_leave_nothing_behind() -> None:
    """P3.1, P3.2"""
    rng = random.Random(5)
    bench = bench_of(num_blocks=48)
    for number in range(2_000):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        bench.submit(f"r{number}", prompt, rng.randrange(1, 12))
        if rng.random() < 0.2:
            bench.take(bench.batcher.abort(RequestId(f"r{rng.randrange(number + 1)}")))
        bench.step()
    bench.run()
    bench.batcher.flush_prefix_cache()
    assert bench.batcher.load().free_blocks == 48
    assert not bench.batcher.open_request_ids and bench.batcher.num_in_flight == 0


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_events_gives_the_right_answers(seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice(list(LayoutKind))
    limits = limits_of(
        num_blocks=rng.randrange(8, 40),
        max_resident_requests=rng.randrange(1, 9),
        chunk_tokens=rng.randrange(1, 40),
        max_context_tokens=120,
        steps_ahead=rng.randrange(1, 4),
        attention_parity_tokens=rng.choice([None, 50]),
    )
    bench = Bench(limits, layout_of(kind, rng.randrange(1, 5)))
    prompts: dict[str, tuple[list[int], int]] = {}
    for number in range(60):
        name = f"r{number}"
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 80))]
        prompts[name] = (prompt, rng.randrange(1, 30))
        bench.submit(name, *prompts[name], priority=rng.randrange(2))
        for _ in range(rng.randrange(6)):
            if rng.random() < 0.5 and bench.unreported:
                bench.report()
            else:
                bench.issue()
        if rng.random() < 0.1:
            bench.take(bench.batcher.abort(RequestId(f"r{rng.randrange(number + 1)}")))
        assert bench.batcher.census().is_sound
    bench.run()
    for name, (prompt, num_tokens) in prompts.items():
        end = bench.ends[name]
        if isinstance(end, Finished):
            whole = answer(prompt, min(num_tokens, limits.context_tokens - len(prompt)))
            assert bench.outputs[name] == whole[: end.num_output_tokens]
            assert end.reason is FinishReason.ABORT or bench.outputs[name] == whole


def test_a_census_names_what_is_wrong() -> None:
    """The detector fires: a block lost, a block owned twice, a pin too many."""
    bench = bench_of()
    bench.submit("a", list(range(40)), 8)
    bench.step()
    batcher = bench.batcher
    assert batcher.census().is_sound
    lost = batcher._tables.pool.take()
    assert batcher.census().unaccounted == (lost,)
    assert lost is not None
    batcher._tables.pool.give(lost)
    request = batcher._open[RequestId("a")]
    request.path[0].num_pins += 1
    assert batcher.census().unaccounted == (request.path[0].block,)
    request.path[0].num_pins -= 1
    request.blocks.append(BlockId(request.blocks[-1]))
    assert batcher.census().unaccounted == (request.blocks[-1],)


@BOTH
def test_a_prompt_cached_whole_gets_on_in_a_pool_without_room_for_two_copies_of_its_end(kind: LayoutKind) -> None:
    """P3.9, P3.12: its last block is computed again; with both copies kept it preempted itself for ever."""
    bench = Bench(limits_of(num_blocks=4, max_context_tokens=64), layout_of(kind))
    prompt = list(range(3 * BLOCK_SLOTS))
    bench.submit("first", prompt, 1)
    bench.run()
    bench.submit("second", prompt, 10)
    bench.run(max_steps=100)
    assert bench.outputs["second"] == answer(prompt, 10)
    assert bench.batcher.tally.num_preemptions == 0


def test_after_a_flip_every_page_of_the_pool_counts_as_backed() -> None:
    """A flip may have put pages under all of it: what a release gives is counted from there."""
    bench = Bench(limits_of(), layout_of(LayoutKind.TP))
    bench.submit("a", list(range(40)), 60)
    bench.step()
    bench.batcher.release_dead()
    while bench.batcher.num_dead_blocks:
        bench.step()
    bench.batcher.freeze()
    while bench.unreported:
        bench.report()
    bench.batcher.thaw(layout_of(LayoutKind.PP))
    assert bench.batcher.num_dead_blocks > bench.batcher.limits.num_blocks // 2
