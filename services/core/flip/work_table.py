"""What each answer to an ask of a flip's work leads to, in each phase of it: a table with a row for every pair.

A phase says what would have to be undone. What nobody can say for certain is *broken*: `restored` is a claim, and only
a way back that answered well makes it. Pure values; the programs that go by them are in `work`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Phase(Enum):
    """How far a rank's work is, by what lies behind it."""

    READY = "ready"
    """Nothing is touched."""
    ROWS = "rows"
    """Batches before this one may have crossed; of this one the rows of the layout before are where they were."""
    TRIMMED = "trimmed"
    """Pages of this batch may have been given up: what was kept of it beside the pools is the only copy."""
    WEIGHTS = "weights"
    """All rows are right under the layout after; the weights may be neither layout's."""
    RETURNING = "returning"
    """On the way back, or behind an outcome: there is no other way from here."""


class Verdict(Enum):
    """What came of an ask."""

    WELL = "well"
    FAILED_HERE = "failed here"
    """It was not done, or found wrong, and this rank knows why."""
    FAILED_ELSEWHERE = "failed elsewhere"
    """The group's verdict, against it because of another rank."""
    UNKNOWN = "unknown"
    """It broke off among ranks: what has come of it on any of them cannot be said."""


class Way(Enum):
    """What an answer leads to."""

    GO_ON = "go on"
    STAY = "stay"
    """Restored by doing nothing."""
    ROWS_BACK = "rows back"
    """Batches that crossed come back, the last one first."""
    BATCH_BACK = "batch back"
    """The rows that were kept of this batch are written where they were, then as ROWS_BACK."""
    WEIGHTS_BACK = "weights back"
    """The weights of the layout before are had back, then as ROWS_BACK."""
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Answer:
    """To one ask."""

    verdict: Verdict
    reason: str = ""
    """Why it is not well."""


WELL = Answer(Verdict.WELL)

WayTable = Mapping[tuple[Phase, Verdict], Way]


def _rows_of(phase: Phase, failed: Way) -> dict[tuple[Phase, Verdict], Way]:
    return {
        (phase, Verdict.WELL): Way.GO_ON,
        (phase, Verdict.FAILED_HERE): failed,
        (phase, Verdict.FAILED_ELSEWHERE): failed,
        (phase, Verdict.UNKNOWN): Way.BROKEN,
    }


WAYS: WayTable = MappingProxyType(
    _rows_of(Phase.READY, Way.STAY)
    | _rows_of(Phase.ROWS, Way.ROWS_BACK)
    | _rows_of(Phase.TRIMMED, Way.BATCH_BACK)
    | _rows_of(Phase.WEIGHTS, Way.WEIGHTS_BACK)
    | _rows_of(Phase.RETURNING, Way.BROKEN)
)
