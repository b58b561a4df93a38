"""Which seed finds which fault put back: `python -m tests.sim.specimens.hunt` prints a line for each specimen."""

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.run import Failure, no_collections, run_seed
from tests.sim.specimens.specimens import SPECIMENS, Specimen


def found(specimen: Specimen) -> Failure | None:
    """The first failure among the specimen's seeds; None: nothing is found.

    Raises:
        AssertionError: it is not the one that is stated, or the shipped parts do not survive the same seed.
    """
    with no_collections():
        for seed in specimen.seeds:
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


def _line(place: int) -> tuple[str, bool]:
    specimen = SPECIMENS[place]
    failure = found(specimen)
    if failure is None:
        return f"{specimen.name:<48} not found among {specimen.seeds}", False
    return f"{specimen.name:<48} seed {failure.seed:>5}  {failure.violation.invariant}", True


def main() -> int:
    """The command."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        lines = list(pool.map(_line, range(len(SPECIMENS))))
    print("\n".join(text for text, _ in lines))  # noqa: T201
    return int(not all(is_found for _, is_found in lines))


if __name__ == "__main__":
    sys.exit(main())
