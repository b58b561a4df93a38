"""The oracle's judgement: right, near ties counted and capped, wrong after the flip, no verdict before it."""

import math

import pytest

from tools.load.load import Heard
from tools.oracle.asks import asks_of
from tools.oracle.compare import EPSILON, MARGIN_BOUND, Difference, first_difference, judge
from tools.oracle.positive_control import Shown, blind_spots
from tools.oracle.run import EXIT_CODES, Probe, Verdict, as_json, as_text, conclude

CONTROL = Heard([1, 2, 3, 4], [5.0, EPSILON / 2, 5.0, 5.0], [10, 20, 50, 60], " 13, 14")


def heard(*token_ids: int) -> Heard:
    return Heard(list(token_ids), [5.0, EPSILON / 2, 5.0, 5.0, 5.0][: len(token_ids)])


def probe(failures: tuple[str, ...] = (), invalid: tuple[str, ...] = ()) -> Probe:
    return Probe("pp", 7, (2, 2), 9, 0.01, 0.1, (), failures, invalid)


def test_equal_answers_do_not_differ() -> None:
    assert first_difference(0, CONTROL, heard(1, 2, 3, 4)) is None


@pytest.mark.parametrize(
    ("answer", "position", "is_near_tie"),
    [
        ((1, 2, 9, 4), 2, False),
        ((1, 9, 9, 9), 1, True),
        ((1, 2, 3), 3, False),
        ((1, 2, 3, 4, 5), 4, False),
        ((), 0, False),
    ],
)
def test_the_first_difference_and_the_controls_margin_there(
    answer: tuple[int, ...], position: int, is_near_tie: bool
) -> None:
    """An answer cut short or too long is wrong however near the tokens were."""
    difference = first_difference(3, CONTROL, heard(*answer))
    assert difference is not None
    assert (difference.stream, difference.position, difference.is_near_tie) == (3, position, is_near_tie)


@pytest.mark.parametrize("moved", [2 * MARGIN_BOUND, -2 * MARGIN_BOUND, math.nan])
def test_a_margin_that_moved_is_a_difference_although_the_ids_are_the_same(moved: float) -> None:
    """What damaged rows do first: the model says the same, less or more sure of it."""
    answer = heard(1, 2, 3, 4)
    answer.margins[2] += moved
    difference = first_difference(0, CONTROL, answer)
    assert difference is not None and difference.position == 2 and not difference.is_near_tie
    failures, _ = judge([difference], [1])
    assert len(failures) == 1 and "margin" in failures[0]


def test_rounding_moves_margins_less_than_counts() -> None:
    answer = heard(1, 2, 3, 4)
    answer.margins = [margin + MARGIN_BOUND / 2 for margin in answer.margins]
    assert first_difference(0, CONTROL, answer) is None


def test_an_instrument_that_missed_damage_is_not_believed() -> None:
    seen, nothing = Shown(0, "BLOCK", "block 3", 1), Shown(1, "HEAD", "", None)
    assert blind_spots([seen, nothing]) == []
    assert len(blind_spots([seen, Shown(1, "ROW", "row 5", None)])) == 1
    assert len(blind_spots([nothing])) == 1, "no damage at all proves nothing"


def test_a_wrong_token_after_the_flip_fails_and_one_before_it_invalidates() -> None:
    failures, invalid = judge([Difference(0, 5, 2.0), Difference(1, 1, 2.0)], [3, 3])
    assert failures == ["stream 0 differs at token 5, margin 2.0000: after its flip at token 3"]
    assert invalid == ["stream 1 differs at token 1, margin 2.0000: before its flip at token 3"]


@pytest.mark.parametrize(
    ("num_streams", "num_ties", "fails"), [(1, 1, False), (8, 2, False), (8, 3, True), (2, 2, True)]
)
def test_near_ties_are_allowed_up_to_a_share(num_streams: int, num_ties: int, fails: bool) -> None:
    ties = [Difference(stream, 5, EPSILON / 2) for stream in range(num_ties)]
    failures, invalid = judge(ties, [3] * num_streams)
    assert (bool(failures), invalid) == (fails, [])


@pytest.mark.parametrize(
    ("invalid", "probes", "verdict", "code"),
    [
        ([], [probe(), probe()], Verdict.PASS, 0),
        ([], [probe(), probe(failures=("wrong",))], Verdict.FAIL, 1),
        ([], [probe(failures=("wrong",), invalid=("no commit",))], Verdict.INVALID, 2),
        (["the control differs from itself"], [], Verdict.INVALID, 2),
    ],
)
def test_the_verdict_and_its_exit_code(invalid: list[str], probes: list[Probe], verdict: Verdict, code: int) -> None:
    report = conclude(invalid, [CONTROL], probes)
    assert (report.verdict, EXIT_CODES[report.verdict]) == (verdict, code)
    assert bool(report.reasons) == (verdict is not Verdict.PASS)
    assert as_text(report).splitlines()[-1] == verdict.value == as_json(report)["verdict"]


def test_the_longest_gap_of_a_stream() -> None:
    assert (CONTROL.longest_gap_ns(), heard(1).longest_gap_ns()) == (30, 0)


def test_no_prompt_begins_like_another() -> None:
    asks = asks_of(3, 50)
    assert not any(one.prompt[:9] == other.prompt[:9] for one in asks for other in asks if one is not other)
    assert len({ask.prompt for ask in asks}) == 3 and all(ask.max_tokens == 50 for ask in asks)
