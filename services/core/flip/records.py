"""What the mover writes down of an attempt at a flip: that it began, that its quorum held, how it ended. Values."""

from dataclasses import dataclass

from services.core.flip.messages import FlipOutcome
from services.core.ids import FlipId, Generation

FlipKey = tuple[Generation, FlipId]


@dataclass(frozen=True, slots=True)
class Armed:
    """The attempt began."""

    key: FlipKey


@dataclass(frozen=True, slots=True)
class Entered:
    """The quorum held; from here on everyone follows through."""

    key: FlipKey
    round: int


@dataclass(frozen=True, slots=True)
class Concluded:
    """The attempt ended."""

    key: FlipKey
    outcome: FlipOutcome
    reason: str


Record = Armed | Entered | Concluded
