"""Measures attention, planned once, and sampling on one thread: `python -m kernels.bench.attention`; prints medians.

Decode is set against its floor, the bytes of visible keys and values at FLOOR_BYTES_S a core, prefill against the flops
its query heads and visible keys need at the core's own peak, measured first. Pools are as many as a model's layers, up
to a bound that exceeds the last-level cache, so that decode reads memory as it would between the layers of a step.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels._native as _native
from kernels.backend import AttentionShape, StepInputs
from kernels.cpu.backend import CpuBackend
from kernels.cpu.sampling import sample
from services.core.ids import BLOCK_SLOTS

FLOOR_BYTES_S = 7.4e9  # what one core of the reference machine reads from memory
MAX_POOL_BYTES = 400_000_000
NUM_LAYERS = 30
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2 135M
VOCABULARY = 49_152


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _median_s(run: Callable[[int], None], repeats: int) -> float:
    times = []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def peak_flops() -> float:
    """The core's best rate of float32 multiply-adds, in flops a second."""
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        flops = _native.fma_rounds(2_000_000)
        best = max(best, flops / (time.perf_counter() - begin))
    return best


@dataclass(frozen=True, slots=True)
class _Work:
    num_sequences: int
    num_queries: int
    context: int

    @property
    def kv_bytes(self) -> int:
        return self.num_sequences * self.context * NUM_KV_HEADS * HEAD_DIM * 8

    @property
    def flops(self) -> int:
        keys = sum(range(self.context - self.num_queries + 1, self.context + 1))
        return self.num_sequences * keys * NUM_Q_HEADS * 4 * HEAD_DIM

    def repeats(self) -> int:
        return 9 if self.flops > 10**9 or self.kv_bytes > 50_000_000 else 60

    def paged_s(self) -> float:
        """Median seconds of one call, each on the next layer's pool."""
        blocks = self.num_sequences * (-(-self.context // BLOCK_SLOTS))
        num_layers = max(1, min(NUM_LAYERS, MAX_POOL_BYTES // self.kv_bytes))
        shape = (blocks, NUM_KV_HEADS, BLOCK_SLOTS, HEAD_DIM)
        pools = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
        tables = torch.randperm(blocks).to(torch.int32).view(self.num_sequences, -1)
        rows = torch.arange(self.num_sequences, dtype=torch.int32)
        query_start = torch.arange(self.num_sequences + 1, dtype=torch.int32) * self.num_queries
        context = torch.full((self.num_sequences,), self.context, dtype=torch.int32)
        q = torch.randn(self.num_sequences * self.num_queries, NUM_Q_HEADS, HEAD_DIM)
        out = torch.empty_like(q)

        numbers = torch.arange(len(q), dtype=torch.int32)
        inputs = StepInputs(
            len(q), numbers, numbers, numbers, tables, rows, query_start, context, torch.zeros(0, dtype=torch.int64)
        )
        backend = CpuBackend()
        planned = backend.plan(inputs, AttentionShape(NUM_Q_HEADS, NUM_KV_HEADS, 0, HEAD_DIM, HEAD_DIM**-0.5))

        def run(i: int) -> None:
            k_pool, v_pool = pools[i % num_layers]
            backend.attend(planned, q, k_pool, v_pool, out)

        return _median_s(run, self.repeats())

    def torch_s(self) -> float:
        """Median seconds of torch's own attention on gathered keys and values; the gather is not counted."""
        shape = (self.num_sequences, NUM_KV_HEADS, self.context, HEAD_DIM)
        num_layers = max(1, min(NUM_LAYERS, MAX_POOL_BYTES // self.kv_bytes))
        caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
        q = torch.randn(self.num_sequences, NUM_Q_HEADS, self.num_queries, HEAD_DIM)
        mask: Tensor | None = None
        if self.num_queries > 1:
            position = torch.arange(self.context - self.num_queries, self.context)[:, None]
            mask = torch.arange(self.context)[None, :] <= position

        def run(i: int) -> None:
            keys, values = caches[i % num_layers]
            torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        return _median_s(run, self.repeats())


def _bench_decode() -> None:
    _say("decode: sequences, context: us a layer, GB/s, floor / time, torch / time")
    for num_sequences in (1, 8):
        for context in (512, 2048, 8192):
            work = _Work(num_sequences, 1, context)
            paged, other = work.paged_s(), work.torch_s()
            rate, floor = work.kv_bytes / paged / 1e9, work.kv_bytes / FLOOR_BYTES_S / paged
            _say(f"  {num_sequences} {context:5}: {paged * 1e6:7.0f} {rate:6.1f} {floor:6.2f} {other / paged:6.2f}")


def _bench_prefill(peak: float) -> None:
    _say(f"prefill: queries, context: ms a layer, GFLOP/s, of the core's peak ({peak / 1e9:.0f}), torch / time")
    for context in (512, 2048):
        work = _Work(1, 512, context)
        paged, other = work.paged_s(), work.torch_s()
        rate = work.flops / paged
        _say(f"  512 {context:5}: {paged * 1e3:7.2f} {rate / 1e9:6.1f} {rate / peak:6.2f} {other / paged:6.2f}")


def _bench_sampling() -> None:
    _say(f"sampling: us a row of {VOCABULARY}")
    rows = 8
    # Logits as a model gives them: most far below few.
    logits = torch.randn(rows, VOCABULARY) * 2
    logits[:, :200] += torch.linspace(14, 4, 200)
    ids, finite = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.bool)
    seed, position = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature only", 1.0, 0, 1.0, 0.0),
        ("top_p 0.95", 1.0, 0, 0.95, 0.0),
        ("top_k 40, top_p 0.95", 0.8, 40, 0.95, 0.0),
        ("min_p 0.05", 1.0, 0, 1.0, 0.05),
    ):
        floats = [torch.full((rows,), value) for value in (temperature, top_p, min_p)]
        ks = torch.full((rows,), top_k, dtype=torch.int32)

        def run(_: int, floats: list[Tensor] = floats, ks: Tensor = ks) -> None:
            sample(logits, floats[0], ks, floats[1], floats[2], seed, position, ids, finite)

        _say(f"  {name:22}{_median_s(run, 60) / rows * 1e6:7.1f}")


def main() -> None:
    """Runs all three and prints them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _say(f"path: {'AVX2' if _native.has_avx2() else 'portable'}, torch {torch.__version__}, one thread")
    _bench_decode()
    _bench_prefill(peak_flops())
    _bench_sampling()


if __name__ == "__main__":
    main()
