"""Runs schedules: `python -m tests.sim.run --seeds 1000`, or one again with `--seed 17`, made small with `--shrink`.

Many are spread over the machine's cores, in chunks that follow each other: what is found does not depend on how many.

Ends with status 1 at the first violation, after its seed, the command that shows it again, the invariant and the last
events.
"""

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing import get_context
from random import Random

from tests.sim.case import Case, describe, draw_case
from tests.sim.processes.group import SHIPPED, Group, Parts
from tests.sim.processes.world import InvariantError
from tests.sim.shrink import shrunk

COLLECTED_SCHEDULES = 1_000
"""Between two collections."""
CHUNK_SCHEDULES = 500
"""What a process is given at a time."""


@dataclass(slots=True)
class Totals:
    """What many schedules did."""

    schedules: int = 0
    events: int = 0
    committed: int = 0
    abandoned: int = 0
    lost: int = 0
    carried: int = 0
    cpu_s: float = 0.0

    def take(self, more: "Totals") -> None:
        """Adds those of another run."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))

    def add(self, group: Group) -> None:
        """Counts one."""
        checks = group.checks
        self.schedules += 1
        self.events += group.world.num_events
        self.committed += checks.num_committed
        self.abandoned += checks.num_abandoned
        self.lost += checks.num_lost
        self.carried += checks.num_carried


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant."""

    seed: int
    violation: InvariantError
    case: Case
    lines: tuple[str, ...]

    def text(self) -> str:
        """Everything needed to look into it."""
        return "\n".join(
            [
                *self.lines,
                f"seed {self.seed}: {describe(self.case)}",
                f"violated: {self.violation.invariant}: {self.violation.text}",
                f"again: python -m tests.sim.run --seed {self.seed}",
            ]
        )


@contextmanager
def no_collections() -> Iterator[None]:
    """Groups that are taken apart leave next to nothing to collect: the collector would only look at what lives."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Focus = Callable[[Case], Case]


def unchanged(case: Case) -> Case:
    """As it was drawn."""
    return case


def run_seed(
    seed: int, parts: Parts = SHIPPED, *, focus: Focus = unchanged, keeps_all: bool = False
) -> tuple[Group, Failure | None]:
    """One schedule; `focus` aims a drawn case at something that chance alone meets too rarely."""
    rng = Random(seed)
    group = Group(focus(draw_case(rng)), rng, parts, keeps_all=keeps_all)
    try:
        group.run()
    except InvariantError as violation:
        return group, Failure(seed, violation, group.case, tuple(group.world.lines()))
    return group, None


def run_seeds(
    first: int, num_seeds: int, parts: Parts = SHIPPED, *, until_s: float = math.inf
) -> tuple[Totals, Failure | None]:
    """Many schedules, up to the first failure, or as many as fit before the monotonic time `until_s`."""
    totals, began_cpu_s = Totals(), time.process_time()
    with no_collections():
        for seed in range(first, first + num_seeds):
            if time.monotonic() > until_s:
                break
            group, failure = run_seed(seed, parts)
            if failure is not None:
                return totals, failure
            totals.add(group)
            group.take_apart()
            if seed % COLLECTED_SCHEDULES == 0:
                gc.collect(0)
    totals.cpu_s = time.process_time() - began_cpu_s
    return totals, None


def run_in_processes(
    first: int, num_seeds: int, num_processes: int, parts: Parts = SHIPPED, *, until_s: float = math.inf
) -> tuple[Totals, Failure | None]:
    """The same, in chunks over so many processes; the failure is that of the lowest chunk that has one."""
    end, totals = first + num_seeds, Totals()
    begins = range(first, end, CHUNK_SCHEDULES)
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        chunks = [
            pool.submit(run_seeds, begin, min(CHUNK_SCHEDULES, end - begin), parts, until_s=until_s) for begin in begins
        ]
        for chunk in chunks:
            more, failure = chunk.result()
            totals.take(more)
            if failure is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return totals, failure
    return totals, None


def run_one(seed: int, *, shrinks: bool) -> int:
    """Shows one seed with all its events, or what is left of it when everything is left out that can be."""
    group, failure = run_seed(seed, keeps_all=True)
    print(failure.text() if failure else "\n".join(group.world.lines()))  # noqa: T201
    if failure is not None and shrinks:
        smallest = shrunk(failure.case, failure.violation.invariant, SHIPPED)
        if smallest is None:
            print("not broken under other delays")  # noqa: T201
        else:
            case, group, violation = smallest
            print("\n".join(["", *group.world.lines(), repr(case), describe(case), str(violation)]))  # noqa: T201
    return int(failure is not None)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="as many of them as fit")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="only this one, with all its events")
    parser.add_argument("--shrink", action="store_true", help="with --seed: the smallest case that breaks it")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return run_one(arguments.seed, shrinks=arguments.shrink)
    began_s = time.perf_counter()
    totals, failure = run_in_processes(
        arguments.first, arguments.seeds, arguments.processes, until_s=time.monotonic() + arguments.seconds
    )
    took_s = time.perf_counter() - began_s
    if failure is not None:
        print(failure.text())  # noqa: T201
        return 1
    rate = totals.schedules / max(totals.cpu_s, 1e-9)
    print(  # noqa: T201
        f"{totals.schedules} schedules in {took_s:.1f} s ({rate:.0f} per CPU second), "
        f"{totals.events} events, "
        f"{totals.committed} flips committed carrying {totals.carried} requests, {totals.abandoned} not committed, "
        f"{totals.lost} generations lost: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
