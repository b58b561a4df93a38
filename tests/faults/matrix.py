"""The matrix of real faults: who is struck, how, in which state of which flip, and what the documents allow. Pure.

docs/flip.md, *What dies when, and what happens*, is what `expected` says once more, cell by cell.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from services.core.ids import LayoutKind, Rank
from services.mesh.debug.breakpoints import HoldPoint
from services.mesh.settings.paths import process_name

PP, TP = LayoutKind.PP, LayoutKind.TP
NUM_RANKS = 2
LAST = Rank(NUM_RANKS - 1)


class Fault(Enum):
    """What is done to a process."""

    KILL = "kill"
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT before any deadline that watches it."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT, if it still is there, after the deadline that watches it."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the mesh."""

    service: str
    rank: Rank | None = None

    @property
    def name(self) -> str:
        return process_name(self.service, self.rank)


SCHEDULER, MOVER = Victim("scheduler"), Victim("mover")
POLICY, SENTINEL, ROUTER = Victim("policy"), Victim("sentinel"), Victim("router")
RANKS = tuple(Victim("worker", Rank(rank)) for rank in range(NUM_RANKS))
WATCHED = (SCHEDULER, MOVER, *RANKS)
"""By a deadline; of the others a pause has no length that matters."""
BYSTANDERS = (POLICY, SENTINEL, ROUTER)

ALONE = "shared"
"""Each rank does a flip's work alone."""
TOGETHER = "exchange"
"""Ranks meet in it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one moment; `point` None: while no flip is pending."""

    mode: str
    point: HoldPoint | None
    target: LayoutKind
    victim: Victim
    fault: Fault

    @property
    def name(self) -> str:
        state = "serving" if self.point is None else self.point.name.lower().replace("_", "-")
        return (
            f"{self.mode}/{state}/{self.target.other.value}-{self.target.value}/{self.victim.name}/{self.fault.value}"
        )

    @property
    def holder(self) -> Victim | None:
        """Who stands at the point; of ranks the victim itself, so that it is struck there, else the last.

        Where ranks meet in the work it is the other one: then the victim stands within the work.
        """
        if self.point is None:
            return None
        if self.point.service != "worker":
            return Victim(self.point.service)
        if self.victim.rank is None:
            return Victim("worker", LAST)
        is_within = self.mode == TOGETHER and self.point is HoldPoint.WORKER_ENTERED
        return Victim("worker", Rank(LAST - self.victim.rank)) if is_within else self.victim


class Stage(Enum):
    """How far a flip is at a point."""

    UNASKED = 1
    """The mover knows nothing of it."""
    BEFORE_ENTER = 2
    ENTERED = 3
    """ENTER is journalled; the outcome has not reached the scheduler."""
    DECIDED = 4
    """The scheduler has the outcome."""
    WRITTEN = 5
    """COMMIT is in the log."""


STAGES = {
    HoldPoint.SCHEDULER_ASKING: Stage.UNASKED,
    HoldPoint.SCHEDULER_ARMING: Stage.BEFORE_ENTER,
    HoldPoint.MOVER_ARMED: Stage.BEFORE_ENTER,
    HoldPoint.WORKER_PARKED: Stage.BEFORE_ENTER,
    HoldPoint.MOVER_ASSEMBLING: Stage.BEFORE_ENTER,
    HoldPoint.WORKER_ASSEMBLING: Stage.BEFORE_ENTER,
    HoldPoint.MOVER_ENTERING: Stage.BEFORE_ENTER,
    HoldPoint.MOVER_ENTERED: Stage.ENTERED,
    HoldPoint.WORKER_ENTERED: Stage.ENTERED,
    HoldPoint.WORKER_VERIFIED: Stage.ENTERED,
    HoldPoint.MOVER_CONCLUDING: Stage.ENTERED,
    HoldPoint.MOVER_CONCLUDED: Stage.ENTERED,
    HoldPoint.SCHEDULER_OUTCOME: Stage.DECIDED,
    HoldPoint.WORKER_OUTCOME: Stage.WRITTEN,
    HoldPoint.WORKER_SWITCHED: Stage.WRITTEN,
}
"""In the order of a flip."""
MEETING = (
    HoldPoint.MOVER_ENTERING,
    HoldPoint.MOVER_ENTERED,
    HoldPoint.WORKER_ENTERED,
    HoldPoint.WORKER_VERIFIED,
    HoldPoint.WORKER_OUTCOME,
)
"""Where it matters that ranks meet in the work."""

