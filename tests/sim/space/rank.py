"""One rank of the small scope as a value: its log, its tables, its streams, and what the mover knows of it.

Equal ranks have equal values, so a group is the sorted tuple of its ranks: that is the symmetry. The follower and the
participant are the shipped ones, brought to a value's state, asked, and read off again; each answer is kept, so an
exploration asks them once for each pair of state and event.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from services.core.flip.messages import (
    AbandonReached,
    CommitReached,
    EntryReached,
    MoverConnected,
    ParticipantEffect,
    ParticipantEvent,
    SayPresent,
    SayWithdrawn,
    StartWork,
    WorkDone,
    WorkFailed,
)
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex
from services.core.log import LogFollower, LogState
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry, ResetEntry
from tests.sim.processes.world import InvariantError

PLAN_HASH = 7
Entry = LogEntry | FlipId
"""Of the log, or the work of an attempt between two entries."""
Value = TypeVar("Value")
Command = tuple[int, Any]
"""A generation, and what the mover says to its ranks."""


class TablesState(NamedTuple):
    """All that the participant's table and the log follower remember."""

    state: ParticipantState = ParticipantState.RUNNING
    round: int = 0
    entry: EntryReached | None = None
    result: WorkDone | WorkFailed | None = None
    last_ended: FlipId | None = None
    log_state: LogState = LogState.AWAITING_RESET
    generation: Generation | None = None
    epoch: Epoch | None = None
    sequence: LogIndex | None = None
    layout: LayoutKind | None = None
    flip: FlipEntry | None = None


class RankState(NamedTuple):
    """One rank, and what is on its way to and from it."""

    has_log: bool = False
    is_log_open: bool = False
    """False with a log: its stream has ended, and the rank has not seen that yet."""
    tables: TablesState = TablesState()
    queue: tuple[Entry, ...] = ()
    to_loop: tuple[ParticipantEvent, ...] = ()
    is_linked: bool = False
    from_mover: tuple[Command, ...] = ()
    to_mover: tuple[Command | None, ...] = ()
    """None is the end of the stream."""
    present_in: tuple[int, FlipId, int] = (0, FlipId(0), 0)
    """The last generation, attempt and round in which it, or its life before, has said that it is present."""
    is_counted: tuple[bool, bool, bool] = (False, False, False)
    """Parked, present, verified: as the open attempt knows."""
    early: tuple[tuple[int, Any], ...] = ()
    """What it said of an attempt that is not open."""


class Interned:
    """One object for each value, so that values are compared and hashed once, and by their identity from then on."""

    def __init__(self) -> None:
        self._objects: dict[Any, Any] = {}
        self._ids: set[int] = set()

    def one(self, value: Value) -> Value:
        """The object that stands for `value`."""
        if id(value) in self._ids:
            return value
        found: Value = self._objects.setdefault(value, value)
        self._ids.add(id(found))
        return found


