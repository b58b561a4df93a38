"""Every interleaving of a small group's flips: `python -m tests.sim.space.exhaustive --ranks 3 --flips 2 --crashes 1`.

Prints how many states there are. Ends with status 1 at the first state that breaks a rule, after the events that lead
there.
"""

import argparse
import sys
import time
from dataclasses import dataclass

from services.core.flip.messages import FlipProtocolError
from services.core.log import ProtocolError
from tests.sim.processes.world import InvariantError
from tests.sim.space.checks import check_end
from tests.sim.space.space import Space
from tests.sim.space.state import ALL_CRASHES, Scope

MAX_STATES = 50_000_000


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration found."""

    num_states: int
    num_moves: int
    violation: InvariantError | None = None
    path: tuple[str, ...] = ()
    is_whole: bool = True
    """False: it stopped at its bound."""

    def text(self) -> str:
        """What is printed."""
        whole = "all" if self.is_whole else "the first"
        if self.violation is None:
            return f"{whole} {self.num_states} states, {self.num_moves} moves: no violation"
        events = "\n".join(f"{number:>5}  {label}" for number, label in enumerate(self.path, 1))
        return f"{events}\nviolated: {self.violation}\n{self.num_states} states, {self.num_moves} moves"


def explore(space: Space, max_states: int = MAX_STATES) -> Explored:
    """Visits every reachable state, newest first, each once."""
    key, first = space.named(space.first())
    numbers = {key: 0}
    cause: list[tuple[int, str]] = [(0, "")]
    pending, num_moves = [(0, first)], 0
    while pending:
        number, state = pending.pop()
        try:
            moves = list(space.quiet_moves(state))
            if not moves:
                check_end(state, space.scope)
            moves += space.loud_moves(state)
        except (InvariantError, FlipProtocolError, ProtocolError) as error:
            violation = error if isinstance(error, InvariantError) else InvariantError("raised", str(error))
            return Explored(len(numbers), num_moves, violation, _path(cause, number))
        num_moves += len(moves)
        for label, after in moves:
            key, named = space.named(after)
            if key not in numbers:
                numbers[key] = len(cause)
                pending.append((len(cause), named))
                cause.append((number, label))
        if len(numbers) >= max_states:
            return Explored(len(numbers), num_moves, is_whole=False)
    return Explored(len(numbers), num_moves)


def _path(cause: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    labels = []
    while number:
        number, label = cause[number]
        labels.append(label)
    return tuple(reversed(labels))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.space.exhaustive", description=__doc__)
    whole = Scope()
    parser.add_argument("--ranks", type=int, default=whole.num_ranks)
    parser.add_argument("--flips", type=int, default=whole.num_flips)
    parser.add_argument("--crashes", type=int, default=whole.num_crashes)
    parser.add_argument("--slips", type=int, default=0, help="refusals, failures and withdrawals of ranks")
    parser.add_argument("--expiries", type=int, default=0, help="clocks that expire although nothing is amiss")
    parser.add_argument("--kinds", nargs="+", default=sorted(whole.crashes), choices=sorted(ALL_CRASHES))
    parser.add_argument("--hops", action="store_true", help="a rank's loop hears its model thread after a while")
    parser.add_argument("--max-states", type=int, default=MAX_STATES)
    given = parser.parse_args()
    scope = Scope(
        num_ranks=given.ranks,
        num_flips=given.flips,
        num_crashes=given.crashes,
        crashes=frozenset(given.kinds),
        num_slips=given.slips,
        num_expiries=given.expiries,
        has_hops=given.hops,
    )
    began_s = time.process_time()
    found = explore(Space(scope), given.max_states)
    print(found.text(), f"in {time.process_time() - began_s:.1f} CPU seconds")  # noqa: T201
    return int(found.violation is not None)


if __name__ == "__main__":
    sys.exit(main())
