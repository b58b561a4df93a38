"""Whether an answer is its control's: token by token, and by how sure the model was of each. Pure.

Ids alone see little: a prompt whose answer is determined gives the control's ids although rows of the cache are
damaged. So margins are compared as well, at every token up to the first that differs: rounding moves them by a known
little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.load.load import Heard

EPSILON = 1e-3
"""Logits. Layouts sum in another order; where the control's best two tokens are closer than this, either is right."""
MARGIN_BOUND = 1e-3
"""Logits, by which a margin may differ from the control's. Between layouts and batch sizes margins of greedy answers
differed by at most 4e-5 (SmolLM2-135M on CPUs); damaged rows move them by 0.01 and more (positive_control)."""
MAX_DIVERGED_SHARE = 0.25
"""Of the streams of one probe: more near ties than this are no accident of rounding. One is always allowed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of one stream that is not the control's, or that the model was not as sure of."""

    stream: int
    position: int
    margin: float
    """Of the control's two best there, in logits."""
    moved: float | None = None
    """By how much the margin differs, where the ids are the same; None: the ids differ."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.moved is None and self.margin < EPSILON

    def words(self) -> str:
        """For people."""
        what = "differs" if self.moved is None else f"is the control's with a margin {self.moved:.4f} off"
        return f"stream {self.stream} {what} at token {self.position}, margin {self.margin:.4f}"


def first_difference(stream: int, control: Heard, heard: Heard) -> Difference | None:
    """Where two answers part, by ids or by margins, or None where they do not."""
    pairs = zip(control.token_ids, heard.token_ids, strict=False)
    for position, (expected, got) in enumerate(pairs):
        margin = control.margins[position]
        if expected != got:
            return Difference(stream, position, margin)
        moved = abs(margin - heard.margins[position])
        if not moved <= MARGIN_BOUND:
            return Difference(stream, position, margin, moved)
    if len(control.token_ids) != len(heard.token_ids):
        return Difference(stream, min(len(control.token_ids), len(heard.token_ids)), math.inf)
    return None


def judge(differences: Sequence[Difference], flip_points: Sequence[int]) -> tuple[list[str], list[str]]:
    """(failures, what makes the probe invalid) of one probe's differences from its control."""
    failures, invalid = [], []
    near_ties = [difference for difference in differences if difference.is_near_tie]
    for difference in differences:
        flip_point = flip_points[difference.stream]
        if difference.is_near_tie:
            continue
        if difference.position < flip_point:
            invalid.append(f"{difference.words()}: before its flip at token {flip_point}")
        else:
            failures.append(f"{difference.words()}: after its flip at token {flip_point}")
    allowed = max(1, int(len(flip_points) * MAX_DIVERGED_SHARE))
    if len(near_ties) > allowed:
        failures.append(f"{len(near_ties)} streams part at near ties, at most {allowed} may")
    return failures, invalid


def control_faults(first: Sequence[Heard], second: Sequence[Heard]) -> list[str]:
    """Why two runs of the control cannot be one: streams that broke, or that differ from themselves."""
    faults = [
        f"control stream {stream}: {heard.error}" for stream, heard in enumerate([*first, *second]) if heard.error
    ]
    for stream, (one, other) in enumerate(zip(first, second, strict=True)):
        if (difference := first_difference(stream, one, other)) is not None:
            faults.append(f"the control differs from itself: {difference.words()}")
    return faults
