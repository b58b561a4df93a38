"""One schedule as values: the group, its load, its flips and its faults. Drawn from a seed, or read from a scenario."""

from dataclasses import dataclass, field
from random import Random

from services.core.flip.log_side import FlipClocks
from services.core.flip.messages import FlipDeadlines
from services.core.ids import BLOCK_SLOTS, LayoutKind, TokenId
from services.scheduler.batch.limits import BatchLimits
from services.scheduler.log import LogDeadlines
from tests.sim.processes.memory import Mode, Slip
from tests.sim.processes.toy_model import END_ID, VOCAB, letter
from tests.sim.processes.world import Delay

US, MS, S = 1_000, 1_000_000, 1_000_000_000

DEADLINES = FlipDeadlines(park_ns=400 * MS, presence_ns=400 * MS, data_plane_ns=400 * MS)
"""Above what anything but a fault takes in a schedule; below what a stopped process may sleep."""
STEP_NS = 500 * MS
"""How long a step may be unanswered before its generation ends."""
MOVER_ABSENT_NS = 300 * MS
"""How long the scheduler waits for a mover that is stopped or gone before it abandons by itself."""
BEAT_NS = 100 * MS
"""A mover whose attempt waits says so this often."""
LOG_DEADLINES = LogDeadlines(boot_ns=2 * S, step_ns=STEP_NS)
FLIP_CLOCKS = FlipClocks(
    silence_ns=MOVER_ABSENT_NS,
    frozen_ns=DEADLINES.park_ns + DEADLINES.presence_ns + DEADLINES.data_plane_ns + MOVER_ABSENT_NS,
    again_ns=5 * MS,
)
PATIENT_NS = 300 * MS
"""How long a batch stands still at most where nobody is hurt: a flip's messages, on slow channels."""
LONG_STOP_NS = 100 * MS
"""A process that sleeps longer may miss a deadline."""
SLOW_CHANNEL_NS = 30 * MS
"""No message of a slow channel takes longer: some of them fit into every deadline."""
LARGE_SHARE = 0.06
"""Of all schedules: those with many requests and long answers. Most races need few of both, and small ones are found
and read sooner."""
MOMENTS = (
    "armed",
    "parked",
    "present",
    "entered",
    "working",
    "read",
    "seam",
    "written",
    "pages",
    "verified",
    "concluded",
)
"""Of a flip, in their order; a seam and pages are not in every mode."""


@dataclass(frozen=True, slots=True)
class ToyRequest:
    """One client."""

    name: str
    at_ns: int
    prompt: tuple[TokenId, ...]
    max_output_tokens: int
    end_ids: frozenset[TokenId] = frozenset()
    stop: str | None = None
    priority: int = 0
    abort_ns: int | None = None
    """After `at_ns` the client goes away."""
    poison_index: int | None = None
    """An output token whose logits are not finite: the request fails there, and nobody else does."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """Somebody asks for a layout."""

    at_ns: int
    target: LayoutKind


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` is crash, stop, unlink (the mover's stream to a rank breaks), unask (the scheduler's to the mover does) or
    fill (the mover's journal takes nothing).

    `who` is a process' name, `for_ns` how long.
    With a `moment` of a flip it waits, from `at_ns` on, for that moment to come, and happens shortly after it.
    """

    at_ns: int
    kind: str
    who: str
    for_ns: int = 0
    moment: str | None = None

    @property
    def is_patience(self) -> bool:
        """Whether a deadline may rightly expire by it."""
        return self.for_ns > LONG_STOP_NS

    @property
    def may_end_generation(self) -> bool:
        """A mover that dies never does: that is what its journal is for."""
        return self.is_patience or self.kind == "unlink" or (self.kind == "crash" and self.who != "mover")