class RankMoves:
    """What a rank does, with the participant's class as a parameter; asked for interned ranks only."""

    def __init__(self, participant: type[FlipParticipant], interned: Interned, *, has_hops: bool) -> None:
        self._interned = interned
        self._participant = participant
        self._has_hops = has_hops
        self._hear = lru_cache(None)(self._hear_uncached)
        self.execute = self._kept(self._execute)
        self.hop = self._kept(self._hop)
        self.obey = self._kept(self._obey)
        self.connect = self._kept(self._connect)

    def _kept(self, move: Callable[..., tuple[RankState, ...]]) -> Callable[..., tuple[RankState, ...]]:
        answers: dict[tuple[int, ...], tuple[RankState, ...]] = {}

        def ask(rank: RankState, *how: Any) -> tuple[RankState, ...]:
            key = (id(rank), *how)
            if (found := answers.get(key)) is None:
                found = answers[key] = tuple(map(self._interned.one, move(rank, *how)))
            return found

        return ask

    def _hear_uncached(self, tables: TablesState, event: ParticipantEvent) -> tuple[TablesState, tuple[Any, ...]]:
        participant = self._participant()
        participant.state, participant.round = tables.state, tables.round
        participant._entry, participant._result = tables.entry, tables.result
        participant._last_ended = tables.last_ended
        effects = participant.on_event(event)
        after = tables._replace(
            state=participant.state,
            round=participant.round,
            entry=participant._entry,
            result=participant._result,
            last_ended=participant._last_ended,
        )
        return after, tuple(effects)

    def _told(self, rank: RankState, event: ParticipantEvent) -> tuple[RankState, ...]:
        """The participant hears `event`: what it says goes to the mover, work goes behind what has come by then."""
        tables, effects = self._hear(rank.tables, event)
        rank = rank._replace(tables=tables)
        places = [0]
        for effect in effects:
            rank = self._said(rank, effect)
            if isinstance(effect, StartWork):
                places = list(range(len(rank.queue) + 1))
                work = effect.flip_id
        if not any(isinstance(effect, StartWork) for effect in effects):
            return (rank,)
        return tuple(rank._replace(queue=(*rank.queue[:at], work, *rank.queue[at:])) for at in places)

    def _said(self, rank: RankState, effect: ParticipantEffect) -> RankState:
        if isinstance(effect, StartWork):
            return rank
        if isinstance(effect, SayPresent):
            rank = rank._replace(present_in=(rank.tables.generation or 0, effect.flip_id, effect.round))
        if not rank.is_linked:
            return rank
        return rank._replace(to_mover=(*rank.to_mover, (rank.tables.generation or 0, effect)))

    def _to_loop(self, rank: RankState, event: ParticipantEvent) -> tuple[RankState, ...]:
        if self._has_hops:
            return (rank._replace(to_loop=(*rank.to_loop, event)),)
        return self._told(rank, event)

    def _execute(self, rank: RankState, result: str) -> tuple[RankState, ...]:
        """The model thread takes what is next; `result` says what becomes of it: well, refused, failed, broken."""
        item, rank = rank.queue[0], rank._replace(queue=rank.queue[1:])
        if not isinstance(item, LogEntry):
            return self._to_loop(rank, self._worked(rank, item, result))
        follower = LogFollower()
        _set_follower(follower, rank.tables)
        follower.follow(item)
        rank = rank._replace(tables=_read_follower(follower, rank.tables))
        match item.entry:
            case FlipEntry(flip_id=flip_id):
                fits = result != "refused"
                return self._to_loop(rank, EntryReached(flip_id, fits, "" if fits else "no", PLAN_HASH))
            case CommitEntry(flip_id=flip_id):
                return self._to_loop(rank, CommitReached(flip_id))
            case AbandonEntry(flip_id=flip_id):
                return self._to_loop(rank, AbandonReached(flip_id))
            case _:
                assert isinstance(item.entry, ResetEntry)
                return (rank,)

    def _worked(self, rank: RankState, flip_id: FlipId, result: str) -> WorkDone | WorkFailed:
        flip = rank.tables.flip
        if flip is None or flip.flip_id != flip_id:
            return WorkFailed(flip_id, "not parked for it", restored=True)
        if result in ("failed", "broken"):
            return WorkFailed(flip_id, "checksum", restored=result == "failed")
        return WorkDone(flip_id, 0, 0)

    def _hop(self, rank: RankState) -> tuple[RankState, ...]:
        """The event loop hears of what the model thread did."""
        return self._told(rank._replace(to_loop=rank.to_loop[1:]), rank.to_loop[0])

    def _obey(self, rank: RankState) -> tuple[RankState, ...]:
        """The next command of the mover arrives."""
        (generation, command), rank = rank.from_mover[0], rank._replace(from_mover=rank.from_mover[1:])
        return self._told(rank, command) if generation == rank.tables.generation else (rank,)

    def _connect(self, rank: RankState) -> tuple[RankState, ...]:
        """A stream of the mover opens."""
        return self._told(rank._replace(is_linked=True), MoverConnected())


def withdrawing(rank: RankState) -> RankState:
    """It takes back that it is present."""
    tables = rank.tables
    assert tables.entry is not None
    said = (tables.generation or 0, SayWithdrawn(tables.entry.flip_id, tables.round, "no room"))
    return rank._replace(to_mover=(*rank.to_mover, said))


def unlinked(rank: RankState, *, is_seen: bool) -> RankState:
    """The mover's stream is gone, with what was on it; the mover is yet to see that unless it ended the stream."""
    if not rank.is_linked:
        return rank._replace(from_mover=())
    return rank._replace(is_linked=False, from_mover=(), to_mover=() if is_seen else (None,))


def reborn(rank: RankState, *, is_heard: bool) -> RankState:
    """The process ends and another one starts: what the mover counts is the mover's, what was said may still arrive."""
    to_mover = (*rank.to_mover, None) if is_heard else (None,)
    return RankState(
        to_mover=to_mover if rank.is_linked else rank.to_mover,
        present_in=rank.present_in,
        is_counted=rank.is_counted,
        early=rank.early,
    )


def _set_follower(follower: LogFollower, tables: TablesState) -> None:
    follower.state, follower.generation, follower.epoch = tables.log_state, tables.generation, tables.epoch
    follower.sequence, follower.layout, follower.flip = tables.sequence, tables.layout, tables.flip


def _read_follower(follower: LogFollower, tables: TablesState) -> TablesState:
    return tables._replace(
        log_state=follower.state,
        generation=follower.generation,
        epoch=follower.epoch,
        sequence=follower.sequence,
        layout=follower.layout,
        flip=follower.flip,
    )


def checked(rule: str, holds: bool, say: Callable[[], str]) -> None:
    """A rule that must hold here.

    Raises:
        InvariantError: it does not.
    """
    if not holds:
        raise InvariantError(rule, say())
