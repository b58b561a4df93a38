"""Parity, byte oracle and answers across flips on two GPUs over NCCL, one process a rank.

`python -m tests.gpu.two_gpus`, against a control of one CPU rank over the C kernels that never flips. For every mode
and cut: logits of every step, greedy answers across flips both ways, the bits of all live rows PP to TP to PP, one byte
that is changed in flight, and what the flips' work took. Then meshes of real processes (mesh_part). Prints one table;
exits 1 on any failure, and every wait has a deadline. `--rehearse` runs the same without a GPU: torch's kernels over
host memory, gloo for NCCL, a tiny model.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.core.ids import BlockId, FlipId, LayoutKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry
from services.placement.ledger import PoolBacking
from services.worker.memory.owned_memory import OwnedMode
from services.worker.participation import Worked, WorkLost
from services.worker.steps.stages import RunnerLimits
from tests.gpu import rank_calls
from tests.gpu.mesh_part import MeshFindings, mesh_findings
from tests.support.tiny_llama import TinyShape, write_safetensors
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import GroupSpec, RankCall, RankProcess, rank_processes

PP, TP = LayoutKind.PP, LayoutKind.TP
BOUND = 2e-5
"""Relative error of a row of logits against the control's."""
NUM_BLOCKS, NUM_STEPS, NUM_TIMED = 96, 6, 4
SEED, MS = 11, 1e6
SMOLLM = TinyShape(30, 9, 3, 64, 576, 1536, 49_152, 2048, 100_000.0, 1e-5, tied=True)
TINY = TinyShape(num_layers=4)


@dataclass(frozen=True, slots=True)
class Case:
    """How two ranks keep and cut the model."""

    mode: OwnedMode
    name: str
    pp_layers: tuple[int, int] | None = None
    tp_weights: tuple[float, float] | None = None
    kv_tokens: tuple[int, int] | None = None
    backing: PoolBacking = PoolBacking.RESIDENT


CASES = (
    Case("dual", "even"),
    Case("dual", "uneven", (1, 2), (1.0, 2.0)),
    Case("exchange", "even"),
    Case("exchange", "uneven", (2, 1), (1.0, 2.0)),
    Case("exchange", "by tokens 1:2", kv_tokens=(1, 2)),
    Case("image", "uneven", (1, 2), (2.0, 1.0)),
    Case("exchange", "pools in turns", (1, 2), (2.0, 1.0), backing=PoolBacking.EXCLUSIVE),
)
"""`pp_layers` in thirds of the model's layers, the rest to the second rank."""


@dataclass(slots=True)
class Findings:
    """What one case showed; `failures` empty: all of it held."""

    case: str
    failures: list[str] = field(default_factory=list)
    worst_logits: float = 0.0
    num_tokens: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    work_ms: dict[str, list[float]] = field(default_factory=lambda: {"pp": [], "tp": []})
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Control:
    """What one CPU rank says that never flips: ids of each request and the logits that each was drawn from."""

    prompts: dict[int, list[int]]
    requests: dict[int, list[int]]
    logits: list[Any]


