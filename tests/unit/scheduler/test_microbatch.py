"""How steps follow each other: pipelines kept full in PP, steps issued ahead in TP."""

from itertools import pairwise

import pytest

from services.core.ids import BLOCK_SLOTS, LayoutKind, LogIndex, RequestId
from services.scheduler.batch.microbatch import StepsInFlight
from tests.support.toy_rank import Bench, answer, layout_of, limits_of


def test_pp_has_as_many_steps_in_flight_as_stages_each_in_its_own_microbatch() -> None:
    window = StepsInFlight(layout_of(LayoutKind.PP, 3), steps_ahead=2)
    assert [window.issue(LogIndex(number)) for number in (1, 2, 3)] == [0, 1, 2]
    assert not window.is_open
    window.acknowledge(LogIndex(1))
    assert window.is_open and window.issue(LogIndex(4)) == 0
    window.acknowledge(LogIndex(2))
    window.acknowledge(LogIndex(3))
    assert [window.issue(LogIndex(number)) for number in (5, 6)] == [1, 2], "stages stay in turn"


def test_tp_has_one_batch_and_steps_ahead_of_it() -> None:
    window = StepsInFlight(layout_of(LayoutKind.TP, 3), steps_ahead=2)
    assert [window.issue(LogIndex(number)) for number in (1, 2)] == [0, 0]
    assert not window.is_open and window.num_in_flight == 2
    assert window.decode_share(num_ready=7, num_decoding=9) == 7


def decoding_bench(num_requests: int, num_stages: int) -> Bench:
    """`num_requests` that have all been prefilled, with nothing in flight."""
    bench = Bench(limits_of(num_blocks=256), layout_of(LayoutKind.PP, num_stages))
    for number in range(num_requests):
        bench.submit(f"r{number}", [number, 1, 2], 100)
    while any(len(output) == 0 for output in bench.outputs.values()):
        bench.step()
    while bench.unreported:
        bench.report()
    return bench


@pytest.mark.parametrize("num_requests", [4, 5, 8, 9])
def test_a_burst_is_spread_over_all_stages(num_requests: int) -> None:
    """P1.9"""
    bench = decoding_bench(num_requests, num_stages=4)
    for _ in range(20):
        bench.issue_all()
        in_flight = [bench.plans[sequence] for sequence, _ in bench.unreported]
        assert sorted(plan.microbatch for plan in in_flight) == [0, 1, 2, 3]
        sizes = sorted(len(plan.row_request_index) for plan in in_flight)
        assert sum(sizes) == num_requests and sizes[-1] - sizes[0] <= 1
        bench.report()


def test_a_burst_of_short_prompts_is_spread_before_it_decodes() -> None:
    """P1.9"""
    bench = Bench(limits_of(), layout_of(LayoutKind.PP, 4))
    for number in range(8):
        bench.submit(f"r{number}", [number, 1, 2], 100)
    assert bench.issue_all() == 4
    assert [len(plan.admitted) for plan in bench.plans.values()] == [2, 2, 2, 2]


def test_an_uneven_spread_evens_out() -> None:
    """P1.9: the requests of all microbatches but one end."""
    bench = decoding_bench(8, num_stages=4)
    bench.issue_all()
    crowded = [bench.plans[sequence] for sequence, _ in list(bench.unreported)[:2]]
    stay = {index for plan in crowded for index in plan.row_request_index}
    for number in range(8):
        if bench.indexes(f"r{number}")[0] not in stay:
            bench.take(bench.batcher.abort(RequestId(f"r{number}")))
    for _ in range(4):
        bench.step()
    bench.issue_all()
    assert [len(bench.plans[sequence].row_request_index) for sequence, _ in bench.unreported] == [1, 1, 1, 1]


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    """P1.7: no report comes in, yet four chunks of one prompt are on their way and sample nothing."""
    bench = Bench(limits_of(), layout_of(LayoutKind.PP, 4))
    bench.submit("a", list(range(8 * 32)), 2)
    assert bench.issue_all() == 4
    plans = list(bench.plans.values())
    assert [plan.row_start for plan in plans] == [[0], [32], [64], [96]]
    assert [plan.microbatch for plan in plans] == [0, 1, 2, 3]
    assert all(plan.sampled_row == [] and plan.tokens_through is None for plan in plans)
    bench.run()
    assert bench.outputs["a"] == answer(list(range(8 * 32)), 2)


