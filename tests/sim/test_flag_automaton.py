"""What each variant of the flag protocol must do over all interleavings; run with -s to see the counts."""

from __future__ import annotations

from itertools import product

import pytest

from tests.sim.automata.flag_automaton import FlagAutomaton, Topology, Variant, Verdict, broadcast, everyone, gather
from tests.sim.automata.wake_automaton import Rule, explore


def explored(variant: Variant, num_ranks: int, topologies: list[Topology], num_rounds: int) -> tuple[int, set[Verdict]]:
    """Every sequence of `num_rounds` topologies, every interleaving of each."""
    num_states, verdicts = 0, set[Verdict]()
    for sequence in product(topologies, repeat=num_rounds):
        exploration = FlagAutomaton(variant, num_ranks, sequence).explore()
        num_states += exploration.num_states
        verdicts |= exploration.verdicts
    print(f"{variant.name}, {num_ranks} ranks, {num_rounds} rounds: {num_states} states, {verdicts or 'no fault'}")  # noqa: T201
    return num_states, verdicts


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equality_on_reused_lines_deadlocks_once_a_rank_leads(num_ranks: int) -> None:
    _, verdicts = explored(Variant.EQUALITY, num_ranks, [everyone(num_ranks)], 2)
    assert Verdict.DEADLOCK in verdicts


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_at_least_without_acknowledgement_never_blocks_and_corrupts(num_ranks: int) -> None:
    _, verdicts = explored(Variant.AT_LEAST, num_ranks, [everyone(num_ranks)], 2)
    assert verdicts == {Verdict.CORRUPT}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_alternating_banks_hold_for_one_topology_and_not_for_rounds_shared_by_several(num_ranks: int) -> None:
    _, alone = explored(Variant.BANKS_ALONE, num_ranks, [everyone(num_ranks)], 3)
    assert alone == set()
    shared = [gather(num_ranks, 0), broadcast(num_ranks, 0)]
    _, verdicts = explored(Variant.BANKS_ALONE, num_ranks, shared, 3)
    assert Verdict.CORRUPT in verdicts


def test_the_shipped_protocol_holds_for_two_ranks_over_every_sequence_of_topologies() -> None:
    topologies = [everyone(2), gather(2, 0), gather(2, 1)]  # with two ranks a broadcast is a gather to the other
    num_states, verdicts = explored(Variant.SHIPPED, 2, topologies, 5)
    assert verdicts == set()
    assert num_states > 50_000


def test_the_shipped_protocol_holds_for_three_ranks() -> None:
    num_states, verdicts = explored(Variant.SHIPPED, 3, [everyone(3), gather(3, 2), broadcast(3, 0)], 3)
    assert verdicts == set()
    assert num_states > 50_000


@pytest.mark.parametrize(("writes", "aborts"), [(True, False), (False, True), (True, True)])
def test_no_wake_is_lost(writes: bool, aborts: bool) -> None:
    num_states, lost = explore(Rule.SHIPPED, writes=writes, aborts=aborts)
    print(f"sleep and wake, writes {writes}, aborts {aborts}: {num_states} states, lost wake {lost}")  # noqa: T201
    assert not lost


@pytest.mark.parametrize("rule", [Rule.LOOK_BEFORE_BELL, Rule.COUNT_AFTER_LOOK, Rule.NO_FENCE])
def test_each_slip_in_the_order_loses_a_wake(rule: Rule) -> None:
    assert explore(rule, writes=True, aborts=False)[1]


def test_an_abort_that_rings_nobody_loses_a_wake() -> None:
    assert explore(Rule.QUIET_ABORT, writes=False, aborts=True)[1]
