"""Freeze and thaw: what a flip needs of the batch, whatever happens to requests meanwhile."""

import random
from itertools import pairwise

import pytest

from services.core.ids import LayoutKind, RequestId
from services.core.request import Finished, FinishReason
from services.core.step import SampledTokens
from tests.support.toy_rank import Bench, answer, layout_of, limits_of

BOTH = pytest.mark.parametrize("kind", list(LayoutKind))


def busy_bench(kind: LayoutKind) -> Bench:
    """Requests decoding, prefilling, queued, and a cached prefix."""
    bench = Bench(limits_of(max_resident_requests=4), layout_of(kind))
    bench.submit("done", list(range(50)), 3)
    bench.run()
    for number in range(6):
        bench.submit(f"r{number}", [number, *range(90)], 30)
    for _ in range(5):
        bench.step()
    bench.issue_all()
    assert bench.unreported
    return bench


def park(bench: Bench) -> None:
    while bench.unreported:
        bench.report()
    assert bench.batcher.is_parked


@BOTH
def test_a_flip_carries_every_request(kind: LayoutKind) -> None:
    bench = busy_bench(kind)
    bench.batcher.freeze()
    assert bench.issue() is None and not bench.batcher.is_parked
    park(bench)
    assert bench.issue() is None, "parked: nothing is issued though the window is open"
    bench.batcher.thaw(layout_of(kind.other))
    bench.issue_all()
    microbatches = [bench.plans[sequence].microbatch for sequence, _ in bench.unreported]
    assert microbatches == ([0, 1] if kind.other is LayoutKind.PP else [0, 0])
    bench.run()
    for number in range(6):
        assert bench.outputs[f"r{number}"] == answer([number, *range(90)], 30)


@BOTH
def test_results_in_flight_commit_while_frozen(kind: LayoutKind) -> None:
    bench = busy_bench(kind)
    bench.batcher.freeze()
    emitted = sum(map(len, bench.outputs.values()))
    park(bench)
    assert sum(map(len, bench.outputs.values())) > emitted


@BOTH
def test_nothing_changes_hands_while_frozen(kind: LayoutKind) -> None:
    """Z6, T: ends, aborts, arrivals and results leave the live extent as it was when the flip was armed."""
    bench = busy_bench(kind)
    bench.batcher.freeze()
    before = bench.batcher.live_runs()
    for name in ("r0", "r3", "r5"):
        bench.take(bench.batcher.abort(RequestId(name)))
    bench.take(bench.batcher.finish(RequestId("r1"), len(bench.outputs["r1"])))
    bench.submit("new", list(range(70)), 3)
    assert bench.batcher.flush_prefix_cache() == 0
    park(bench)
    assert bench.batcher.live_runs() == before
    assert bench.batcher.census().is_sound
    assert isinstance(bench.ends["r0"], Finished) and bench.ends["r0"].reason is FinishReason.ABORT
    free_before = bench.batcher.load().free_blocks
    bench.batcher.thaw(layout_of(kind.other))
    assert bench.batcher.load().free_blocks > free_before
    assert bench.batcher.census().is_sound
    bench.run()
    assert bench.outputs["new"] == answer(list(range(70)), 3)


def test_a_row_that_is_not_finite_frees_nothing_while_frozen() -> None:
    bench = busy_bench(LayoutKind.TP)
    bench.batcher.freeze()
    before = bench.batcher.live_runs()
    sequence, sampled = bench.unreported.popleft()
    everything = frozenset(range(len(sampled.token_ids)))
    bench.take(bench.batcher.on_tokens(sequence, SampledTokens(sampled.token_ids, non_finite=everything)))
    bench.batcher.on_acknowledged(sequence)
    assert bench.ends and bench.batcher.live_runs() == before and bench.batcher.census().is_sound
    park(bench)
    bench.batcher.thaw(layout_of(LayoutKind.PP))
    assert bench.batcher.census().is_sound
    bench.run()


@BOTH
def test_the_live_extent_covers_tables_and_cached_prefixes(kind: LayoutKind) -> None:
    """J2: what is allocated, not what is filled; neighbours in one run, none beyond."""
    bench = busy_bench(kind)
    live = {block for begin, length in bench.batcher.live_runs() for block in range(begin, begin + length)}
    for place in bench.rank.places.values():
        assert live.issuperset(place.blocks)
    load = bench.batcher.load()
    assert len(live) == 64 - load.free_blocks and load.cached_blocks > 0
    runs = bench.batcher.live_runs()
    assert all(begin + length < after for (begin, length), (after, _) in pairwise(runs))


def test_an_empty_batch_has_no_live_run() -> None:
    """X"""
    bench = Bench(limits_of(), layout_of(LayoutKind.TP))
    bench.batcher.freeze()
    assert bench.batcher.is_parked and bench.batcher.live_runs() == ()


@BOTH
def test_an_abandoned_flip_goes_on_even_with_steps_in_flight(kind: LayoutKind) -> None:
    bench = busy_bench(kind)
    bench.batcher.freeze()
    bench.batcher.thaw(layout_of(kind))
    bench.run()
    for number in range(6):
        assert bench.outputs[f"r{number}"] == answer([number, *range(90)], 30)


@BOTH
def test_a_layout_is_not_switched_under_steps_in_flight(kind: LayoutKind) -> None:
    bench = busy_bench(kind)
    bench.batcher.freeze()
    with pytest.raises(AssertionError, match=f"a flip to {kind.other.value} with steps"):
        bench.batcher.thaw(layout_of(kind.other))


@pytest.mark.parametrize("seed", range(20))
def test_answers_survive_any_number_of_flips_under_pressure(seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice(list(LayoutKind))
    bench = Bench(limits_of(num_blocks=20, max_context_tokens=100, max_resident_requests=5), layout_of(kind))
    prompts = {f"r{number}": [rng.randrange(2) for _ in range(rng.randrange(1, 60))] for number in range(30)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 20)
        for _ in range(rng.randrange(5)):
            bench.step()
        if rng.random() < 0.4:
            bench.batcher.freeze()
            if rng.random() < 0.3:
                bench.take(bench.batcher.abort(RequestId(rng.choice(list(bench.outputs)))))
            park(bench)
            kind = rng.choice([kind, kind.other])
            bench.batcher.thaw(layout_of(kind))
            assert bench.batcher.census().is_sound
    bench.run()
    for name, prompt in prompts.items():
        end = bench.ends[name]
        assert isinstance(end, Finished)
        whole = answer(prompt, 20)
        assert bench.outputs[name] == whole[: end.num_output_tokens]
        assert end.reason is FinishReason.ABORT or bench.outputs[name] == whole