def spec_of(model: Path, shape: TinyShape, case: Case, place: Any) -> GroupSpec:
    limits = RunnerLimits(8, 256, shape.vocab_size)
    pp_layers = None
    if case.pp_layers is not None:
        first = max(1, shape.num_layers * case.pp_layers[0] // 3)
        pp_layers = (first, shape.num_layers - first)
    observer, tokens = rank_calls.LogitsLog, case.kv_tokens
    return GroupSpec(model, 2, limits, pp_layers, case.tp_weights, observer, tokens, case.mode, place, case.backing)


def logits_seen(ranks: Sequence[RankProcess]) -> list[Any]:
    return [step for rank in ranks for step in rank.observed()]


def control_of(model: Path, shape: TinyShape) -> Control:
    """The whole run without a flip; C kernels, host memory."""
    rng = np.random.default_rng(SEED)
    prompts = {index: rng.integers(0, shape.vocab_size, length).tolist() for index, length in ((0, 75), (1, 21))}
    limits = RunnerLimits(8, 256, shape.vocab_size)
    with rank_processes(GroupSpec(model, 1, limits, observer=rank_calls.LogitsLog)) as ranks:
        log = LogDriver(ranks)
        log.reset(PP, NUM_BLOCKS, 8, 256)
        log.prefill(prompts, 32)
        log.decode([0, 1], 4 * NUM_STEPS)
        return Control(prompts, {index: list(ids) for index, ids in log.requests.items()}, logits_seen(ranks))


def everywhere(ranks: Sequence[RankProcess], call: RankCall) -> list[Any]:
    for rank in ranks:
        rank.submit(call)
    return [rank.result() for rank in ranks]


def flip(
    log: LogDriver, ranks: Sequence[RankProcess], target: LayoutKind, live: rank_calls.Runs
) -> list[rank_calls.Work]:
    """One attempt, with its outcome in the log: committed if every rank did its work."""
    flip_id = FlipId(log.sequence + 1)
    log.write(FlipEntry(flip_id, target, tuple((BlockId(begin), length) for begin, length in live)))
    log.answers()
    works: list[rank_calls.Work] = everywhere(ranks, RankCall(rank_calls.work, (flip_id,)))
    is_committed = all(isinstance(found.answer, Worked) for found in works)
    log.write(CommitEntry(flip_id, target) if is_committed else AbandonEntry(flip_id, "work lost"))
    log.answers()
    log.epoch += is_committed
    return works


def held(log: LogDriver) -> rank_calls.Runs:
    """What the driver's requests hold: it takes blocks from the end of the pool."""
    return ((NUM_BLOCKS - log.num_blocks_used, log.num_blocks_used),)


def committed(found: Findings, works: list[rank_calls.Work], target: LayoutKind, *, is_timed: bool = True) -> None:
    for rank, each in enumerate(works):
        if not isinstance(each.answer, Worked):
            found.failures.append(f"flip to {target.value}: rank {rank}: {each.answer.reason}")
            return
    if is_timed:
        found.work_ms[target.value].append(max(each.work_ns for each in works) / MS)


def answers_hold(found: Findings, ranks: Sequence[RankProcess], control: Control) -> None:
    """Prompts in PP, tokens in TP, PP and TP: ids and logits are the control's at every step."""
    log = LogDriver(ranks)
    log.reset(PP, NUM_BLOCKS, 8, 256)
    log.prefill(control.prompts, 32)
    log.decode([0, 1], NUM_STEPS)
    for target in (TP, PP, TP):
        for rank in ranks:
            rank.submit(RankCall(rank_calls.poison_rows, (target,)))
            rank.result()
        works = flip(log, ranks, target, held(log))
        committed(found, works, target)
        found.bytes_moved.setdefault(target.value, sum(getattr(each.answer, "bytes_moved", 0) for each in works))
        log.decode([0, 1], NUM_STEPS)
    seen = logits_seen(ranks)
    for index, ids in control.requests.items():
        if log.requests[index] != ids:
            first = next(
                place for place, pair in enumerate(zip(ids, log.requests[index], strict=True)) if len({*pair}) > 1
            )
            found.failures.append(f"answer {index} differs from the control's at token {first}")
        found.num_tokens += len(ids) - len(control.prompts[index])
    for step, (own, wanted) in enumerate(zip(seen, control.logits, strict=True)):
        error = np.linalg.norm(own.astype(np.float64) - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        found.worst_logits = max(found.worst_logits, float(error.max()))
        if not error.max() < BOUND:
            found.failures.append(f"logits of step {step} are off by {error.max():.2g}")
            break


def rows_hold(found: Findings, ranks: Sequence[RankProcess]) -> None:
    """Every live row keeps its bits, PP to TP to PP, and no other row is written."""
    log = LogDriver(ranks)
    log.sequence, log.epoch = _continued(ranks)
    for seed, live in enumerate((((0, NUM_BLOCKS),), ((0, 1), (3, 5), (40, 17), (NUM_BLOCKS - 1, 1)), ())):
        everywhere(ranks, RankCall(rank_calls.fill_rows, (TP, seed)))
        for target in (PP, TP):
            everywhere(ranks, RankCall(rank_calls.poison_rows, (target,)))
            committed(found, flip(log, ranks, target, live), target, is_timed=False)
            found.failures += filter(None, everywhere(ranks, RankCall(rank_calls.rows_are_right, (target, seed, live))))
    for _ in range(NUM_TIMED):
        for target in (PP, TP):
            committed(found, flip(log, ranks, target, ((0, NUM_BLOCKS),)), target)


def _continued(ranks: Sequence[RankProcess]) -> tuple[int, int]:
    """Where the log stands that these ranks follow."""
    ((sequence, epoch), *_) = everywhere(ranks, RankCall(rank_calls.log_place))
    return sequence, epoch


def changed_byte_is_caught(found: Findings, ranks: Sequence[RankProcess]) -> None:
    """The rank that was given it says so, nobody has lost the layout before, and the next attempt commits."""
    log = LogDriver(ranks)
    log.sequence, log.epoch = _continued(ranks)
    everywhere(ranks, RankCall(rank_calls.fill_rows, (TP, SEED)))
    ranks[1].submit(RankCall(rank_calls.change_one_byte, (1,)))
    ranks[1].result()
    works = flip(log, ranks, PP, ((0, NUM_BLOCKS),))
    victim = works[1].answer
    if not isinstance(victim, WorkLost) or "are not what was sent" not in victim.reason:
        found.failures.append(f"a byte changed in flight was not caught: {victim}")
    if any(isinstance(each.answer, WorkLost) and not each.answer.restored for each in works):
        found.failures.append(f"the layout before is lost: {[each.answer for each in works]}")
    everywhere(ranks, RankCall(rank_calls.poison_rows, (PP,)))
    committed(found, flip(log, ranks, PP, ((0, NUM_BLOCKS),)), PP, is_timed=False)
    wrong = everywhere(ranks, RankCall(rank_calls.rows_are_right, (PP, SEED, ((0, NUM_BLOCKS),))))
    found.failures += filter(None, wrong)


def run_case(model: Path, shape: TinyShape, case: Case, control: Control, place: Any) -> Findings:
    found, began_s = Findings(f"{case.mode}, {case.name}"), time.monotonic()
    try:
        with rank_processes(spec_of(model, shape, case, place)) as ranks:
            answers_hold(found, ranks, control)
            rows_hold(found, ranks)
            changed_byte_is_caught(found, ranks)
    except Exception as error:  # a case that breaks is a row of the table
        found.failures.append(f"{type(error).__name__}: {error}")
    found.seconds = time.monotonic() - began_s
    return found


HEADER = ("case", "verdict", "tokens", "logits off by", "MB to tp", "MB to pp", "work to tp ms", "work to pp ms", "s")


def row_of(found: Findings) -> tuple[str, ...]:
    moved = [f"{found.bytes_moved[kind] / 1e6:.1f}" if kind in found.bytes_moved else "-" for kind in ("tp", "pp")]
    times = [
        f"{statistics.median(ms):.1f}, max {max(ms):.1f}" if (ms := found.work_ms[kind]) else "-"
        for kind in ("tp", "pp")
    ]
    verdict = "holds" if not found.failures else "FAILS"
    off = f"{found.worst_logits:.1e}" if found.worst_logits else "-"
    return (found.case, verdict, str(found.num_tokens), off, *moved, *times, f"{found.seconds:.0f}")


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields lines of Markdown."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, tuple("-" * width for width in widths), *rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def from_mesh(mesh: MeshFindings) -> Findings:
    return Findings(mesh.name, mesh.failures, 0.0, mesh.num_tokens, mesh.bytes_moved, mesh.work_ms, mesh.seconds)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="no GPU: torch's kernels over host memory, gloo, tiny")
    parser.add_argument("--cases", nargs="*", help="parts of names; all by default")
    parser.add_argument("--at-once", type=int, default=1, help="cases that run beside each other, on the same GPUs")
    parser.add_argument("--no-mesh", action="store_true", help="without the mesh of real processes")
    arguments = parser.parse_args()
    # Ranks that end take their store with them, which those that have not ended yet complain about.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    shape = TINY if arguments.rehearse else SMOLLM
    found: list[Findings] = []
    with tempfile.TemporaryDirectory(prefix="two-gpus-") as folder:
        model = Path(folder) / "model"
        write_safetensors(model, shape, torch.bfloat16, SEED)
        control = control_of(model, shape)
        place = rank_calls.as_on_cuda if arguments.rehearse else rank_calls.on_cuda
        chosen = [
            case
            for case in CASES
            if arguments.cases is None or any(part in f"{case.mode}, {case.name}" for part in arguments.cases)
        ]
        with ThreadPoolExecutor(arguments.at_once) as pool:
            for each in pool.map(lambda case: run_case(model, shape, case, control, place), chosen):
                found.append(each)
                say(f"{each.case}: {each.failures or 'holds'} ({each.seconds:.0f} s)")
        if not arguments.no_mesh:
            for mesh in asyncio.run(
                mesh_findings(Path(folder), model, shape.num_layers, control.prompts, rehearse=arguments.rehearse)
            ):
                found.append(from_mesh(mesh))
    say("\n".join(table([row_of(each) for each in found])))
    for each in found:
        for failure in each.failures:
            say(f"{each.case}: {failure}")
    return 1 if not found or any(each.failures for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
