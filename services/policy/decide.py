"""PP or TP now, and why. Pure: a signal in, an advice out; it never acts.

The rule counts prompt tokens that are admitted and not yet computed: enough of them pay for a flip to PP; when they
are worked off, decoding rows want TP. Dwell keeps layouts apart, backoff keeps abandoned flips apart, and an idle group
goes back to its resting layout. Every advice, also to stay, has a reason with its inputs.
"""

from dataclasses import dataclass
from enum import Enum

from services.core.ids import LayoutKind

MAX_BACKOFF_DOUBLINGS = 6
"""Backoff after abandoned flips stops growing at 2**6 times the dwell."""


class PolicyMode(Enum):
    """Who decides."""

    AUTO = "auto"
    MANUAL = "manual"
    PINNED_PP = "pp"
    PINNED_TP = "tp"


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """The numbers of the rule, from the deployment's settings."""

    prefill_threshold_tokens: int
    """Uncomputed prompt tokens that call for PP."""
    release_threshold_tokens: int
    """Below this PP has done its work; under the threshold, so that the two do not chatter."""
    min_dwell_s: float
    """A layout is kept at least this long."""
    rest_s: float
    """An idle group goes to the resting layout after this long."""
    resting_layout: LayoutKind


@dataclass(frozen=True, slots=True)
class LoadSignal:
    """The scheduler's view at one instant."""

    layout: LayoutKind
    uncomputed_prefill_tokens: int
    decode_rows: int
    queued_requests: int
    since_flip_s: float
    """Since the last committed flip, or the start of the generation."""
    since_attempt_s: float
    """Since the last attempt ended, however it ended."""
    abandoned_in_a_row: int
    idle_s: float
    """Since the group last had a request; 0 while it has one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the layout should be. `shape` is the reason without its digits: it changes when the kind of reason does."""

    layout: LayoutKind
    reason: str
    waits: bool = False
    """Whether it may change by time alone: a clock of the rule runs."""

    @property
    def shape(self) -> str:
        """The reason with its digits removed."""
        return "".join(char for char in self.reason if not char.isdigit())


def advise(mode: PolicyMode, rules: PolicyRules, signal: LoadSignal) -> Advice:
    """The layout wanted under `mode` for `signal`."""
    match mode:
        case PolicyMode.MANUAL:
            return Advice(signal.layout, "manual: flips by hand alone")
        case PolicyMode.PINNED_PP:
            return _held_back(rules, signal, Advice(LayoutKind.PP, "pinned to PP"))
        case PolicyMode.PINNED_TP:
            return _held_back(rules, signal, Advice(LayoutKind.TP, "pinned to TP"))
        case PolicyMode.AUTO:
            wanted = _wanted(rules, signal)
            if wanted.layout is not signal.layout and signal.since_flip_s < rules.min_dwell_s:
                return Advice(
                    signal.layout,
                    f"dwell: {signal.since_flip_s:.1f} s of {rules.min_dwell_s:g} s, then {wanted.reason}",
                    waits=True,
                )
            return _held_back(rules, signal, wanted)


def _wanted(rules: PolicyRules, signal: LoadSignal) -> Advice:
    """What the load alone asks for."""
    waiting, rows = signal.uncomputed_prefill_tokens, signal.decode_rows
    if waiting == 0 and rows == 0:
        away = signal.layout is not rules.resting_layout
        if away and signal.idle_s >= rules.rest_s:
            return Advice(rules.resting_layout, f"rest: idle for {signal.idle_s:.0f} s")
        return Advice(signal.layout, "idle", waits=away)
    if waiting >= rules.prefill_threshold_tokens:
        return Advice(
            LayoutKind.PP,
            f"prefill: {waiting} uncomputed prompt tokens, threshold {rules.prefill_threshold_tokens}, "
            f"{rows} rows decode",
        )
    if signal.layout is LayoutKind.PP and waiting >= rules.release_threshold_tokens:
        return Advice(
            LayoutKind.PP,
            f"prefill goes on: {waiting} uncomputed prompt tokens, released under {rules.release_threshold_tokens}",
        )
    if rows > 0:
        return Advice(LayoutKind.TP, f"decode: {rows} rows decode, {waiting} uncomputed prompt tokens")
    return Advice(signal.layout, f"light: {waiting} uncomputed prompt tokens, no row decodes")


def _held_back(rules: PolicyRules, signal: LoadSignal, wanted: Advice) -> Advice:
    """Waits longer after each flip that was abandoned in a row."""
    if wanted.layout is signal.layout or signal.abandoned_in_a_row == 0:
        return wanted
    backoff_s = max(rules.min_dwell_s, 1.0) * 2 ** min(signal.abandoned_in_a_row - 1, MAX_BACKOFF_DOUBLINGS)
    if signal.since_attempt_s >= backoff_s:
        return wanted
    return Advice(
        signal.layout,
        f"backoff: {signal.since_attempt_s:.1f} s of {backoff_s:g} s after {signal.abandoned_in_a_row} "
        f"abandoned flips, then {wanted.reason}",
        waits=True,
    )
