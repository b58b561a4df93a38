"""Schedules visit every row of both tables that can be visited, and every outcome of every mode; the others say why."""

from itertools import product
from typing import Any, get_args

import pytest

from services.core.flip.coordinator import CoordinatorState, FlipCoordinator
from services.core.flip.messages import CoordinatorEvent, FlipOutcome, FlipProtocolError, ParticipantEvent
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.ids import FlipId
from tests.sim.case import DEADLINES
from tests.sim.coverage import Coverage
from tests.sim.focuses import (
    a_rank_is_far_behind,
    a_rank_sleeps_in_the_gate,
    links_break_as_flips_follow_each_other,
    links_break_where_work_is_done,
    looks_come_late,
    mover_dies_and_ranks_fail,
    mover_dies_at_enter,
    work_fails,
)
from tests.sim.processes.memory import Mode

FOCUSES = (
    a_rank_is_far_behind,
    a_rank_sleeps_in_the_gate,
    links_break_as_flips_follow_each_other,
    links_break_where_work_is_done,
    looks_come_late,
    mover_dies_and_ranks_fail,
    mover_dies_at_enter,
    work_fails,
)

CLOSED = "an attempt is closed when it ends: what is said then is of an attempt that is not open"
REJOINED = "a rank says it again on a new stream, and the end of the stream before has ended the attempt by then"
JOURNALLED = "presence is of an attempt that was open, and one that is asked for again before ENTER is abandoned"
ORDERED = "a rank says it before it parks, on the same stream, and the gate opens when all have parked"
UNREACHED = {
    **{f"coordinator ended: {event.__name__}": CLOSED for event in get_args(CoordinatorEvent)},
    "coordinator armed: RankPresent": JOURNALLED,
    "coordinator armed: RankWithdrew": JOURNALLED,
    "coordinator assembling: RankParked": REJOINED,
    "coordinator assembling: RankNotReady": ORDERED,
    "coordinator entered: RankNotReady": ORDERED,
    "participant running: AssembleReceived": "the gate opens when all have parked, this rank among them",
}


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    found = Coverage()
    found.run(range(300))
    for focus in FOCUSES:
        found.run(range(40), focus)
    # Rare: ENTER is heard while the log's ABANDON is on its way from the thread that executes it to the loop.
    found.run(range(40, 200), mover_dies_and_ranks_fail)
    # Rare as well: both layouts are whole, and a rank cannot show it.
    found.run(range(40, 80), links_break_where_work_is_done)
    return found


def test_every_row_that_can_be_visited_is(coverage: Coverage) -> None:
    unvisited = set(coverage.unvisited())
    assert unvisited == set(UNREACHED), "\n".join(coverage.lines())


def test_every_mode_has_every_outcome(coverage: Coverage) -> None:
    modes = {
        mode.value + suffix
        for mode, suffix in product(Mode, ("", ", exclusive rows"))
        if not (mode is Mode.SHARED and suffix)
    }
    missing = [pair for pair in product(modes, FlipOutcome) if not coverage.outcomes[pair]]
    assert not missing


def test_every_pair_is_a_row_or_an_error() -> None:
    """No state ignores an event by accident."""
    for state, event in product(CoordinatorState, get_args(CoordinatorEvent)):
        coordinator = FlipCoordinator(FlipId(1), 1, DEADLINES, 0)
        coordinator.state = state
        if (state, event) not in FlipCoordinator._TABLE:
            with pytest.raises(FlipProtocolError, match="no such row"):
                coordinator.on_event(blank(event), 0)
    for own, event in product(ParticipantState, get_args(ParticipantEvent)):
        participant = FlipParticipant()
        participant.state = own
        if (own, event) not in FlipParticipant._TABLE:
            with pytest.raises(FlipProtocolError, match="no such row"):
                participant.on_event(blank(event))


def blank(event: type) -> Any:
    """An event of a class, whatever it says."""
    value = object.__new__(event)
    for name in event.__dataclass_fields__:  # type: ignore[attr-defined]
        object.__setattr__(value, name, FlipId(1))
    return value
