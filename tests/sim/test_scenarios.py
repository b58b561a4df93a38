"""What happens in each scenario is what its file says; `python -m tests.sim.scenario --rewrite` writes it anew."""

from pathlib import Path

import pytest

from tests.sim.scenario import FOLDER, parse, split, transcript

SCENARIOS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_goes_as_written(path: Path) -> None:
    case, expected = split(path)
    assert transcript(case) == expected, "if it is meant: python -m tests.sim.scenario --rewrite"
    assert "violated" not in expected


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 5


@pytest.mark.parametrize("line", ["flop tp at 5", "ask a prompt 3 output 1 colour red", "blocks many", "flip tp now 5"])
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse(line)
