"""The carriers' scenarios over NCCL, one device for each rank: exact results, named failures, never a hang."""

from collections.abc import Iterator

import pytest
import torch

from tests.mesh.support.carrier_pool import NAMED_WITHIN_S, RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("scenario", ["sums", "columns", "parts", "mixed", "channel_depth", "tokens"])
def test_results_are_exact_under_random_delays(pool: RankPool, scenario: str) -> None:
    for answer in pool.run("nccl", 2, scenario):
        assert answer is not None, "a rank died: its traceback is above"
        assert "status" not in answer, answer["message"]


@pytest.mark.parametrize(("scenario", "wait"), [("wrong_tag", "SAME_TAG"), ("wrong_size", "SAME_BYTES")])
def test_a_message_that_is_not_the_expected_one_is_refused(pool: RankPool, scenario: str, wait: str) -> None:
    answer = pool.run("nccl", 2, scenario, ragged=True)[1]
    assert (answer["status"], answer["wait"]) == ("MISMATCH", wait)


# Not die_in_gather: what a rank only gives may be with NCCL, on its device, before anybody is there to take it.
@pytest.mark.parametrize("scenario", ["die_in_sum", "die_before_send", "die_before_recv"])
def test_a_killed_peer_ends_in_a_named_failure(pool: RankPool, scenario: str) -> None:
    answers = pool.run("nccl", 2, scenario, ragged=True)
    assert answers[1] is None
    assert answers[0]["status"] in {"LOST", "DATA_TIMEOUT", "ACK_TIMEOUT", "ABORTED"}, answers[0]
    assert answers[0]["elapsed_s"] < NAMED_WITHIN_S + 10.0, "its communicators are made within this time as well"


def test_an_abort_releases_sleeping_waiters(pool: RankPool) -> None:
    first, other = pool.run("nccl", 2, "abort", ragged=True)
    assert other["status"] == "ABORTED" and "STEP_FAILED" in other["message"]
    assert 0 <= other["released_at"] - first["aborted_at"] < 0.5
