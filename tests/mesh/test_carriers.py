"""Both carriers on real processes: the same scenarios, exact results, named failures, never a hang."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.collectives import RegionShape, ShmRegion

ROOT = Path(__file__).parents[2]
CARRIERS = ("shm", "gloo", "device")
MAX_RANKS = 3
# The scenarios' own deadline is 1 s; gloo's lane is given two more.
NAMED_WITHIN_S = 4.0


class RankPool:
    """Rank processes that outlive a scenario, since importing torch is most of a test's time."""

    def __init__(self) -> None:
        shapes = [RegionShape(n, max_message_bytes=512 * 576 * 4, max_rows=64, num_board_steps=8) for n in (2, 3)]
        self.regions = {shape.num_ranks: ShmRegion.create(shape) for shape in shapes}
        self._processes = [self._start(rank) for rank in range(MAX_RANKS)]
        self._starting = set(range(MAX_RANKS))

    def run(self, carrier: str, num_ranks: int, scenario: str, *, seed: int = 1, ragged: bool = False) -> list[Any]:
        """Returns each rank's answer; None from one that died."""
        self.regions[num_ranks].reset()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        order = {
            "carrier": carrier,
            "num_ranks": num_ranks,
            "scenario": scenario,
            "seed": seed,
            "fd": self.regions[num_ranks].fd,
            "port": port,
            "leaves_ragged": ragged,
        }
        for rank in self._starting & set(range(num_ranks)):
            assert self._line(rank) == "ready\n"
            self._starting.discard(rank)
        for rank in range(num_ranks):
            stdin = self._processes[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        return [self._answer(rank) for rank in range(num_ranks)]

    def close(self) -> None:
        for process in self._processes:
            self._stop(process)
        for region in self.regions.values():
            region.close()

    def _answer(self, rank: int) -> Any:
        line = self._line(rank)
        if line:
            return json.loads(line)
        self._stop(self._processes[rank])
        self._processes[rank] = self._start(rank)
        self._starting.add(rank)
        return None

    def _line(self, rank: int) -> str:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        return stdout.readline()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mesh.support.carrier_rank", str(rank)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[region.fd for region in self.regions.values()],
        )

    def _stop(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


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


@pytest.mark.parametrize(("carrier", "num_ranks"), some_slow(("shm", 2), ("gloo", 3), ("device", 2)))
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


@pytest.mark.parametrize(("carrier", "num_ranks"), some_slow(("shm", 3), ("gloo", 2), ("device", 3)))
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
        assert 0 <= other["released_at"] - first["aborted_at"] < 0.5
