"""Makes a failing case small: what can be left out, and the same rule still breaks, is left out.

A case that has changed draws other delays, so each attempt is tried under a few seeds of them. Never: changes what is
looked at; a smaller case that breaks another rule is another failure, and is not taken.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.sim.case import Case
from tests.sim.processes.group import Group, Parts
from tests.sim.processes.world import InvariantError

NUM_DELAY_SEEDS = 12
MAX_TRIES = 3_000
"""Schedules in all."""

Broken = tuple[Case, Group, InvariantError]


def shrunk(case: Case, rule: str, parts: Parts) -> Broken | None:
    """The smallest case found that breaks `rule`; None where not even `case` does under other delays."""
    tries = iter(range(MAX_TRIES))
    best = _broken(case, rule, parts, tries)
    while best is not None:
        smaller = next((b for c in smaller_cases(best[0]) if (b := _broken(c, rule, parts, tries)) is not None), None)
        if smaller is None:
            return best
        best = smaller
    return None


def _broken(case: Case, rule: str, parts: Parts, tries: Iterator[int]) -> Broken | None:
    for seed, _ in zip(range(NUM_DELAY_SEEDS), tries, strict=False):
        group = Group(case, Random(seed), parts, keeps_all=True)
        try:
            group.run()
        except InvariantError as violation:
            if violation.invariant == rule:
                return case, group, violation
    return None


def smaller_cases(case: Case) -> Iterator[Case]:
    """Each with one thing less."""
    for name in ("faults", "asked", "triggers"):
        items = getattr(case, name)
        for place in range(len(items)):
            if len(items) > (name == "asked"):
                yield replace(case, **{name: items[:place] + items[place + 1 :]})
    plain = Case(case.num_ranks, case.kind, case.limits, case.asked, control=case.control, data=case.data)
    for name in (
        "odds",
        "mode",
        "is_exclusive",
        "eager_flips",
        "policy_ns",
        "slow_share",
        "slowness",
        "uses_shipped_table",
        "link_capacity",
    ):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for name in ("refuse", "withdraw", "fail"):
        if getattr(case.odds, name):
            yield replace(case, odds=replace(case.odds, **{name: 0.0}))
    for place, asked in enumerate(case.asked):
        shorter = [replace(asked, max_output_tokens=asked.max_output_tokens // 2 or 1)]
        shorter += [replace(asked, prompt=asked.prompt[: len(asked.prompt) // 2] or asked.prompt)]
        shorter += [replace(asked, stop=None, abort_ns=None, poison_index=None, priority=0)]
        for other in shorter:
            if other != asked:
                yield replace(case, asked=(*case.asked[:place], other, *case.asked[place + 1 :]))
