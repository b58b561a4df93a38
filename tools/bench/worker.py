"""Measures the worker alone, without scheduler or router: prefill and decode rates by layout and ranks, and where a
step's time goes. `python -m tools.bench.worker [--model PATH] [--ranks 1 2 3] [--layouts pp tp]`.

Rates are taken undisturbed; the breakdown is a second run with a timer around every kernel, whose own cost (about
0.2 us a call) counts as Python.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from services.core.ids import LayoutKind
from services.models.model_files import resolve_model
from services.worker.model import llama
from services.worker.steps.execute import Runner
from services.worker.steps.stages import RunnerLimits
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import GroupSpec, rank_processes

LIMITS = RunnerLimits(max_resident_requests=16, max_batch_tokens=512, num_valid_ids=49_152)
CONTEXT_TOKENS = 4096
NUM_BLOCKS = 2048
CHUNK_TOKENS = 256
NUM_DECODE_STEPS = 48
KERNELS = {
    "multiply": "linear",
    "paged_attention": "attention",
    "rms_norm": "norms",
    "rope_and_store": "rotary",
    "silu_mul": "activation",
    "take_rows": "embedding",
}
"""What the model calls, by the name under which it is shown."""


class KernelTimes:
    """Times every kernel of one rank's model; kernels take their time in this thread, so sums are shares of a step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._spent_ns: Counter[str] = Counter()
        self._before = (0, 0)
        for name, kind in KERNELS.items():
            setattr(llama, name, self._timed(getattr(llama, name), kind))
        setattr(runner.parts.sampler, "sample", self._timed(runner.parts.sampler.sample, "sampling"))  # noqa: B010 (a wrapper)

    def _timed(self, call: Callable[..., object], kind: str) -> Callable[..., object]:
        spent_ns, clock = self._spent_ns, time.perf_counter_ns

        def timed(*args: object, **kwargs: object) -> object:
            began_ns = clock()
            result = call(*args, **kwargs)
            spent_ns[kind] += clock() - began_ns
            return result

        return timed

    def collected(self) -> dict[str, float]:
        """Milliseconds by kind since the last call; `python` is what no kernel and no wait accounts for."""
        compute_ns, wait_ns = self._runner.compute_ns - self._before[0], self._runner.waited_ns - self._before[1]
        self._before = (self._runner.compute_ns, self._runner.waited_ns)
        spent = {**self._spent_ns, "wait": wait_ns, "python": compute_ns - sum(self._spent_ns.values())}
        self._spent_ns.clear()
        return {kind: nanoseconds / 1e6 for kind, nanoseconds in spent.items()}


@contextmanager
def driver(spec: GroupSpec, layout: LayoutKind) -> Iterator[tuple[LogDriver, Callable[[], list[dict[str, float]]]]]:
    """A fresh group under one layout, and what its ranks' timers say."""
    with rank_processes(spec) as ranks:
        log = LogDriver(ranks)
        log.reset(layout, NUM_BLOCKS, LIMITS.max_resident_requests, CONTEXT_TOKENS)
        yield log, lambda: [rank.observed() for rank in ranks]


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Ids that differ between seeds."""
    return [(seed * 977 + position * 7919) % 40_000 for position in range(num_tokens)]


def rate(work: Callable[[], object], num_tokens: int) -> float:
    """Tokens per second."""
    began_s = time.perf_counter()
    work()
    return num_tokens / (time.perf_counter() - began_s)


def measure(log: LogDriver, after: Callable[[str], None]) -> dict[str, float]:
    """Rates of one group; `after` is called between them with the name of what has just run."""
    rates = {}
    log.prefill({0: prompt(0, 64)}, CHUNK_TOKENS)
    after("warm-up")
    for index, num_tokens in ((1, 512), (2, 2048)):
        name = f"prefill {num_tokens}"
        rates[name] = rate(partial(log.prefill, {index: prompt(index, num_tokens)}, CHUNK_TOKENS), num_tokens)
        after(name)
    log.prefill({index: prompt(index, 32) for index in range(3, 11)}, CHUNK_TOKENS)
    after("warm-up")
    for indexes in ([3], list(range(3, 11))):
        name = f"decode x{len(indexes)}"
        num_tokens = NUM_DECODE_STEPS * len(indexes)
        rates[name] = rate(partial(log.decode, indexes, NUM_DECODE_STEPS), num_tokens)
        after(name)
    return rates


def show_breakdown(spec: GroupSpec, layout: LayoutKind) -> None:
    """Prints what each kind of work took on rank 0, as shares of its time."""
    with driver(spec, layout) as (log, observed):

        def after(name: str) -> None:
            times = observed()
            if name == "warm-up":
                return
            for rank, spent in enumerate(times):
                total = sum(spent.values())
                shares = "  ".join(f"{kind} {100 * ms / total:.1f}%" for kind, ms in sorted(spent.items()))
                print(f"      rank {rank} {name:13s} {total:8.1f} ms: {shares}")

        measure(log, after)


def main() -> None:
    """Measures what the arguments ask for and prints one line a group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a path, or a name that was fetched")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layouts", nargs="+", default=["pp", "tp"], choices=["pp", "tp"])
    parser.add_argument("--breakdown", action="store_true", help="also where the time goes")
    arguments = parser.parse_args()
    model = resolve_model(Path(arguments.model) if Path(arguments.model).exists() else arguments.model)
    print(f"{model.name}, {os.cpu_count()} cores, chunks of {CHUNK_TOKENS}; tokens/s")
    for num_ranks in arguments.ranks:
        for layout in map(LayoutKind, arguments.layouts):
            with driver(GroupSpec(model, num_ranks, LIMITS), layout) as (log, _):
                rates = measure(log, lambda name: None)
            print(
                f"  {layout.value} {num_ranks} ranks: " + "  ".join(f"{k} {v:.0f}" for k, v in rates.items()),
                flush=True,
            )
            if arguments.breakdown:
                show_breakdown(GroupSpec(model, num_ranks, LIMITS, observer=KernelTimes), layout)


if __name__ == "__main__":
    main()
