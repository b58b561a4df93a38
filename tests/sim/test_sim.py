"""Schedules that break nothing, seeds that replay, and each fault put back found among seeds that the tree survives."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from services.core.flip.work_table import WAYS, Phase, Verdict
from services.core.step import LogEntry
from services.router.streams.sessions import Choice
from tests.sim.case import MOMENTS, draw_case
from tests.sim.focuses import nobody_is_hurt
from tests.sim.processes.group import SHIPPED
from tests.sim.processes.memory import Mode
from tests.sim.processes.rank import RankProcess
from tests.sim.processes.world import TAIL_EVENTS, Channel, Process, World
from tests.sim.run import run_in_processes, run_seed, run_seeds
from tests.sim.shrink import shrunk
from tests.sim.specimens.hunt import found, stored_seeds
from tests.sim.specimens.old_ranks import GatedRank, OwingRank
from tests.sim.specimens.specimens import SPECIMENS, Specimen

NUM_SEEDS = 900
NUM_BATCHES, NUM_QUICK = 6, 3
"""In all, and in the default run."""


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[pytest.mark.slow] * (batch >= NUM_QUICK)) for batch in range(NUM_BATCHES)]
)
def test_no_schedule_breaks_an_invariant(batch: int) -> None:
    num_seeds = NUM_SEEDS // NUM_BATCHES
    totals, failure = run_seeds(batch * num_seeds, num_seeds)
    assert failure is None, failure.text()
    assert totals.schedules == num_seeds
    assert totals.committed > num_seeds // 4 and totals.abandoned and totals.lost, "the schedules exercise nothing"


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.name)
def test_a_fault_put_back_is_found_again(specimen: Specimen) -> None:
    """By the seed that found it last, before any other: seeds shift with what the simulator runs."""
    stored = stored_seeds().get(specimen.name)
    seeds = specimen.seeds if stored is None else [stored, *specimen.seeds]
    assert found(specimen, seeds) is not None, f"not found by seed {stored}, nor among seeds {specimen.seeds}"


@pytest.mark.slow
@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.name)
def test_a_fault_put_back_is_found_anew(specimen: Specimen) -> None:
    assert found(specimen) is not None, f"not found among seeds {specimen.seeds}"


class PayingRank(OwingRank):
    """Sends late, and before it parks all the same."""

    def holds_back(self, entry: LogEntry) -> bool:
        return False


@pytest.mark.parametrize("rank", [PayingRank, GatedRank])
def test_what_old_ranks_share_is_not_what_breaks_them(rank: type[RankProcess]) -> None:
    committed = 0
    for seed in range(40):
        group, failure = run_seed(seed, replace(SHIPPED, rank=rank), focus=nobody_is_hurt)
        assert failure is None, failure.text()
        committed += group.checks.num_committed
    assert committed > 40


@pytest.mark.parametrize("seed", [0, 7, 36, 53])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = (run_seed(seed, keeps_all=True)[0] for _ in range(2))
    assert first.world.fingerprint() == second.world.fingerprint()
    assert first.world.num_events == second.world.num_events > TAIL_EVENTS
    assert first.world.fingerprint() != run_seed(seed + 1, keeps_all=True)[0].world.fingerprint()


def test_a_failure_says_how_to_see_it_again() -> None:
    specimen = SPECIMENS[0]
    failure = next(failure for seed in specimen.seeds if (failure := run_seed(seed, specimen.parts)[1]) is not None)
    *events, about, violated, again = failure.text().splitlines()
    assert again == f"again: python -m tests.sim.run --seed {failure.seed}"
    assert violated.startswith(f"violated: {failure.violation.invariant}: ")
    assert about.startswith(f"seed {failure.seed}: {failure.case.num_ranks} ranks")
    assert 0 < len(events) <= TAIL_EVENTS
    assert all(re.match(r" *\d+\.\d{3}  \S+ +\S+", event) for event in events)


def test_chunks_in_processes_find_what_one_after_the_other_find() -> None:
    specimen = SPECIMENS[0]
    (one, first), (many, other) = run_seeds(0, 200, specimen.parts), run_in_processes(0, 200, 2, specimen.parts)
    assert first is not None and other is not None
    assert (first.seed, first.lines, str(first.violation)) == (other.seed, other.lines, str(other.violation))
    assert one.events == many.events > 0


def test_a_failing_case_is_made_small() -> None:
    specimen = next(specimen for specimen in SPECIMENS if "(Z6)" in specimen.name)
    failing = (run_seed(seed, specimen.parts)[1] for seed in specimen.seeds)
    large = next(failure for failure in failing if failure is not None and len(failure.case.asked) > 1)
    smallest = shrunk(large.case, large.violation.invariant, specimen.parts)
    assert smallest is not None
    case, _, violation = smallest
    assert violation.invariant == large.violation.invariant
    assert len(case.asked) < len(large.case.asked) and len(case.faults) <= len(large.case.faults)
    assert shrunk(case, "census", specimen.parts) is None, "another rule is another failure"


def test_seeds_reach_what_they_are_to_reach() -> None:
    cases = [draw_case(Random(seed)) for seed in range(NUM_SEEDS)]
    assert {case.num_ranks for case in cases} == {1, 2, 3, 4}
    assert {fault.kind for case in cases for fault in case.faults} == {"crash", "stop", "unlink", "unask"}
    assert {fault.moment for case in cases for fault in case.faults} == {None, *MOMENTS}
    assert {(case.mode, case.is_exclusive) for case in cases} >= {*product(set(Mode) - {Mode.SHARED}, (True, False))}
    assert {fault.who for case in cases for fault in case.faults} >= {"mover", "scheduler", "rank-0", "rank-3"}
    assert any(case.odds.withdraw for case in cases) and any(asked.stop for case in cases for asked in case.asked)
    assert any(not case.faults for case in cases)


# The world itself.


def a_world() -> tuple[World, Process]:
    world = World(Random(1))
    return world, Process(world, "p")


def test_a_channel_is_fifo_and_channels_race_each_other() -> None:
    world, process, arrived = *a_world(), list[tuple[int, int]]()
    channels = [Channel(world, process, lambda *message: arrived.append(message), (0, 1000)) for _ in range(2)]
    for number in range(50):
        for name, channel in enumerate(channels):
            channel.send(name, number)
    world.run(10_000)
    assert [number for name, number in arrived if name == 0] == list(range(50))
    assert [number for name, number in arrived if name == 1] == list(range(50))
    assert arrived != sorted(arrived, key=lambda message: message[1])


def test_a_stopped_process_hears_everything_later_and_a_dead_one_nothing() -> None:
    world, process, arrived = *a_world(), list[object]()
    for number in range(3):
        world.at(number, process, arrived.append, number)
    process.stop()
    world.at(10, None, process.go_on)
    world.at(11, process, arrived.append, "late")
    world.at(12, None, process.die)
    world.at(13, process, arrived.append, "never")
    world.run(100)
    assert arrived == [0, 1, 2, "late"]


def test_the_router_core_is_the_shipped_one() -> None:
    group, _ = run_seed(0)
    assert all(type(client.choice) is Choice for client in group.router.clients)


# The page that says what finds what.

PAGE = Path(__file__).parents[2] / "docs" / "flip.md"
LETTERS = "A B C D E F G H I J1 J2 J3,K L M N O P Q R S T U V W X Y"
FAULTS = [*LETTERS.split(), *(f"Z{number}" for number in range(1, 9))]


def test_the_page_names_what_finds_each_fault() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    table = {row[0].replace(" ", ""): row[3] for row in rows if len(row) == 5 and row[0].replace(" ", "") in FAULTS}
    assert list(table) == FAULTS
    named = {fault for specimen in SPECIMENS for fault in re.findall(r"\(([A-Z][\d, A-Z]*)\)$", specimen.name)}
    for fault, found_by in table.items():
        if found_by.startswith("specimen "):
            assert fault in {name.replace(" ", "") for name in named}, found_by
        for file in re.findall(r"`(\w+\.py)`", found_by):
            assert list(PAGE.parents[1].glob(f"tests/**/{file}")), file


WORK_FAULTS = [f"W{number}" for number in range(1, 7)]


def test_the_page_names_the_faults_of_the_works_order_and_has_a_specimen_for_each() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    found_by = {row[0]: row[3] for row in rows if len(row) == 5 and row[0] in WORK_FAULTS}
    named = {fault for specimen in SPECIMENS for fault in re.findall(r"\((W\d)\)$", specimen.name)}
    assert list(found_by) == WORK_FAULTS == sorted(named)
    assert all(text.startswith(f"specimen {fault}") for fault, text in found_by.items())


def test_the_page_has_the_table_of_ways() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    phases = {phase.value for phase in Phase}
    found = {row[0]: row[1:] for row in rows if len(row) == 1 + len(Verdict) and row[0] in phases}
    assert found == {phase.value: [WAYS[phase, verdict].value for verdict in Verdict] for phase in Phase}
