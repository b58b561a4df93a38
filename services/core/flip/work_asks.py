"""What a flip's work asks of whoever has the memory: one thing at a time, by name and number. Values.

A batch is a part of the pool's blocks with few enough live ones; where both layouts' pools are backed, batch 0 is all
of them. Asks that end in a wait for other ranks are in `GROUP_ASKS`: where one of them breaks off nobody knows how far
the others came. All others are this rank's alone, and one that fails has a reason.
"""

from dataclasses import dataclass
from enum import Enum

from services.core.ids import LayoutKind


@dataclass(frozen=True, slots=True)
class LookForRoom:
    """There is a plan for this flip, and what it needs can be had now; nothing is touched."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Keep a batch's own live rows of the other layout beside the pools, and find what goes where."""

    batch: int
    toward: LayoutKind


@dataclass(frozen=True, slots=True)
class PassRows:
    """Send a batch's rows to the ranks that have them in the layout `toward`, and take those that come."""

    batch: int
    toward: LayoutKind


@dataclass(frozen=True, slots=True)
class CompareRows:
    """Compare what both ends of every pair saw of a batch."""

    batch: int
    toward: LayoutKind


@dataclass(frozen=True, slots=True)
class TrimPages:
    """Give up the pages that a batch has in the pool of `layout`."""

    batch: int
    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Take pages for a batch in the pool of `toward`, write what has come and add it up where it lies."""

    batch: int
    toward: LayoutKind


@dataclass(frozen=True, slots=True)
class WriteKeptRows:
    """Take pages for a batch in the pool of `layout` again, write what was kept and add it up where it lies."""

    batch: int
    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class TradePages:
    """Exchange pages of weights with all ranks, from the other layout's to those of `toward`."""

    toward: LayoutKind
    undoes: bool = False
    """Whether it takes back, in reverse, what was traded away from `toward`."""


@dataclass(frozen=True, slots=True)
class CheckWeights:
    """Compare every piece of a layout's weights, where it lies, with what was loaded."""

    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class FillWeights:
    """Copy a layout's image into the arena and compare it where it lies."""

    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class HaveWeights:
    """A layout's weights are to be whole here, whatever that takes, without a peer; well at once where they are."""

    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class KeepRows:
    """A layout is in force from now on: its rows must be here, whatever the other pool has is forgotten."""

    layout: LayoutKind


class About(Enum):
    """What a verdict of the group is on."""

    READY = "ready"
    READ = "read"
    ROWS = "rows"
    TRIMMED = "trimmed"
    WRITTEN = "written"
    TRIMMED_BACK = "trimmed back"
    WRITTEN_BACK = "written back"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Agree:
    """Hear whether every rank is well, and mean the same plan and the same place in it."""

    about: About
    failure: str
    """Why this rank is not; empty: it is."""
    batch: int = 0


Ask = (
    LookForRoom
    | ReadRows
    | PassRows
    | CompareRows
    | TrimPages
    | WriteRows
    | WriteKeptRows
    | TradePages
    | CheckWeights
    | FillWeights
    | HaveWeights
    | KeepRows
    | Agree
)
GROUP_ASKS = (PassRows, CompareRows, TradePages, Agree)