def test_progress_is_made_on_every_report_while_no_token_comes() -> None:
    """P1.11: a queue of long prompts is computed chunk by chunk, and every step counts."""
    bench = Bench(limits_of(num_blocks=128), layout_of(LayoutKind.PP, 2))
    for number in range(4):
        bench.submit(f"r{number}", [number, *range(400)], 1)
    computed = [bench.batcher.tally.num_computed_tokens]
    while not any(bench.outputs.values()):
        bench.step()
        computed.append(bench.batcher.tally.num_computed_tokens)
    assert len(computed) > 10 and all(before < after for before, after in pairwise(computed))


def test_tp_reads_the_token_of_the_step_before_without_knowing_it() -> None:
    bench = Bench(limits_of(), layout_of(LayoutKind.TP))
    bench.submit("a", [1, 2, 3], 100)
    assert bench.issue_all() == 2, "the second step waits for nothing"
    first, second = bench.plans[1], bench.plans[2]
    assert (first.row_start, first.row_num_tokens, first.sampled_row) == ([0], [3], [0])
    assert (second.row_start, second.row_num_tokens, second.tokens_through) == ([3], [1], 1)
    assert bench.outputs["a"] == []


def test_a_known_token_still_names_the_step_that_ranks_have_it_from() -> None:
    """Ranks know a sampled token from its step, not from the scheduler."""
    bench = Bench(limits_of(), layout_of(LayoutKind.PP, 2))
    bench.submit("a", [1, 2, 3], 100)
    bench.step()
    plan = bench.issue()
    assert plan is not None and plan.tokens_through == 1


def test_pp_waits_for_the_token_and_not_for_the_window() -> None:
    bench = Bench(limits_of(), layout_of(LayoutKind.PP, 2))
    bench.submit("a", [1, 2, 3], 100)
    assert bench.issue_all() == 1, "its second step would only wait in the first stage"


def test_a_place_is_released_before_it_is_taken_again() -> None:
    bench = Bench(limits_of(max_resident_requests=1), layout_of(LayoutKind.TP))
    bench.submit("a", [1, 2, 3], 1)
    bench.submit("b", [4, 5, 6], 1)
    bench.run()
    assert bench.plans[2].released == [0] and bench.indexes("b") == [0]
    assert bench.issue() is None, "a release alone is no step"


def test_ranks_never_keep_more_unread_steps_than_are_in_flight() -> None:
    """Requests of one token read nothing that was sampled; what is committed is applied all the same."""
    bench = Bench(limits_of(), layout_of(LayoutKind.TP))
    for number in range(100):
        bench.submit(f"r{number}", [number, 1, 2], 1)
        bench.step()
        assert len({sequence for sequence, *_ in bench.rank.board}) <= 2


@pytest.mark.parametrize("kind", list(LayoutKind))
def test_what_is_in_flight_beside_decoding_requests_is_one_batch(kind: LayoutKind) -> None:
    """A decoding request waits for all of it: that is its token gap."""
    bench = Bench(limits_of(num_blocks=256, max_batch_tokens=64, chunk_tokens=64), layout_of(kind, 2))
    bench.submit("decodes", [1, 2, 3], 40)
    while not bench.outputs["decodes"]:
        bench.step()
    for number in range(4):
        bench.submit(f"long{number}", [number] * 120, 2)
    seen = 0
    for _ in range(12):
        bench.issue_all()
        plans = [bench.plans[sequence] for sequence, _ in bench.unreported]
        assert sum(plan.num_tokens for plan in plans) <= 64
        seen = max(seen, *(plan.num_tokens for plan in plans))
        bench.report()
    assert seen > BLOCK_SLOTS


def test_prompts_do_not_starve_beside_many_rows() -> None:
    bench = Bench(limits_of(num_blocks=512, max_batch_tokens=64, chunk_tokens=64), layout_of(LayoutKind.TP))
    for number in range(40):
        bench.submit(f"r{number}", [number, 1, 2], 200)
    while any(len(output) == 0 for output in bench.outputs.values()):
        bench.step()
    bench.submit("late", [7] * 50, 2)
    for _ in range(8):
        bench.step()
    assert bench.outputs["late"]
