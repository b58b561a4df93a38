"""Which seed finds which fault put back: `python -m tests.sim.specimens.hunt` searches, and stores one for each.

The default test run replays what is stored in `seeds.txt`, and searches only where that finds nothing; the slow one
searches. Whoever changes the simulator, or what it runs, may shift the seeds, and then hunts again.
"""

import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.sim.run import Failure, no_collections, run_seed
from tests.sim.specimens.specimens import SPECIMENS, Specimen

SEEDS = Path(__file__).with_name("seeds.txt")
"""A line for each specimen: the seed, then the name."""


def stored_seeds() -> dict[str, int]:
    """By specimen's name, the seed that found it last."""
    lines = (line.split(maxsplit=1) for line in SEEDS.read_text().splitlines())
    return {name: int(seed) for seed, name in lines}


def found(specimen: Specimen, seeds: Iterable[int] | None = None) -> Failure | None:
    """The first failure among these seeds, or the specimen's own; None: nothing is found.

    Raises:
        AssertionError: it is not the one that is stated, or the shipped parts do not survive the same seed.
    """
    with no_collections():
        for seed in specimen.seeds if seeds is None else seeds:
            group, failure = run_seed(seed, specimen.parts, focus=specimen.focus)
            if failure is None:
                group.take_apart()
                continue
            assert failure.violation.invariant in specimen.invariants, failure.text()
            assert re.search(specimen.says, failure.violation.text), failure.text()
            _, shipped = run_seed(seed, focus=specimen.focus)
            assert shipped is None, shipped.text()
            return failure
    return None


def _found_at(place: int) -> int | None:
    try:
        failure = found(SPECIMENS[place])
    except AssertionError as error:
        sys.stdout.write(f"{SPECIMENS[place].name}: another failure than is stated\n{error}\n")
        return None
    return None if failure is None else failure.seed


def main() -> int:
    """The command."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        seeds = list(pool.map(_found_at, range(len(SPECIMENS))))
    pairs = list(zip(seeds, (specimen.name for specimen in SPECIMENS), strict=True))
    SEEDS.write_text("".join(f"{seed:>5} {name}\n" for seed, name in pairs if seed is not None))
    missing = [name for seed, name in pairs if seed is None]
    sys.stdout.write(f"{len(pairs) - len(missing)} seeds are stored; not found: {missing or 'none'}\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
