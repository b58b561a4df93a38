"""From what the rings say to verdicts. Pure: snapshots in, verdicts out; it touches no process and no file.

A comparison that has lost its premise stands down instead of accusing: chains are compared at the same entry of the
same epoch only. A rank inside a long step is not stalled until its deadline has passed; an idle group is never frozen.
"""

from dataclasses import dataclass
from enum import Enum

from services.core.ring import CHAINED, PARTNERED, QUIET, RecordKind, RingRecord

NS = 1_000_000_000
WAITS_FOR_OUTCOME = frozenset({RecordKind.PARKED, RecordKind.FLIP_DONE})
"""The flip's own clocks bound these waits; they are no stall."""


class ProcessState(Enum):
    """What the system says of a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    LOST = "lost"


class VerdictKind(Enum):
    """What is wrong."""

    DIVERGENCE = "divergence"
    STALL = "stall"
    FREEZE = "freeze"
    LOST = "lost"
    STOPPED = "stopped"
    CORRIDOR = "corridor"
    """Free memory is below the floor."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one instant: its process and the newest records of its ring, oldest first."""

    rank: int
    process: ProcessState
    tail: tuple[RingRecord, ...]

    @property
    def last(self) -> RingRecord | None:
        """What it entered last."""
        return self.tail[-1] if self.tail else None

    def age_ns(self, now_ns: int) -> int:
        """Time since its last record."""
        return now_ns - self.last.time_ns if self.last else 0

    @property
    def is_busy(self) -> bool:
        """Whether it is inside something: neither owes it nothing, nor does it wait for the log's word on a flip."""
        return self.last is not None and self.last.kind not in QUIET | WAITS_FOR_OUTCOME


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. `statement` says what was expected, what was seen, and what the peers do."""

    kind: VerdictKind
    rank: int | None
    epoch: int
    sequence: int
    last_operation: str
    statement: str
    age_ns: int


def diagnose(ranks: list[RankView], now_ns: int, stall_ns: int) -> list[Verdict]:
    """The verdicts that hold now, the most specific first."""
    gone = [_gone(view, ranks, now_ns) for view in ranks if view.process is not ProcessState.RUNNING]
    diverged = _diverged(ranks)
    stuck = [view for view in ranks if view.process is ProcessState.RUNNING and _is_stuck(view, now_ns, stall_ns)]
    if gone or diverged or not stuck:
        return [*gone, *diverged]
    if len(stuck) == len(ranks):
        return [_freeze(ranks, now_ns)]
    return [_stall(view, ranks, now_ns) for view in _behind(stuck)]


def peer_statement(ranks: list[RankView], now_ns: int) -> str:
    """Where every rank is: position, age, last operation, or that it is lost."""
    return "; ".join(_where(view, now_ns) for view in ranks)


def _where(view: RankView, now_ns: int) -> str:
    if view.process is ProcessState.LOST:
        return f"rank {view.rank}: lost, last in {_operation(view.last)}"
    if view.last is None:
        return f"rank {view.rank}: {view.process.value}, no record"
    return (
        f"rank {view.rank}: {view.process.value}, step {view.last.sequence} of epoch {view.last.epoch}, "
        f"in {_operation(view.last)} for {view.age_ns(now_ns) / NS:.1f} s"
    )


def _operation(record: RingRecord | None) -> str:
    if record is None:
        return "nothing"
    name = record.kind.name.lower().replace("_", " ")
    return f"{name} (rank {record.key})" if record.kind in PARTNERED else name


def _is_stuck(view: RankView, now_ns: int, stall_ns: int) -> bool:
    return view.is_busy and view.age_ns(now_ns) >= stall_ns


def _behind(stuck: list[RankView]) -> list[RankView]:
    """Of several stuck ranks, those at the lowest step: the others wait for them."""
    lowest = min(view.last.sequence for view in stuck if view.last)
    return [view for view in stuck if view.last and view.last.sequence == lowest]


def _verdict(kind: VerdictKind, view: RankView, statement: str, now_ns: int) -> Verdict:
    last = view.last
    return Verdict(
        kind=kind,
        rank=view.rank,
        epoch=last.epoch if last else 0,
        sequence=last.sequence if last else 0,
        last_operation=_operation(last),
        statement=statement,
        age_ns=view.age_ns(now_ns),
    )


def _gone(view: RankView, ranks: list[RankView], now_ns: int) -> Verdict:
    kind = VerdictKind.LOST if view.process is ProcessState.LOST else VerdictKind.STOPPED
    remedy = (
        "its supervisor starts the group again"
        if kind is VerdictKind.LOST
        else "continue it (SIGCONT) or kill it: its group waits for it"
    )
    return _verdict(kind, view, f"rank {view.rank} is {kind.value}: {remedy}. {peer_statement(ranks, now_ns)}", now_ns)


def _stall(view: RankView, ranks: list[RankView], now_ns: int) -> Verdict:
    return _verdict(
        VerdictKind.STALL,
        view,
        f"rank {view.rank} makes no progress in {_operation(view.last)}. {peer_statement(ranks, now_ns)}",
        now_ns,
    )


def _freeze(ranks: list[RankView], now_ns: int) -> Verdict:
    last = max((view.last for view in ranks if view.last), key=lambda record: record.sequence)
    return Verdict(
        kind=VerdictKind.FREEZE,
        rank=None,
        epoch=last.epoch,
        sequence=last.sequence,
        last_operation=_operation(last),
        statement=f"all ranks are stopped inside work: a mutual wait. {peer_statement(ranks, now_ns)}",
        age_ns=min(view.age_ns(now_ns) for view in ranks),
    )


def _diverged(ranks: list[RankView]) -> list[Verdict]:
    """The first entry at which chains differ, among entries that every rank still holds."""
    chains = [_chain_by_entry(view) for view in ranks]
    if len(chains) < 2:
        return []
    shared = sorted(set.intersection(*(set(chain) for chain in chains)))
    for entry in shared:
        values = [chain[entry] for chain in chains]
        if len(set(values)) > 1:
            return [_accuse(ranks, entry, values)]
    return []


def _chain_by_entry(view: RankView) -> dict[tuple[int, int], int]:
    return {(record.epoch, record.sequence): record.chain for record in view.tail if record.kind in CHAINED}


def _accuse(ranks: list[RankView], entry: tuple[int, int], values: list[int]) -> Verdict:
    """Names the minority; two ranks have none, and then nobody is named."""
    majority = max(set(values), key=values.count)
    odd = [view.rank for view, value in zip(ranks, values, strict=True) if value != majority]
    named = odd[0] if len(odd) == 1 and values.count(majority) > 1 else None
    seen = ", ".join(f"rank {view.rank} {value:016x}" for view, value in zip(ranks, values, strict=True))
    return Verdict(
        kind=VerdictKind.DIVERGENCE,
        rank=named,
        epoch=entry[0],
        sequence=entry[1],
        last_operation="step log",
        statement=f"chains differ first at step {entry[1]} of epoch {entry[0]}: {seen}",
        age_ns=0,
    )
