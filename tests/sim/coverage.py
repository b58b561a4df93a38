"""Which rows of the two tables schedules have visited, and how flips ended in each mode.

`python -m tests.sim.coverage --seeds 5000` prints both. Counts with subclasses of the shipped machines, so that a plain
run pays nothing for it.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from services.core.flip.coordinator import FlipCoordinator
from services.core.flip.messages import CoordinatorEffect, FlipOutcome, ParticipantEffect
from services.core.flip.participant import FlipParticipant
from tests.sim.processes.group import SHIPPED, Group, Parts
from tests.sim.run import Focus, no_collections, run_seed, unchanged

Pair = tuple[Any, type]
"""A state and the class of an event."""


@dataclass(slots=True)
class Coverage:
    """What schedules have visited."""

    coordinator: Counter[Pair] = field(default_factory=Counter)
    participant: Counter[Pair] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, FlipOutcome]] = field(default_factory=Counter)
    """By mode."""

    def parts(self) -> Parts:
        """The shipped ones, counted."""
        coordinator_seen, participant_seen = self.coordinator, self.participant

        class CountedCoordinator(FlipCoordinator):
            __slots__ = ()

            def on_event(self, event: Any, now_ns: int) -> list[CoordinatorEffect]:
                coordinator_seen[self.state, type(event)] += 1
                return super().on_event(event, now_ns)

        class CountedParticipant(FlipParticipant):
            __slots__ = ()

            def on_event(self, event: Any) -> list[ParticipantEffect]:
                before = self.state
                effects = super().on_event(event)
                if not (hasattr(event, "flip_id") and self._is_over(event.flip_id)) or self.state is not before:
                    participant_seen[before, type(event)] += 1
                return effects

        return replace(SHIPPED, coordinator=CountedCoordinator, participant=CountedParticipant)

    def run(self, seeds: range, focus: Focus = unchanged) -> None:
        """Adds so many schedules.

        Raises:
            AssertionError: one of them broke an invariant.
        """
        parts = self.parts()
        with no_collections():
            for seed in seeds:
                group, failure = run_seed(seed, parts, focus=focus)
                assert failure is None, failure.text()
                self._count_outcomes(group)
                group.take_apart()

    def _count_outcomes(self, group: Group) -> None:
        mode = group.case.mode.value + (", exclusive rows" if group.case.is_exclusive else "")
        for outcome in group.checks.outcomes:
            self.outcomes[mode, outcome] += 1

    def unvisited(self) -> list[str]:
        """Rows of either table that nobody has been at."""
        rows = [
            *(("coordinator", *pair) for pair in FlipCoordinator._TABLE if not self.coordinator[pair]),
            *(("participant", *pair) for pair in FlipParticipant._TABLE if not self.participant[pair]),
        ]
        return [f"{who} {state.value}: {event.__name__}" for who, state, event in rows]

    def lines(self) -> Iterator[str]:
        """Both tables with their counts, then the outcomes."""
        for who, table, seen in (
            ("coordinator", FlipCoordinator._TABLE, self.coordinator),
            ("participant", FlipParticipant._TABLE, self.participant),
        ):
            for state, event in table:
                yield f"{who:<12} {state.value:<12} {event.__name__:<18} {seen[state, event]:>9}"
        for mode in sorted({mode for mode, _ in self.outcomes}):
            ends = ", ".join(f"{self.outcomes[mode, outcome]} {outcome.value}" for outcome in FlipOutcome)
            yield f"{mode:<26} {ends}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.coverage", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    coverage = Coverage()
    coverage.run(range(given.first, given.first + given.seeds))
    print("\n".join([*coverage.lines(), *(f"not visited: {row}" for row in coverage.unvisited())]))  # noqa: T201


if __name__ == "__main__":
    main()
