"""Requests from submission to their end: what is taken, computed, emitted, and why it ends."""

import math

import pytest

from services.core.ids import LayoutKind, LogIndex, RequestId, TokenId
from services.core.request import (
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    SamplingParams,
    Submission,
    TokenLogprobs,
)
from services.core.step import SampledTokens
from services.scheduler.batch.batcher import Batcher, ResultError
from services.scheduler.batch.chunking import ChunkBudget, chunk_length
from tests.support.toy_rank import Bench, answer, layout_of, limits_of

BOTH = pytest.mark.parametrize("kind", list(LayoutKind))
PROMPT = list(range(20, 60))


@pytest.fixture
def bench() -> Bench:
    return Bench(limits_of(), layout_of(LayoutKind.TP))


def ended(bench: Bench, name: str) -> Finished:
    end = bench.ends[name]
    assert isinstance(end, Finished), end
    return end


def refused(bench: Bench, name: str) -> Rejected:
    end = bench.ends[name]
    assert isinstance(end, Rejected), end
    return end


@BOTH
def test_a_request_gets_its_answer_and_ends_with_its_length(kind: LayoutKind) -> None:
    bench = Bench(limits_of(), layout_of(kind))
    bench.submit("a", PROMPT, 12)
    bench.run()
    assert bench.outputs["a"] == answer(PROMPT, 12)
    assert ended(bench, "a") == Finished(RequestId("a"), FinishReason.LENGTH, 12, 0)


@BOTH
def test_many_requests_of_mixed_lengths_get_the_answers_they_get_alone(kind: LayoutKind) -> None:
    bench = Bench(limits_of(num_blocks=256), layout_of(kind, 4))
    prompts = {f"r{i}": [i, *range(i * 7 % 90)] for i in range(40)}
    for number, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, 1 + number % 30)
    bench.run()
    for number, (name, prompt) in enumerate(prompts.items()):
        assert bench.outputs[name] == answer(prompt, 1 + number % 30), name
    assert bench.batcher.tally.num_emitted_tokens == sum(1 + number % 30 for number in range(40))


def test_a_stop_id_is_emitted_last_and_rows_in_flight_run_dead(bench: Bench) -> None:
    stop = answer(PROMPT, 5)[4]
    bench.submit("a", PROMPT, 100, stop_token_ids=frozenset({TokenId(stop)}))
    bench.run()
    assert bench.outputs["a"] == answer(PROMPT, 5)
    assert ended(bench, "a").reason is FinishReason.STOP
    assert bench.batcher.tally.num_dropped_tokens == 1, "one step was ahead"


def test_length_leaves_no_dead_row(bench: Bench) -> None:
    bench.submit("a", PROMPT, 5)
    bench.run()
    assert bench.batcher.tally.num_dropped_tokens == 0
    assert bench.batcher.tally.num_computed_tokens == len(PROMPT) + 4


def test_the_context_cuts_the_output(bench: Bench) -> None:
    """P2.13, P3.16"""
    limits = bench.batcher.limits
    bench.submit("a", list(range(limits.context_tokens - 1)), 10**12)
    bench.submit("b", list(range(limits.context_tokens)), 1)
    bench.submit("c", list(range(limits.context_tokens - 2)), 2)
    bench.run()
    assert ended(bench, "a").num_output_tokens == 1
    assert ended(bench, "a").reason is FinishReason.LENGTH
    assert ended(bench, "c").num_output_tokens == 2
    refusal = refused(bench, "b")
    assert refusal.reason is RejectReason.INVALID and refusal.field == "token_ids"
    assert "512 tokens" in refusal.message and "at most 511" in refusal.message


def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    """P3.17"""
    bench = Bench(limits_of(num_blocks=8), layout_of(LayoutKind.TP))
    bench.submit("large", list(range(200)))
    bench.submit("small", PROMPT, 3)
    assert refused(bench, "large").message.startswith("a prompt of 200 tokens is larger than the pool of 128 tokens")
    bench.run()
    assert bench.outputs["small"] == answer(PROMPT, 3)


