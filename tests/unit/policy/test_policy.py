"""The policy's rule, one cause at a time, and that it never chatters."""

from dataclasses import replace

import pytest

from services.core.ids import LayoutKind
from services.policy.decide import LoadSignal, PolicyMode, PolicyRules, advise

PP, TP = LayoutKind.PP, LayoutKind.TP
RULES = PolicyRules(
    prefill_threshold_tokens=1000, release_threshold_tokens=250, min_dwell_s=3.0, rest_s=10.0, resting_layout=TP
)
CALM = LoadSignal(
    layout=TP,
    uncomputed_prefill_tokens=0,
    decode_rows=4,
    queued_requests=0,
    since_flip_s=100.0,
    since_attempt_s=100.0,
    abandoned_in_a_row=0,
    idle_s=0.0,
)
BUSY = replace(CALM, uncomputed_prefill_tokens=2000)


@pytest.mark.parametrize(
    ("signal", "layout", "reason"),
    [
        (CALM, TP, "decode: 4 rows"),
        (BUSY, PP, "prefill: 2000 uncomputed prompt tokens, threshold 1000"),
        (replace(BUSY, since_flip_s=1.0), TP, "dwell: 1.0 s of 3 s, then prefill"),
        (replace(BUSY, layout=PP, uncomputed_prefill_tokens=300), PP, "prefill goes on: 300"),
        (replace(BUSY, layout=PP, uncomputed_prefill_tokens=200), TP, "decode: 4 rows decode, 200"),
        (replace(CALM, layout=PP, decode_rows=0, uncomputed_prefill_tokens=9), PP, "light"),
        (replace(CALM, layout=PP, decode_rows=0, idle_s=5.0), PP, "idle"),
        (replace(CALM, layout=PP, decode_rows=0, idle_s=11.0), TP, "rest: idle for 11 s"),
        (replace(BUSY, abandoned_in_a_row=2, since_attempt_s=5.0), TP, "backoff: 5.0 s of 6 s after 2 abandoned"),
        (replace(BUSY, abandoned_in_a_row=2, since_attempt_s=6.0), PP, "prefill"),
    ],
)
def test_one_cause_at_a_time(signal: LoadSignal, layout: LayoutKind, reason: str) -> None:
    advice = advise(PolicyMode.AUTO, RULES, signal)
    assert advice.layout is layout
    assert reason in advice.reason


def test_manual_stays_whatever_the_load() -> None:
    assert advise(PolicyMode.MANUAL, RULES, BUSY).layout is TP
    assert advise(PolicyMode.MANUAL, RULES, replace(CALM, layout=PP)).layout is PP


def test_pinned_goes_there_without_dwell() -> None:
    assert advise(PolicyMode.PINNED_PP, RULES, replace(CALM, since_flip_s=0.0)).layout is PP
    assert advise(PolicyMode.PINNED_TP, RULES, replace(BUSY, layout=PP, since_flip_s=0.0)).layout is TP


def test_backoff_is_bounded() -> None:
    late = replace(BUSY, abandoned_in_a_row=1000, since_attempt_s=3.0 * 2**6)
    assert advise(PolicyMode.AUTO, RULES, late).layout is PP


def test_a_load_at_the_threshold_does_not_chatter() -> None:
    layout, flips = TP, 0
    for tick in range(1000):
        load = 1000 if tick % 2 else 260
        now = replace(BUSY, layout=layout, uncomputed_prefill_tokens=load)
        wanted = advise(PolicyMode.AUTO, RULES, now).layout
        flips += wanted is not layout
        layout = wanted
    assert flips == 1


def test_the_shape_of_a_reason_has_no_digits() -> None:
    one, other = (
        advise(PolicyMode.AUTO, RULES, replace(BUSY, uncomputed_prefill_tokens=load)) for load in (1500, 9000)
    )
    assert one.reason != other.reason
    assert one.shape == other.shape
