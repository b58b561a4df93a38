"""Measures what a flip's work takes where bytes move, against the floor that the link sets.

`python -m tools.bench.flips [--model PATH] [--ranks 2 3] [--modes dual exchange image] [--pools resident exclusive]`.
Processes are real, the carrier is shared memory, no scheduler is there: the time is that of the slowest rank from the
call to its answer. The link's rate is measured in the same processes: the same messages, from memory to memory, sent
and taken by the same partners at once, and nothing done with them. Floor: the bytes that the rank which receives most
has to receive, at that rate; what a rank keeps and copies from one of its pools to the other, or from an image to its
arena, is not in it.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from services.core.ids import BlockId, FlipId, LayoutKind
from services.core.step import CommitEntry, FlipEntry
from services.models.model_files import resolve_model
from services.placement.ledger import PoolBacking
from services.placement.pair_order import Turn, partners, turns
from services.placement.staging import MAX_CHUNK_BYTES
from services.worker.memory.owned_memory import OwnedMode
from services.worker.memory.wire import MoveBounds, Wire
from services.worker.participation import Worked
from services.worker.steps.execute import Runner
from services.worker.steps.stages import RunnerLimits
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import GroupSpec, RankCall, RankProcess, rank_processes

LIMITS = RunnerLimits(max_resident_requests=16, max_batch_tokens=512, num_valid_ids=49_152)
CONTEXT_TOKENS = 4096
NUM_PROBE_MESSAGES = 64
"""To each partner and from it."""
MIB, MS = 2**20, 1e6


@dataclass(frozen=True, slots=True)
class WorkTime:
    """One rank's part of one flip."""

    work_ns: int
    answer: Worked


def probe_link(runner: Runner) -> float:
    """Exchanges messages with every partner; bytes received in a second."""
    wire = Wire(runner.parts.carrier, MoveBounds(MAX_CHUNK_BYTES))
    # From memory to memory, as rows and pages are: one buffer used again would stay in a cache.
    out, into = (torch.ones((NUM_PROBE_MESSAGES, MAX_CHUNK_BYTES), dtype=torch.uint8) for _ in range(2))
    wire.gathered([0])
    began_ns = time.perf_counter_ns()
    for peer in partners(wire.rank, wire.num_ranks):
        for turn, index in turns(NUM_PROBE_MESSAGES, NUM_PROBE_MESSAGES):
            if turn is Turn.SEND:
                wire.send(out[index], peer, index)
            else:
                wire.take(into[index], peer, index)
    elapsed_ns = time.perf_counter_ns() - began_ns
    return (wire.num_ranks - 1) * NUM_PROBE_MESSAGES * MAX_CHUNK_BYTES / elapsed_ns * 1e9


def work(runner: Runner, flip_id: FlipId) -> WorkTime:
    """Does a rank's part of the flip that it is parked for."""
    began_ns = time.perf_counter_ns()
    answer = runner.work(flip_id)
    elapsed_ns = time.perf_counter_ns() - began_ns
    assert isinstance(answer, Worked), answer
    return WorkTime(elapsed_ns, answer)


def everywhere(ranks: Sequence[RankProcess], call: RankCall) -> list[object]:
    """One call on all ranks; answers by rank."""
    for rank in ranks:
        rank.submit(call)
    return [rank.result() for rank in ranks]


def link_rate(ranks: Sequence[RankProcess]) -> float:
    """Bytes that a rank receives in a second while all are at it; the median of several."""
    rates: list[float] = []
    for _ in range(5):
        rates.append(min(rate for rate in everywhere(ranks, RankCall(probe_link)) if isinstance(rate, float)))
    return statistics.median(rates)


def flips(ranks: Sequence[RankProcess], num_blocks: int, num_flips: int) -> Iterator[tuple[LayoutKind, list[WorkTime]]]:
    """Flips to and fro with every block live; yields targets and all ranks' work."""
    log = LogDriver(ranks)
    log.reset(LayoutKind.PP, num_blocks, LIMITS.max_resident_requests, CONTEXT_TOKENS)
    for number in range(1, num_flips + 1):
        target = LayoutKind.TP if number % 2 else LayoutKind.PP
        flip_id = FlipId(number)
        log.write(FlipEntry(flip_id, target, ((BlockId(0), num_blocks),)))
        log.answers()
        done = [answer for answer in everywhere(ranks, RankCall(work, (flip_id,))) if isinstance(answer, WorkTime)]
        log.write(CommitEntry(flip_id, target))
        log.answers()
        log.epoch += 1
        yield target, done


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    model: Path
    mode: OwnedMode
    backing: PoolBacking
    num_ranks: int
    num_blocks: int
    num_flips: int


def measure(case: Case) -> Iterator[str]:
    """Yields one line of the table for each direction."""
    spec = GroupSpec(case.model, case.num_ranks, LIMITS, mode=case.mode, backing=case.backing)
    with rank_processes(spec) as ranks:
        rate = link_rate(ranks)
        found: dict[LayoutKind, list[list[WorkTime]]] = {kind: [] for kind in LayoutKind}
        for target, done in flips(ranks, case.num_blocks, case.num_flips + 2):
            found[target].append(done)
    for target, attempts in found.items():
        # The first flip each way touches its pool's pages for the first time.
        times = [max(work.work_ns for work in done) / MS for done in attempts[1:]]
        received = [work.answer.bytes_moved for work in attempts[-1]]
        floor = max(received) / rate * 1e9 / MS
        slowest = max(attempts[-1], key=lambda work: work.work_ns).answer
        parts = (slowest.read_ns, slowest.seam_ns, slowest.write_ns, slowest.verify_ns)
        yield (
            f"| {case.mode} | {case.backing.value} | {case.num_ranks} | {target.value} | {sum(received) / MIB:.1f} "
            f"| {max(received) / MIB:.1f} | {rate / 1e9:.2f} | {floor:.1f} | {statistics.median(times):.1f} "
            f"| {min(times):.1f} to {max(times):.1f} | {statistics.median(times) / floor:.2f} "
            f"| {', '.join(f'{part / MS:.1f}' for part in parts)} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--modes", nargs="+", default=get_args(OwnedMode), choices=get_args(OwnedMode))
    backings = [backing.value for backing in PoolBacking]
    parser.add_argument("--pools", nargs="+", default=backings, choices=backings)
    parser.add_argument("--blocks", type=int, default=256, help="live blocks, and blocks of the pool")
    parser.add_argument("--flips", type=int, default=20)
    options = parser.parse_args()
    print(
        "| mode | pools | ranks | to | MiB in all | MiB of one | link GB/s | floor ms | ms | spread | x floor "
        "| read, seam, write, verify ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    model = resolve_model(options.model)
    for mode, pools, num_ranks in product(options.modes, options.pools, options.ranks):
        case = Case(model, mode, PoolBacking(pools), num_ranks, options.blocks, options.flips)
        for line in measure(case):
            print(line, flush=True)


if __name__ == "__main__":
    main()