def test_a_request_that_fills_the_pool_alone_ends_with_length() -> None:
    """P3.12"""
    bench = Bench(limits_of(num_blocks=8), layout_of(LayoutKind.TP))
    bench.submit("a", list(range(100)), 500)
    bench.run()
    assert ended(bench, "a") == Finished(RequestId("a"), FinishReason.LENGTH, 28, 0)
    assert bench.outputs["a"] == answer(list(range(100)), 28)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": ()}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 9}, "num_prompt_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"token_ids": (TokenId(1), TokenId(5000), TokenId(2))}, "token_ids"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "sampling.temperature"),
        ({"sampling": SamplingParams(temperature=math.nan)}, "sampling.temperature"),
        ({"sampling": SamplingParams(top_k=2**31)}, "sampling.top_k"),
        ({"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": SamplingParams(top_p=math.nan)}, "sampling.top_p"),
        ({"sampling": SamplingParams(min_p=1.5)}, "sampling.min_p"),
        ({"sampling": SamplingParams(presence_penalty=math.inf)}, "sampling.presence_penalty"),
        ({"sampling": SamplingParams(frequency_penalty=math.nan)}, "sampling.frequency_penalty"),
        ({"sampling": SamplingParams(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
        ({"sampling": SamplingParams(logit_bias=((TokenId(997), 1.0),))}, "sampling.logit_bias"),
        ({"sampling": SamplingParams(logit_bias=((TokenId(1), math.nan),))}, "sampling.logit_bias"),
    ],
)
def test_a_field_out_of_range_is_named(changes: dict[str, object], field: str) -> None:
    batcher = Batcher(limits_of(num_vocab=997), layout_of(LayoutKind.TP))
    values: dict[str, object] = {
        "request_id": RequestId("a"),
        "token_ids": (TokenId(1), TokenId(2), TokenId(3)),
        "num_prompt_tokens": 3,
        "max_output_tokens": 1,
        "sampling": SamplingParams(),
    }
    [event] = batcher.submit(Submission(**(values | changes)), 0)  # type: ignore[arg-type]
    assert isinstance(event, Rejected) and event.field == field and event.reason is RejectReason.INVALID


def test_an_open_id_is_refused_without_touching_the_open_request(bench: Bench) -> None:
    """P2.15"""
    bench.submit("a", PROMPT, 4)
    [event] = bench.batcher.submit(bench.batcher._open[RequestId("a")].submission, 0)
    assert isinstance(event, Rejected) and event.field == "request_id"
    bench.run()
    assert bench.outputs["a"] == answer(PROMPT, 4)


def test_the_queue_has_a_bound_and_takes_a_whole_generation_back() -> None:
    limits = limits_of(max_queued_requests=2, max_resident_requests=3)
    bench = Bench(limits, layout_of(LayoutKind.TP))
    for number in range(6):
        bench.submit(f"r{number}", PROMPT, 4)
    assert list(bench.ends) == ["r5"]
    assert refused(bench, "r5").reason is RejectReason.OVERLOADED
    bench.run()
    assert all(bench.outputs[f"r{number}"] == answer(PROMPT, 4) for number in range(5))


def test_lower_priority_numbers_are_admitted_first() -> None:
    bench = Bench(limits_of(max_resident_requests=1), layout_of(LayoutKind.TP))
    for name, priority in (("first", 0), ("late", 1), ("urgent", -1)):
        bench.submit(name, PROMPT, 2, priority=priority)
    bench.run()
    assert list(bench.cached) == ["urgent", "first", "late"]


@BOTH
def test_an_abort_ends_a_request_wherever_it_is(kind: LayoutKind) -> None:
    """P1.4, P2.17: queued, prefilling, decoding, in flight in any microbatch."""
    for num_steps in range(8):
        bench = Bench(limits_of(max_resident_requests=4), layout_of(kind, 4))
        for number in range(6):
            bench.submit(f"r{number}", [number, *PROMPT], 50)
        for _ in range(num_steps):
            bench.issue()
        free_before = bench.batcher.load().free_blocks
        for number in range(6):
            bench.take(bench.batcher.abort(RequestId(f"r{number}")))
            assert bench.batcher.abort(RequestId(f"r{number}")) == []
        assert all(ended(bench, f"r{number}").reason is FinishReason.ABORT for number in range(6))
        assert bench.batcher.load().free_blocks >= free_before
        bench.run()


def test_a_stop_string_ends_the_output_where_the_router_says(bench: Bench) -> None:
    bench.submit("a", PROMPT, 50)
    while len(bench.outputs["a"]) < 6:
        bench.step()
    bench.take(bench.batcher.finish(RequestId("a"), 4))
    assert ended(bench, "a") == Finished(RequestId("a"), FinishReason.STOP, 4, 0)
    assert bench.batcher.finish(RequestId("a"), 4) == []
    bench.run()
    assert len(bench.outputs["a"]) == 6


def test_a_stop_string_cannot_lie_behind_what_was_emitted(bench: Bench) -> None:
    bench.submit("a", PROMPT, 50)
    while len(bench.outputs["a"]) < 2:
        bench.step()
    bench.take(bench.batcher.finish(RequestId("a"), 30))
    assert ended(bench, "a").num_output_tokens == 2


def test_a_resubmission_goes_on_where_it_stood(bench: Bench) -> None:
    whole = answer(PROMPT, 10)
    bench.submit("a", PROMPT, 10, emitted=whole[:6])
    bench.run()
    assert bench.outputs["a"] == whole
    assert ended(bench, "a").num_output_tokens == 10


def test_a_resubmission_that_had_ended_ends_again(bench: Bench) -> None:
    whole = answer(PROMPT, 6)
    bench.submit("length", PROMPT, 6, emitted=whole)
    bench.submit("stop", PROMPT, 10, emitted=whole, stop_token_ids=frozenset({TokenId(whole[-1])}))
    assert ended(bench, "length").reason is FinishReason.LENGTH
    assert ended(bench, "stop").reason is FinishReason.STOP
    assert bench.issue() is None


def test_a_row_that_is_not_finite_fails_alone_and_its_prefix_is_forgotten(bench: Bench) -> None:
    """P4.15"""
    bench.submit("good", PROMPT, 8)
    bench.submit("bad", [7] * 40, 8)
    bench.submit("twin", [7] * 40, 8)
    bad_index = None
    while "bad" not in bench.ends:
        bench.issue()
        sequence, sampled = bench.unreported.popleft()
        plan = bench.plans[sequence]
        bad_index = bad_index if bad_index is not None else bench.indexes("bad")[0]
        rows = [plan.row_request_index[row] for row in plan.sampled_row]
        wrong = frozenset(place for place, index in enumerate(rows) if index == bad_index)
        bench.take(bench.batcher.on_tokens(sequence, SampledTokens(sampled.token_ids, non_finite=wrong)))
        bench.batcher.on_acknowledged(sequence)
    assert ended(bench, "bad").reason is FinishReason.ERROR and "not finite at position 40" in ended(bench, "bad").error
    bench.run()
    assert bench.outputs["good"] == answer(PROMPT, 8)
    assert bench.outputs["twin"] == answer([7] * 40, 8)
    bench.submit("again", [7] * 40, 2)
    bench.run()
    assert bench.cached["again"] == 0


def test_logprobs_travel_with_their_tokens(bench: Bench) -> None:
    bench.submit("a", PROMPT[:4], 1, num_logprobs=1)
    assert bench.issue() is not None
    sequence, sampled = bench.unreported.popleft()
    logprobs = TokenLogprobs(-0.5, ((TokenId(3), -0.5),))
    events = bench.batcher.on_tokens(sequence, SampledTokens(sampled.token_ids, logprobs=((0, logprobs),)))
    assert getattr(events[0], "logprobs", None) == (logprobs,)


def test_results_that_are_not_of_the_log_are_refused(bench: Bench) -> None:
    with pytest.raises(ResultError, match="step 5"):
        bench.batcher.on_tokens(LogIndex(5), SampledTokens(()))
    bench.submit("a", PROMPT[:4], 4)
    bench.issue()
    with pytest.raises(ResultError, match="1 tokens awaited, 2 reported"):
        bench.batcher.on_tokens(LogIndex(1), SampledTokens((TokenId(1), TokenId(2))))
    with pytest.raises(ResultError, match="lacks the tokens of 1 rows"):
        bench.batcher.on_acknowledged(LogIndex(1))


@pytest.mark.parametrize("name", ["chunk_tokens", "max_resident_requests"])
def test_limits_that_contradict_each_other_are_refused(name: str) -> None:
    """P3.15"""
    with pytest.raises(ValueError, match=f"{name} = 65 is above max_batch_tokens = 64"):
        limits_of(**{name: 65})


def test_a_step_stays_within_its_budgets(bench: Bench) -> None:
    for number in range(5):
        bench.submit(f"r{number}", [number, *range(50)], 30)
    bench.run()
    for plan in bench.plans.values():
        assert plan.num_tokens <= 64 and max(plan.row_num_tokens) <= 32
    assert max(plan.num_tokens for plan in bench.plans.values()) == 64


def test_chunks_of_equal_cost_shrink_with_their_position() -> None:
    parity = 100

    def cost(start: int, length: int) -> float:
        return length * (1 + (start + length / 2) / parity)

    assert chunk_length(0, 64, parity) == 64
    lengths = [chunk_length(start, 64, parity) for start in range(0, 4000, 100)]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] < 8
    for start in range(0, 4000, 100):
        length = chunk_length(start, 64, parity)
        assert cost(start, length) <= cost(0, 64) + 1e-6 < cost(start, length + 1)
    assert chunk_length(10**9, 64, parity) == 1


