"""The bench's arithmetic and its table; the engines are measured where they are."""

from pathlib import Path

import pytest

from tests.unit.tools.test_acceptance import MS, S, flip
from tools.bench.machine_facts import machine_facts, package_version
from tools.bench.mesh import FlipFigures, Samples, flip_figures
from tools.bench.peers import LLAMA_CPP_INSTALL, NOT_INSTALLED, decode_name, failure_text, measure, prefill_name
from tools.bench.run import Bench, lines_of
from tools.load.own_mesh import ROOT


def test_samples_are_shown_with_their_spread() -> None:
    assert Samples((3.0, 1.0, 2.0)).median == 2.0
    assert Samples((3.0, 1.0, 2.04)).shown() == "2.0 (1.0-3.0)"


def test_flips_are_measured_by_direction_beside_what_did_not_flip() -> None:
    usual = list(range(0, 2 * S, 50 * MS))
    arrived = [*usual, *range(usual[-1] + 250 * MS, 4 * S, 50 * MS)]
    flips = [flip(1, "PP", usual[-1] + 20 * MS), flip(2, "TP", 3 * S, state="abandoned")]
    figures = flip_figures(flips, [arrived], 0, 1900 * MS)
    assert figures.pauses_ms == {"TP to PP": [8.0]}
    assert figures.added_ms == {"TP to PP": [200.0]}
    assert set(figures.control_added_ms) == {0.0}
    assert figures.num_abandoned == 1


def test_the_table_has_layouts_engines_and_ratios() -> None:
    rates = {
        prefill_name(512): {"PP": Samples((300.0,)), "TP": Samples((200.0,))},
        decode_name(8): {"PP": Samples((50.0,)), "TP": Samples((90.0,))},
    }
    theirs = {prefill_name(512): Samples((150.0,)), decode_name(8): Samples((180.0,))}
    flips = FlipFigures({"TP to PP": [8.0]}, {"TP to PP": [20.0]}, [1.0], num_abandoned=1)
    bench = Bench(machine_facts(ROOT), "some", 2, 1, 1, rates, flips, [4.0], {"router": 0.5, "worker-0": 0.25})
    bench.peers = {"other": theirs, "absent": "not installed (module absent)"}
    lines = list(lines_of(bench))
    table = {line.split("  ")[0]: line.split() for line in lines}
    assert table["prefill 512"][-1] == "2.00"
    assert table["decode, 8 streams"][-1] == "0.50"
    assert "absent: not installed (module absent)" in lines
    assert any("1 flips did not commit" in line for line in lines)
    assert lines[-1] == "at rest: 0.8 % of a core in all, most in router (0.5 %)"


def test_an_engine_is_measured_as_often_as_asked_and_its_first_sample_is_left_out() -> None:
    prefilled: list[int] = []
    figures = measure(lambda ids: prefilled.append(len(ids)), lambda streams, tokens: 0.5, repeat=2)
    assert {name: len(samples) for name, samples in figures.items()} == dict.fromkeys(figures, 2)
    assert prefilled == [512] * 3 + [2048] * 3
    assert figures[decode_name(1)] == [190.0, 190.0]
    assert figures[decode_name(8)] == [1520.0, 1520.0]


def test_an_engine_without_figures_says_what_to_do() -> None:
    missing = failure_text("llama_cpp", NOT_INSTALLED, "")
    assert missing == f"not installed (needs llama_cpp): {LLAMA_CPP_INSTALL}"
    assert failure_text("llama_cpp", -11, "noise").startswith(
        "failed: ended by SIGSEGV; a build for another processor?"
    )
    assert failure_text("transformers", 1, "Traceback\nValueError: of another architecture") == (
        "failed: ValueError: of another architecture"
    )


def test_a_figure_comes_with_its_machine(tmp_path: Path) -> None:
    facts = machine_facts(ROOT)
    assert facts.cores >= 1
    assert facts.memory_bytes > 2**28
    assert "flipmesh" in facts.versions
    assert machine_facts(tmp_path).commit == "unknown"
    assert package_version("no-such-package-at-all") is None


@pytest.mark.parametrize(("count", "name"), [(1, "decode, 1 stream"), (8, "decode, 8 streams")])
def test_names(count: int, name: str) -> None:
    assert decode_name(count) == name
