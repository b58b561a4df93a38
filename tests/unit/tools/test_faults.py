"""The fault sweep's own parts: which cells there are, what is kept of them, and the table."""

from pathlib import Path

import pytest

from services.mesh.debug.breakpoints import HoldPoint
from tests.faults import table
from tests.faults.fault_mesh import MAX_NEW_DESCRIPTORS, Holdings
from tests.faults.matrix import (
    ABANDONED,
    ALONE,
    COMMITTED,
    MEETING,
    STAGES,
    TOGETHER,
    Cell,
    Fault,
    Stage,
    cells,
    expected,
)
from tests.faults.scenes import SCENES

CELLS = {cell.name: cell for cell in cells()}


def test_every_state_has_every_process_struck_in_both_directions() -> None:
    assert len(CELLS) == len(list(cells())), "names are unique"
    assert set(STAGES) == set(HoldPoint)
    assert list(STAGES.values()) == sorted(STAGES.values(), key=lambda stage: stage.value), "in a flip's order"
    watched = {"scheduler", "mover", "worker-0", "worker-1"}
    for point in (None, *HoldPoint):
        struck = {(cell.victim.name, cell.fault, cell.target) for cell in CELLS.values() if is_at(cell, ALONE, point)}
        assert {name for name, _, _ in struck} == watched | {"policy", "sentinel", "router"}
        assert len(struck) == 2 * (3 * (len(watched) + 1) + 2 * 2)
    for point in MEETING:
        assert sum(is_at(cell, TOGETHER, point) for cell in CELLS.values()) == 2 * 3 * len(watched)
    assert not {scene.name for scene in SCENES} & CELLS.keys()


def is_at(cell: Cell, mode: str, point: HoldPoint | None) -> bool:
    return (cell.mode, cell.point) == (mode, point)


def test_who_stands_at_a_point() -> None:
    for name, holder in (
        ("shared/worker-entered/tp-pp/worker-0/kill", "worker-0"),
        ("exchange/worker-entered/tp-pp/worker-0/kill", "worker-1"),
        ("shared/worker-entered/tp-pp/mover/kill", "worker-1"),
        ("shared/mover-entered/tp-pp/worker-0/kill", "mover"),
    ):
        stands = CELLS[name].holder
        assert stands is not None and stands.name == holder
    assert CELLS["shared/serving/tp-pp/worker-0/kill"].holder is None


def test_what_the_documents_allow() -> None:
    """The table *What dies when* of docs/flip.md, at a few of its corners."""
    for cell in CELLS.values():
        if cell.fault is Fault.PAUSE:
            wanted = expected(cell)
            assert wanted.flips <= {COMMITTED, "none"} and not (wanted.is_lost or wanted.is_resubmitted)
        if cell.victim.name == "mover" and cell.fault is Fault.KILL and cell.point is not None:
            is_abandoned = STAGES[cell.point] is Stage.BEFORE_ENTER
            assert expected(cell).flips == {ABANDONED if is_abandoned else COMMITTED}, cell.name
        assert expected(cell).breaks_streams == (cell.victim.name == "router" and cell.fault is Fault.KILL)


def result(name: str, is_good: bool = True, **streams: int) -> table.Result:
    return table.Result(name, is_good, "abc", 2.0, COMMITTED, "", streams, [0.1, 0.3])


def test_results_outlive_a_stop_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "results.jsonl"
    first, second = result("one", is_good=False), result("two", unchanged=4)
    for one in (first, second, result("one")):
        table.append(path, one)
    with path.open("a") as file:
        file.write('{"name": "three", "is_go')
    assert table.read(path) == {"one": result("one"), "two": second}
    assert table.read(tmp_path / "none") == {}


def test_the_table_counts_what_clients_saw() -> None:
    names = ("shared/serving/tp-pp/mover/kill", "shared/mover-armed/tp-pp/mover/kill", "journal/gone")
    results = [result(names[0], unchanged=4), result(names[1], is_good=False, unchanged=1), result(names[2], again=2)]
    rows = table.as_rows(results)
    assert [(row["group"], row["cells"], row["failed"]) for row in rows] == [
        ("shared: mover, kill", 2, [names[1]]),
        ("journal/gone", 1, []),
    ]
    assert (rows[0]["streams"], rows[0]["flips"]) == ({"unchanged": 5}, {COMMITTED: 2})
    assert (rows[0]["pause_p50_s"], rows[0]["pause_max_s"]) == (0.2, 0.3)
    assert "| shared: mover, kill | 2 | 1 | 2 committed | 5 unchanged | 0.2 / 0.3 | - |" in table.as_markdown(rows)


@pytest.mark.parametrize(
    ("later", "found"),
    [
        (Holdings({"a": 1, "b": 2}, {7: 10}), []),
        (Holdings({"a": 1, "b": 2}, {7: 10 + MAX_NEW_DESCRIPTORS}), []),
        (Holdings({"a": 1, "b": 2}, {7: 11 + MAX_NEW_DESCRIPTORS}), ["process 7 had 10 descriptors and has 14"]),
        (Holdings({"a": 2, "b": 1}, {}), ["1 processes more: a", "1 processes fewer: b"]),
    ],
)
def test_leaks_are_told(later: Holdings, found: list[str]) -> None:
    assert Holdings({"a": 1, "b": 2}, {7: 10}).leaks(later) == found
