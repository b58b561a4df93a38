"""Both carriers on real processes: the same scenarios, exact results, named failures, never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.mesh.support.carrier_pool import NAMED_WITHIN_S, RankPool

CARRIERS = ("shm", "gloo", "device")


def some_slow(*quick: tuple[str, int]) -> list[Any]:
    """Every carrier with two and three ranks; a deadline takes as long as it is, so all but these are slow."""
    every = [(carrier, num_ranks) for carrier in CARRIERS for num_ranks in (2, 3)]
    return [pytest.param(*one, marks=[pytest.mark.slow] * (one not in quick)) for one in every]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("scenario", ["sums", "columns", "parts", "mixed", "channel_depth", "tokens"])
def test_results_are_exact_under_random_delays(pool: RankPool, carrier: str, num_ranks: int, scenario: str) -> None:
    for answer in pool.run(carrier, num_ranks, scenario):
        assert answer is not None, "a rank died: its traceback is above"
        assert "status" not in answer, answer["message"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(2, 7))
def test_shared_memory_holds_over_many_drawn_programs(pool: RankPool, num_ranks: int, seed: int) -> None:
    for answer in pool.run("shm", num_ranks, "mixed", seed=seed):
        assert answer is not None
        assert "status" not in answer, answer["message"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shared_memory_sums_in_rank_order_to_the_same_bits(pool: RankPool, num_ranks: int) -> None:
    digests = {answer["digest"] for answer in pool.run("shm", num_ranks, "bits")}
    assert len(digests) == 1


@pytest.mark.parametrize(("carrier", "num_ranks"), some_slow(("shm", 2), ("gloo", 3)))
@pytest.mark.parametrize("scenario", ["die_in_sum", "die_before_send", "die_before_recv", "die_in_gather"])
def test_a_killed_peer_ends_in_a_named_failure(pool: RankPool, carrier: str, num_ranks: int, scenario: str) -> None:
    answers = pool.run(carrier, num_ranks, scenario, ragged=True)
    assert answers[1] is None
    for rank in {0, num_ranks - 1} - {1}:
        answer = answers[rank]
        allowed = {"DATA_TIMEOUT", "ACK_TIMEOUT"} if carrier == "shm" else {"LOST", "DATA_TIMEOUT", "ABORTED"}
        assert answer["status"] in allowed, answer
        assert answer["elapsed_s"] < NAMED_WITHIN_S
        assert answer["status"] in answer["message"] and answer["operation"] in answer["message"]
    if carrier == "shm" and num_ranks == 2:
        acknowledgement = scenario in ("die_before_recv", "die_in_gather")
        assert answers[0]["status"] == ("ACK_TIMEOUT" if acknowledgement else "DATA_TIMEOUT")
        assert answers[0]["peer"] == 1
        assert answers[0]["waited"] > answers[0]["seen"] or scenario == "die_before_recv"


@pytest.mark.parametrize(("carrier", "num_ranks"), some_slow(("shm", 3), ("gloo", 2)))
def test_tokens_that_never_come_are_a_named_deadline(pool: RankPool, carrier: str, num_ranks: int) -> None:
    answers = pool.run(carrier, num_ranks, "no_tokens", ragged=True)
    for answer in answers[:-1]:
        assert (answer["status"], answer["operation"]) == ("DATA_TIMEOUT", "READ")
        assert answer["elapsed_s"] < NAMED_WITHIN_S


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("scenario", "wait"), [("wrong_tag", "SAME_TAG"), ("wrong_size", "SAME_BYTES")])
def test_a_message_that_is_not_the_expected_one_is_refused(
    pool: RankPool, carrier: str, scenario: str, wait: str
) -> None:
    answer = pool.run(carrier, 2, scenario, ragged=True)[1]
    assert (answer["status"], answer["wait"]) == ("MISMATCH", wait)
    assert answer["waited"] != answer["seen"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_step_the_board_no_longer_holds_is_a_fault(pool: RankPool, carrier: str) -> None:
    for answer in pool.run(carrier, 3, "overwritten", ragged=True)[:-1]:
        assert answer["status"] == "OVERWRITTEN"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_abort_releases_sleeping_waiters(pool: RankPool, carrier: str, num_ranks: int) -> None:
    first, *others = pool.run(carrier, num_ranks, "abort", ragged=True)
    for other in others:
        assert other["status"] == "ABORTED"
        assert "STEP_FAILED" in other["message"]
        assert other["released_at"] >= first["aborted_at"]