@dataclass(frozen=True, slots=True)
class Odds:
    """Of each rank in each flip, in [0, 1]."""

    refuse: float = 0.0
    withdraw: float = 0.0
    fail: float = 0.0
    """There is no room, or rows or weights go wrong."""
    breaks: float = 0.0
    """Of each way back: that the active layout is not to be had. Above 0, what nobody foresaw is among what fails."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that is decided before the first event."""

    num_ranks: int
    kind: LayoutKind
    limits: BatchLimits
    asked: tuple[ToyRequest, ...]
    triggers: tuple[Trigger, ...] = ()
    faults: tuple[Fault, ...] = ()
    odds: Odds = Odds()
    eager_flips: int = 0
    """So many attempts of a generation follow each other at once, whatever became of the one before."""
    policy_ns: int | None = None
    """How often the policy advises; None: it does not."""
    control: Delay = (50 * US, 2 * MS)
    data: Delay = (5 * US, 200 * US)
    boot: Delay = (1 * MS, 20 * MS)
    step_ns: int = 300 * US
    token_ns: int = 20 * US
    slowness: tuple[float, ...] = field(default=())
    """Of each rank: how many times longer its steps take."""
    link_capacity: int = 2
    slow_share: float = 0.0
    """Of all channels: those that are many times slower than the others."""
    mode: Mode = Mode.DUAL
    slips: tuple[tuple[int, Slip], ...] = ()
    """By rank, what goes wrong in its first flip, whatever the odds."""
    is_exclusive: bool = False
    """Each block's rows have pages in one layout at a time."""
    uses_shipped_table: bool = False
    """Rank 0 drives the worker's own resident table as well."""

    @property
    def ranks_meet(self) -> bool:
        """Whether ranks wait for each other in a flip's work."""
        return self.mode is not Mode.SHARED

    @property
    def begin_ns(self) -> int:
        """Times of requests, triggers and faults count from here: every process is up by then."""
        return 2 * self.boot[1]

    @property
    def last_fault_ns(self) -> int:
        """After this the system is left alone."""
        ends = [fault.at_ns + fault.for_ns for fault in self.faults]
        return self.begin_ns + max(
            [*ends, *(a.at_ns + (a.abort_ns or 0) for a in self.asked), *(t.at_ns for t in self.triggers)]
        )

    @property
    def bound_ns(self) -> int:
        """When everything must be over: a generous multiple of running every request alone, one after the other."""
        tokens = sum(len(a.prompt) + a.max_output_tokens for a in self.asked)
        each_ns = self.num_ranks * (self.step_ns + self.token_ns + self.data[1] + 2 * self.control[1])
        slowest = max(self.slowness, default=1.0)
        return self.last_fault_ns + int(8 * slowest * tokens * each_ns) + 5 * S


def draw_case(rng: Random) -> Case:
    """Topology, load, flips and faults of one seed; half of the seeds have no fault at all."""
    num_ranks = rng.choice((1, 2, 2, 3, 3, 4))
    limits = _limits(rng)
    is_large = rng.random() < LARGE_SHARE
    horizon_ns = rng.choice((5, 20, 60) if is_large else (2, 5, 20)) * MS
    asked = _asked(rng, limits, horizon_ns, is_large)
    has_faults = rng.random() < 0.5
    low = rng.choice((10, 50, 200)) * US
    mode = rng.choice((Mode.SHARED, Mode.SHARED, Mode.DUAL, Mode.EXCHANGE, Mode.IMAGE))
    return Case(
        num_ranks=num_ranks,
        kind=rng.choice((LayoutKind.PP, LayoutKind.TP)),
        limits=limits,
        asked=asked,
        triggers=_triggers(rng, horizon_ns),
        faults=_faults(rng, num_ranks, horizon_ns) if has_faults else (),
        odds=_odds(rng),
        eager_flips=rng.choice((0, 0, 3, 8)),
        policy_ns=rng.choice((None, None, 3 * MS, 10 * MS)),
        control=(low, low * rng.choice((2, 10, 50))),
        data=(5 * US, rng.choice((20, 200, 2000)) * US),
        step_ns=rng.choice((50, 300, 1000)) * US,
        token_ns=rng.choice((1, 20)) * US,
        slowness=tuple(rng.choice((1.0, 1.0, 1.5, 4.0)) for _ in range(num_ranks)),
        link_capacity=rng.choice((1, 2, 4)),
        slow_share=rng.choice((0.0, 0.1, 0.3)),
        mode=mode,
        is_exclusive=mode is not Mode.SHARED and rng.random() < 0.4,
        uses_shipped_table=rng.random() < 0.1,
    )


def _limits(rng: Random) -> BatchLimits:
    max_resident = rng.choice((1, 2, 3, 4, 6))
    chunk = rng.choice((5, 16, 24, 48))
    return BatchLimits(
        num_blocks=rng.choice((4, 6, 8, 12, 20)),
        max_resident_requests=max_resident,
        max_queued_requests=rng.choice((2, 4, 12)),
        max_context_tokens=rng.choice((48, 64, 100)),
        chunk_tokens=chunk,
        max_batch_tokens=max(chunk, max_resident) + rng.choice((0, 1, 16)),
        steps_ahead=rng.choice((1, 2, 2, 3)),
        num_vocab=VOCAB,
        attention_parity_tokens=rng.choice((None, 32)),
    )