COMMITTED, ABANDONED, REFUSED, LOST, NONE = "committed", "abandoned", "refused", "lost", "none"
"""What becomes of the flip; refused: nothing was written; lost: with its generation, or with who could have said."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the documents allow."""

    flips: frozenset[str]
    is_lost: bool = False
    """Whether the generation ends, so that requests are submitted again."""
    is_resubmitted: bool = False
    """Whether requests are submitted again; they are where the generation ends."""
    breaks_streams: bool = False
    """Whether clients get the error of a connection that broke: the router itself has gone."""
    reason: str = ""
    """What an abandonment must say."""


def cells() -> Iterator[Cell]:
    """Every cell, the watched processes first, each state in one direction before any is in the other.

    So a sweep that is stopped has seen every state, and cells of one mode stand together, which one mesh can serve.
    """
    states = [(mode, point) for mode, points in ((ALONE, (None, *STAGES)), (TOGETHER, MEETING)) for point in points]
    for turn in range(2):
        for place, (mode, point) in enumerate(states):
            for victim in WATCHED:
                yield from (Cell(mode, point, (PP, TP)[(turn + place) % 2], victim, fault) for fault in Fault)
        for place, (mode, point) in enumerate(states):
            for victim in BYSTANDERS if mode == ALONE else ():
                faults = Fault if victim == ROUTER else (Fault.KILL, Fault.PAUSE)
                yield from (Cell(mode, point, (PP, TP)[(turn + place) % 2], victim, fault) for fault in faults)


def expected(cell: Cell) -> Expected:
    """What may come of a cell."""
    commits = frozenset({NONE if cell.point is None else COMMITTED})
    if cell.fault is Fault.PAUSE or cell.victim in BYSTANDERS:
        return Expected(commits, breaks_streams=cell.victim == ROUTER and cell.fault is Fault.KILL)
    stage = None if cell.point is None else STAGES[cell.point]
    match cell.victim.service:
        case "mover":
            return _without_mover(cell, stage, commits)
        case "scheduler" if cell.fault is Fault.STOP:
            return Expected(commits, is_resubmitted=True)
        case _:
            return _without_generation(cell, stage)


def _without_mover(cell: Cell, stage: Stage | None, commits: frozenset[str]) -> Expected:
    if stage in (None, Stage.DECIDED, Stage.WRITTEN):
        return Expected(commits)
    if cell.fault is Fault.STOP:
        if stage is Stage.UNASKED:
            return Expected(frozenset({REFUSED}), reason="no mover for")
        if cell.point is HoldPoint.SCHEDULER_ARMING:
            return Expected(frozenset({ABANDONED, REFUSED}), reason="no mover for")
        if cell.mode == TOGETHER:
            return Expected(frozenset({LOST}), is_lost=True, is_resubmitted=True)
        return Expected(frozenset({ABANDONED}), reason="no mover for")
    if stage is Stage.BEFORE_ENTER:
        return Expected(frozenset({ABANDONED}), reason="asked for again before ENTER")
    return Expected(commits)


def _without_generation(cell: Cell, stage: Stage | None) -> Expected:
    """A rank, or the scheduler, is gone or counts as gone, and the generation with it."""
    is_rank = cell.victim.rank is not None
    if stage is None:
        flips = {NONE}
    elif stage is Stage.WRITTEN:
        # Who asked may have heard of the commit before the generation ended.
        flips = {COMMITTED, LOST}
    elif is_rank and stage in (Stage.UNASKED, Stage.BEFORE_ENTER):
        # The mover misses the rank, or its peers do; whichever is first.
        flips = {ABANDONED, LOST}
    elif is_rank and cell.point in _ALL_VERIFIED:
        # COMMIT may be written before the rank is missed; the first step after it, at the latest, does.
        flips = {COMMITTED, LOST}
    else:
        flips = {LOST}
    return Expected(frozenset(flips), is_lost=True, is_resubmitted=True, reason=f"rank {cell.victim.rank}")


_ALL_VERIFIED = (HoldPoint.MOVER_CONCLUDING, HoldPoint.MOVER_CONCLUDED, HoldPoint.SCHEDULER_OUTCOME)
