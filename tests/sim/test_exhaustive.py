"""Every interleaving of small groups; run with -s to see how many states there are. Each fault put back is met."""

import pytest

from services.core.flip.coordinator import FlipCoordinator
from services.core.flip.participant import FlipParticipant
from services.core.flip.pending_events import PendingEvents
from tests.sim.space.exhaustive import Explored, explore
from tests.sim.space.space import Space
from tests.sim.space.state import ALL_CRASHES, Scope
from tests.sim.specimens.faults_flip import (
    BoundParticipant,
    DeafCoordinator,
    EagerParticipant,
    HastyCoordinator,
    Nothing,
    StaleQuorum,
    StandingMark,
    TakesAll,
)


def whole(scope: Scope) -> Explored:
    """All of it, without a violation."""
    found = explore(Space(scope))
    print(f"{scope}: {found.text()}")  # noqa: T201
    assert found.violation is None and found.is_whole, found.text()
    return found


def test_two_ranks_one_flip_any_crash_and_a_loop_behind_its_thread() -> None:
    found = whole(Scope(num_ranks=2, num_flips=1, crashes=ALL_CRASHES, has_hops=True))
    assert found.num_states > 5_000


def test_two_ranks_two_flips_one_crash() -> None:
    assert whole(Scope(num_ranks=2)).num_states > 20_000


def test_two_ranks_one_flip_a_slip_and_a_clock_without_cause() -> None:
    found = whole(Scope(num_ranks=2, num_flips=1, num_crashes=0, num_slips=2, num_expiries=1))
    assert found.num_states > 1_000


@pytest.mark.slow
def test_three_ranks_two_flips_one_crash() -> None:
    assert whole(Scope()).num_states > 300_000


@pytest.mark.slow
def test_two_ranks_one_flip_one_of_everything() -> None:
    scope = Scope(num_ranks=2, num_flips=1, crashes=ALL_CRASHES, num_slips=1, num_expiries=1, has_hops=True)
    assert whole(scope).num_states > 80_000


def test_a_bound_is_said() -> None:
    found = explore(Space(Scope()), max_states=1_000)
    assert not found.is_whole and found.text().startswith("the first ")


# Faults put back.

CRASH = Scope(num_ranks=2, num_flips=1)
WITHDRAWAL = Scope(num_flips=1, num_crashes=0, num_slips=1, slips=frozenset({"withdraw"}))


@pytest.mark.parametrize(
    ("scope", "coordinator", "rule"),
    [
        (WITHDRAWAL, StaleQuorum, "nobody enters alone"),
        (WITHDRAWAL, StandingMark, "nobody enters alone"),
        (CRASH, HastyCoordinator, "commit after all verified"),
        (CRASH, DeafCoordinator, "each flip ends"),
    ],
)
def test_a_fault_of_the_coordinator_is_met(scope: Scope, coordinator: type[FlipCoordinator], rule: str) -> None:
    found = explore(Space(scope, coordinator))
    assert found.violation is not None and found.violation.invariant == rule, found.text()


@pytest.mark.parametrize("participant", [EagerParticipant, BoundParticipant])
def test_a_fault_of_the_participant_is_met(participant: type[FlipParticipant]) -> None:
    scope = Scope(num_ranks=2, num_flips=1, num_crashes=0, num_slips=1, slips=frozenset({"failed"}))
    found = explore(Space(scope, participant=participant))
    assert found.violation is not None and found.violation.invariant == "raised", found.text()


def test_enter_that_is_not_journalled_is_met() -> None:
    found = explore(Space(Scope(num_ranks=2, num_flips=1, num_crashes=0), journals_enter=False))
    assert found.violation is not None and found.violation.invariant == "journal, then speak", found.text()


def test_a_recovered_attempt_that_does_not_say_enter_again_is_met() -> None:
    """Ranks have verified to an attempt that ended with its scheduler's stream alone: nothing makes them repeat it."""
    scope = Scope(num_ranks=2, num_flips=1, crashes=frozenset({"unask"}))
    assert whole(scope).num_states > 500
    found = explore(Space(scope, says_enter_again=False))
    assert found.violation is not None and found.violation.invariant == "each flip ends", found.text()


@pytest.mark.parametrize(("early", "num_flips"), [(Nothing, 1), (TakesAll, 2)])
def test_early_events_that_are_forgotten_are_met(early: type[PendingEvents], num_flips: int) -> None:
    found = explore(Space(Scope(num_ranks=2, num_flips=num_flips), early=early))
    assert found.violation is not None and found.violation.invariant == "each flip ends", found.text()
    assert found.path and found.text().splitlines()[0].startswith("    1  ")