def _asked(rng: Random, limits: BatchLimits, horizon_ns: int, is_large: bool) -> tuple[ToyRequest, ...]:
    num_asked = rng.randint(1, 8) if is_large else rng.choice((1, 1, 2, 2, 3, 4))
    outputs = (1, 2, 5, 9, 17, 30) if is_large else (1, 2, 3, 5, 8)
    stems = [tuple(_tokens(rng, rng.choice((16, 20, 32, 33)))) for _ in range(2)]
    asked = []
    for number in range(num_asked):
        stem = rng.choice(stems) if rng.random() < 0.6 else ()
        prompt = (*stem, *_tokens(rng, rng.choice((0, 1, 3, 10, 17))))[: limits.context_tokens - 1] or (TokenId(5),)
        if rng.random() < 0.04:
            prompt = tuple(_tokens(rng, limits.context_tokens + rng.randint(0, 2)))
        asked.append(
            ToyRequest(
                name=f"r{number}",
                at_ns=int(rng.random() * horizon_ns),
                prompt=prompt,
                max_output_tokens=rng.choice(outputs),
                end_ids=frozenset((END_ID,)) if rng.random() < 0.4 else frozenset(),
                stop="".join(map(letter, _tokens(rng, 1))) if rng.random() < 0.15 else None,
                priority=rng.choice((0, 0, 0, 1, -1)),
                abort_ns=int(rng.random() * 20 * MS) if rng.random() < 0.15 else None,
                poison_index=rng.choice((0, 1, 3, 8)) if rng.random() < 0.05 else None,
            )
        )
    return tuple(asked)


def _tokens(rng: Random, num_tokens: int) -> list[TokenId]:
    return [TokenId(1 + int(rng.random() * (VOCAB - 1))) for _ in range(num_tokens)]


def _triggers(rng: Random, horizon_ns: int) -> tuple[Trigger, ...]:
    triggers = []
    for _ in range(rng.choice((0, 1, 2, 3))):
        at_ns, target = int(rng.random() * 2 * horizon_ns), rng.choice((LayoutKind.PP, LayoutKind.TP))
        triggers.append(Trigger(at_ns, target))
        if rng.random() < 0.3:
            triggers.append(Trigger(at_ns + int(rng.random() * 3 * MS), target.other))
    return tuple(triggers)


def _faults(rng: Random, num_ranks: int, horizon_ns: int) -> tuple[Fault, ...]:
    ranks = [f"rank-{rank}" for rank in range(num_ranks)]
    faults = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(("crash", "crash", "stop", "unlink", "unlink", "unask"))
        who = rng.choice(ranks) if kind == "unlink" else rng.choice((*ranks, "mover", "mover", "scheduler"))
        who = "mover" if kind == "unask" else who
        for_ns = rng.choice((1, 20, 900)) * MS if kind == "stop" else 0
        if kind == "crash" and who == "mover":
            for_ns = rng.choice((0, 0, 0, 400)) * MS
        moment = rng.choice(MOMENTS) if rng.random() < 0.75 else None
        faults.append(Fault(int(rng.random() * 2 * horizon_ns * (moment is None)), kind, who, for_ns, moment))
    return tuple(faults)


def _odds(rng: Random) -> Odds:
    return Odds(
        refuse=rng.choice((0.0, 0.0, 0.0, 0.2)),
        withdraw=rng.choice((0.0, 0.0, 0.3, 0.6)),
        fail=rng.choice((0.0, 0.0, 0.15, 0.4)),
        breaks=rng.choice((0.0, 0.0, 0.3)),
    )


def describe(case: Case) -> str:
    """One line for a failure."""
    limits = case.limits
    return (
        f"{case.num_ranks} ranks from {case.kind.value}, {limits.num_blocks} blocks of {BLOCK_SLOTS}, "
        f"{len(case.asked)} requests, {len(case.triggers)} triggers, "
        + (
            ", ".join(f"{f.kind} {f.who}" + (f" when {f.moment}" if f.moment else "") for f in case.faults)
            or "no fault"
        )
    )
