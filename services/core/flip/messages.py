"""What is said during a flip, as values: events in, effects out, for the coordinator and for each participant.

The two machines are tables in `flip_coordinator` and `flip_participant`; they have no IO and no clock of their own, so
the services and the simulator run the same code. A pair of (state, event) that is in no table is an error, never
ignored by accident.
"""

from dataclasses import dataclass
from enum import Enum

from services.core.ids import FlipId, Rank


class FlipProtocolError(RuntimeError):
    """An event that its state has no row for; the message names both."""


class FlipOutcome(Enum):
    """How an attempt ended."""

    COMMITTED = "committed"
    ABANDONED = "abandoned"
    """Nothing irreversible had happened."""
    RESTORED = "restored"
    """After ENTER; the layout that was active has its bytes."""
    BROKEN = "broken"
    """After ENTER, and what was active is not whole everywhere: the generation ends."""


@dataclass(frozen=True, slots=True)
class FlipDeadlines:
    """Bounds of the phases; one clock runs at a time."""

    park_ns: int
    presence_ns: int
    data_plane_ns: int
    max_rounds: int = 3
    """Passes through the gate of one attempt before it abandons."""


# Events of the coordinator, each from one rank but the last.


@dataclass(frozen=True, slots=True)
class RankParked:
    """It executed the log up to the FLIP entry."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class RankPresent:
    """At the entry, quiescent, owing nothing, in this round."""

    rank: Rank
    round: int
    fits: bool
    refusal: str
    plan_hash: int


@dataclass(frozen=True, slots=True)
class RankNotReady:
    """Not there yet; the last reason is shown if the attempt expires."""

    rank: Rank
    reason: str


@dataclass(frozen=True, slots=True)
class RankWithdrew:
    """Presence of this round taken back."""

    rank: Rank
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankVerified:
    """Its part is moved and checked."""

    rank: Rank
    bytes_moved: int = 0
    rows_moved: int = 0


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Its part failed; `restored` says whether the active layout has its bytes there."""

    rank: Rank
    reason: str
    restored: bool


@dataclass(frozen=True, slots=True)
class RankLost:
    """Its stream ended."""

    rank: Rank
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The clock that runs has expired."""


CoordinatorEvent = (
    RankParked | RankPresent | RankNotReady | RankWithdrew | RankVerified | RankFailed | RankLost | DeadlineReached
)


# Effects of the coordinator, to be carried out in order.


@dataclass(frozen=True, slots=True)
class SendAssemble:
    """To every rank: announce presence in this round."""

    round: int


@dataclass(frozen=True, slots=True)
class JournalEnter:
    """Make ENTER durable before the next effect."""

    round: int


@dataclass(frozen=True, slots=True)
class SendEnter:
    """To every rank: the quorum holds."""

    round: int


@dataclass(frozen=True, slots=True)
class SendDisarm:
    """To every rank: stand down; the outcome comes by the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """Journal the outcome, then tell the scheduler."""

    outcome: FlipOutcome
    reason: str
    bytes_moved: int = 0
    rows_moved: int = 0


CoordinatorEffect = SendAssemble | JournalEnter | SendEnter | SendDisarm | Conclude


# Events of a participant.


@dataclass(frozen=True, slots=True)
class EntryReached:
    """The FLIP entry is executed: every step before it is done on this rank."""

    flip_id: FlipId
    fits: bool
    refusal: str
    plan_hash: int


@dataclass(frozen=True, slots=True)
class AssembleReceived:
    """The gate is open for this round."""

    flip_id: FlipId
    round: int


@dataclass(frozen=True, slots=True)
class EnterReceived:
    """Everyone is present: go."""

    flip_id: FlipId
    round: int


@dataclass(frozen=True, slots=True)
class DisarmReceived:
    """Stand down from the gate."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Read, seam, write and verify are done."""

    flip_id: FlipId
    bytes_moved: int
    rows_moved: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Something in between failed."""

    flip_id: FlipId
    reason: str
    restored: bool


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """This rank has looked again whether the flip that it is parked for could begin."""

    flip_id: FlipId
    refusal: str
    """Why it could not; empty: it could."""


@dataclass(frozen=True, slots=True)
class CommitReached:
    """The COMMIT entry of the log."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class AbandonReached:
    """The ABANDON entry of the log."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class MoverConnected:
    """A stream from the mover opened: what holds now is said again."""


ParticipantEvent = (
    EntryReached
    | AssembleReceived
    | EnterReceived
    | DisarmReceived
    | WorkDone
    | WorkFailed
    | RoomSeen
    | CommitReached
    | AbandonReached
    | MoverConnected
)


# Effects of a participant. The Say* ones go to the mover if it is connected; MoverConnected says them again otherwise.


@dataclass(frozen=True, slots=True)
class SayParked:
    """At the FLIP entry."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class SayPresent:
    """In this round, with the fit verdict."""

    flip_id: FlipId
    round: int
    fits: bool
    refusal: str
    plan_hash: int


@dataclass(frozen=True, slots=True)
class SayWithdrawn:
    """Presence of this round is taken back; where ENTER has been journalled by then, this rank follows through."""

    flip_id: FlipId
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class SayNotReady:
    """Asked too early."""

    flip_id: FlipId
    reason: str


@dataclass(frozen=True, slots=True)
class SayVerified:
    """Waits for the outcome in the log, and never times out alone."""

    flip_id: FlipId
    bytes_moved: int
    rows_moved: int


@dataclass(frozen=True, slots=True)
class SayFailed:
    """Waits for the outcome in the log."""

    flip_id: FlipId
    reason: str
    restored: bool


@dataclass(frozen=True, slots=True)
class StartWork:
    """Read, seam, write, verify: in the thread that owns the memory."""

    flip_id: FlipId


ParticipantEffect = SayParked | SayPresent | SayWithdrawn | SayNotReady | SayVerified | SayFailed | StartWork
