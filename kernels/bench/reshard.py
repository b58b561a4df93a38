"""Measures checksums, packing, scattering and merging on one thread: `python -m kernels.bench.reshard`.

Rates are payload bytes a second of the thread's processor time, medians, set against what torch reads (a sum) and
copies in the same run; a copy's rate, too, counts each byte once. Planes are more memory than the caches hold and
blocks are taken at random, as a flip finds them. A device given by `--device` runs the same calls there.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.attention import merge_partials
from kernels.cpu.checksum import checksum
from kernels.cpu.reshard import Planes, Runs, pack, pack_and_sum, packed_bytes, scatter
from services.core.layout import Span

MEMORY_BYTES = 256 << 20
NUM_REPEATS = 7
LIVE_SHARE = 0.75


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def bytes_per_ns(num_bytes: int, work: Callable[[], object], device: torch.device) -> float:
    """The median rate of NUM_REPEATS runs after one to warm up; wall time on a device, which is waited for."""

    def now_ns() -> int:
        if device.type == "cpu":
            return time.thread_time_ns()
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    work()
    taken = []
    for _ in range(NUM_REPEATS):
        begin = now_ns()
        work()
        taken.append(now_ns() - begin)
    return num_bytes / max(statistics.median(taken), 1)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this machine's memory, in bytes a nanosecond."""

    read: float
    copied: float

    @classmethod
    def measured(cls, device: torch.device) -> "Rates":
        """One thread's, or the device's."""
        source = torch.randint(2**62, (MEMORY_BYTES // 8,), dtype=torch.int64).to(device)
        target = torch.empty_like(source)
        return cls(
            bytes_per_ns(MEMORY_BYTES, source.sum, device),
            bytes_per_ns(MEMORY_BYTES, lambda: target.copy_(source), device),
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Planes of one pool and the heads of it that move."""

    label: str
    num_planes: int
    num_blocks: int
    num_heads: int
    head_dim: int
    heads: Span

    def planes(self, device: torch.device) -> Planes:
        """With memory behind every page."""
        shape = (self.num_blocks, self.num_heads, 16, self.head_dim)
        return Planes.of([torch.randn(shape).to(device) for _ in range(self.num_planes)])


GEOMETRIES = (
    Geometry("60 planes, 3 of 3 heads of 64", 60, 256, 3, 64, Span(0, 3)),
    Geometry("60 planes, 1 of 3 heads of 64", 60, 256, 3, 64, Span(1, 2)),
    Geometry("16 planes, 4 of 8 heads of 128", 16, 256, 8, 128, Span(4, 8)),
    Geometry("6 planes, 1 of 3 heads of 64", 6, 256, 3, 64, Span(1, 2)),
)


def bench_rows(geometry: Geometry, rates: Rates, device: torch.device) -> None:
    """Blocks and single slots, both ways, without and with the checksum."""
    planes, heads = geometry.planes(device), geometry.heads
    draw = random.Random(0)
    blocks = sorted(draw.sample(range(geometry.num_blocks), int(LIVE_SHARE * geometry.num_blocks)))
    for unit, runs in (
        ("blocks", Runs.of_blocks((block, 1) for block in blocks)),
        ("every 4th slot", Runs.of_slots((slot, 1) for slot in range(0, geometry.num_blocks * 16, 4))),
    ):
        num_bytes = packed_bytes(planes, heads, runs)
        staging = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        cells = []
        for move in (pack, pack_and_sum, scatter):
            rate = bytes_per_ns(num_bytes, partial(move, planes, heads, runs, staging), device)
            cells.append(f"{rate:8.1f} {rate / rates.copied:5.2f}")
        _say(f"{geometry.label:32}{unit:16}{num_bytes / 1e6:7.1f} MB" + "".join(cells))


def bench_checksum(rates: Rates, device: torch.device) -> None:
    """Over more than the caches hold, and over one MiB that they do."""
    whole = torch.randint(2**62, (MEMORY_BYTES // 8,), dtype=torch.int64).to(device)
    rate = bytes_per_ns(MEMORY_BYTES, lambda: checksum(whole), device)
    small = whole[: (1 << 20) // 8]
    cached = bytes_per_ns(20 << 20, partial(_repeat, partial(checksum, small), 20), device)
    _say(f"checksum {rate:.1f} GB/s, {rate / rates.read:.2f} of reading; one MiB again and again {cached:.1f} GB/s")


def _repeat(work: Callable[[], object], num_times: int) -> None:
    for _ in range(num_times):
        work()


def bench_merge(device: torch.device) -> None:
    """Parts of 9 heads of 64, per call."""
    if device.type != "cpu":
        return
    for num_parts, num_tokens in ((2, 1), (3, 8), (3, 512)):
        parts, lse = torch.randn(num_parts, num_tokens, 9, 64), torch.randn(num_parts, num_tokens, 9)
        out = torch.empty(num_tokens, 9, 64)
        merge = partial(merge_partials, parts, lse, out)
        num_calls = 2_000 // num_tokens + 1
        calls_per_ns = bytes_per_ns(num_calls, partial(_repeat, merge, num_calls), device)
        _say(f"merge of {num_parts} parts of {num_tokens} tokens: {1e-3 / calls_per_ns:.1f} us")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.reshard", description="measure bytes that move")
    parser.add_argument("--device", default="cpu", help="where the planes lie: cpu or cuda")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    rates = Rates.measured(device)
    _say(f"memory: read at {rates.read:.1f} GB/s, copied at {rates.copied:.1f} GB/s")
    bench_checksum(rates, device)
    titles = "".join(f"{title:>14}" for title in ("pack", "with sum", "scatter"))
    _say(f"{'GB/s, and over copying':58}{titles}")
    for geometry in GEOMETRIES:
        bench_rows(geometry, rates, device)
    bench_merge(device)


if __name__ == "__main__":
    main()
