"""What a generation's log is told, and what it then has ready to be done. Values only."""

from dataclasses import dataclass, field

from services.core.blocks import PoolCensus
from services.core.fence import EpochFence
from services.core.flip.messages import FlipOutcome
from services.core.ids import BlockId, Epoch, FlipId, Generation, LayoutKind, LogIndex, Rank, RequestId
from services.core.request import RequestEvent, Submission
from services.core.step import LogEntry, StepReport
from services.scheduler.batch.pressure import Relief
from services.scheduler.batch.step_ledger import StepRecord

Fence = tuple[Generation, Epoch]


# Inputs: from ranks.


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has answered RESET; `rank` as it says itself, `stream` the one that the log is written to."""

    stream: Rank
    rank: int
    fence: Fence
    num_blocks: int
    model_digest: str


@dataclass(frozen=True, slots=True)
class RankReports:
    """A rank has acknowledged steps, in their order."""

    rank: Rank
    fence: Fence
    reports: tuple[StepReport, ...]


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank's stream has ended, or what it says cannot be read; the reason names it."""

    reason: str


# From routers.


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, new or again."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Abort:
    """A client has gone."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    """A router matched a stop string after so many output tokens."""

    request_id: RequestId
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class RouterGone:
    """A router's stream has ended: requests whose ids begin so are aborted."""

    prefix: str


# From whoever wants a flip, and from the mover.


@dataclass(frozen=True, slots=True)
class FlipWanted:
    """By hand, or an advice, which answers a signal under a fence."""

    target: LayoutKind
    cause: str
    answers: Fence | None = None
    ticket: int | None = None
    """Of who waits for its end."""


@dataclass(frozen=True, slots=True)
class MoverSpoke:
    """The mover is at work on the attempt; the first time: it has taken it."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class MoverDecided:
    """The outcome is in the mover's journal."""

    flip_id: FlipId
    outcome: FlipOutcome
    reason: str


@dataclass(frozen=True, slots=True)
class QuestionFailed:
    """The question was not answered to its end."""

    flip_id: FlipId
    reason: str


# From the machine.


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """Free memory was looked at: blocks' memory that is missing to the floor, or whether there is enough again."""

    num_needed: int
    is_enough: bool


@dataclass(frozen=True, slots=True)
class Clock:
    """The time that was asked for has come."""


Input = (
    RankReady
    | RankReports
    | RankGone
    | Submit
    | Abort
    | Finish
    | RouterGone
    | FlipWanted
    | MoverSpoke
    | MoverDecided
    | QuestionFailed
    | MemoryRead
    | Clock
)


# What is ready.


@dataclass(frozen=True, slots=True)
class Question:
    """To be put to the mover, in place of an earlier one."""

    flip_id: FlipId
    fence: Fence
    source: LayoutKind
    target: LayoutKind
    entry: LogIndex | None = None
    """Of FLIP; None: it is not written before there is an answer."""
    live_runs: tuple[tuple[BlockId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FlipEnded:
    """How an attempt ended, or why none was made: then it has no number, or no outcome where nothing was written."""

    flip_id: FlipId | None
    outcome: FlipOutcome | None
    reason: str
    target: LayoutKind
    cause: str
    ticket: int | None = None
    census: PoolCensus | None = None
    """Of every block, after its outcome was written."""


@dataclass(frozen=True, slots=True)
class Carry:
    """What a flip did to requests, for its trace."""

    flip_id: FlipId
    fence: Fence
    outcome: FlipOutcome
    num_requests: int
    num_partly_prefilled: int
    num_live_blocks: int
    longest_gap_ns: int | None
    """Between two tokens of one request around it; None: nobody was decoding."""


@dataclass(slots=True)
class Ready:
    """To be done, in this order."""

    entries: list[LogEntry] = field(default_factory=list)
    """To every rank."""
    events: list[RequestEvent] = field(default_factory=list)
    """To routers."""
    finished: list[StepRecord] = field(default_factory=list)
    """Steps that every rank has acknowledged."""
    is_opened: bool = False
    """Every rank is ready: routers may hear of the group."""
    flips: list[FlipEnded] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    """For the mover to complete its records with."""
    relieved: list[Relief] = field(default_factory=list)
    question: Question | None = None
    lost: str | None = None
    """Why the generation ends; nothing follows."""
    clock_ns: int | None = None
    """When `Clock` is wanted."""


def fence_of(fence: EpochFence) -> Fence:
    """Generation and epoch now."""
    return fence.generation, fence.epoch