def test_a_chunk_budget_is_spent_once() -> None:
    budget = ChunkBudget(max_tokens=40, chunk_tokens=32)
    assert [budget.take(0, 100), budget.take(0, 5), budget.take(0, 100), budget.take(0, 1)] == [32, 5, 3, 0]


def test_load_counts_what_is_not_acknowledged_and_what_the_queue_will_admit(bench: Bench) -> None:
    bench.submit("a", list(range(100)), 4)
    bench.submit("b", list(range(500, 540)), 4)
    assert bench.batcher.load().uncomputed_prefill_tokens == 140
    bench.issue_all()
    assert bench.batcher.load().uncomputed_prefill_tokens == 140, "issued is not computed"
    bench.report()
    assert bench.batcher.load().uncomputed_prefill_tokens == 140 - 64
    bench.run()
    load = bench.batcher.load()
    assert (load.uncomputed_prefill_tokens, load.decode_rows, load.queued_requests) == (0, 0, 0)
    assert load.free_blocks + load.cached_blocks == 64


def test_the_queue_counts_only_as_far_as_blocks_go() -> None:
    bench = Bench(limits_of(num_blocks=8), layout_of(LayoutKind.TP))
    bench.submit("a", list(range(100)), 4)
    bench.submit("b", list(range(500, 540)), 4)
    assert bench.batcher.load().uncomputed_prefill_tokens == 100
