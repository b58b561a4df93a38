"""An automaton of sleeping and waking in native/collectives_wait.c: a sleeper, the writer of its word, one who aborts.

The sleeper counts itself in, reads the bell, looks at the word and the abort once more, and sleeps if the bell is still
what it read. Writer and aborter store, then ring the bell if somebody sleeps (an abort rings in any case). The question
is whether any interleaving leaves the sleeper asleep although all others are done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class Rule(Enum):
    """The order kept, or the one mistake made."""

    SHIPPED = auto()
    LOOK_BEFORE_BELL = auto()  # the sleeper reads the bell after its last look
    COUNT_AFTER_LOOK = auto()  # the sleeper counts itself in after its last look
    NO_FENCE = auto()  # the writer looks for sleepers before its store is visible
    QUIET_ABORT = auto()  # an abort stores its reason and rings nobody


@dataclass(frozen=True, slots=True)
class State:
    """Shared words, then each party's place in its program."""

    word: bool = False
    aborted: bool = False
    sleepers: int = 0
    bell: int = 0
    sleeper: int = 0
    read_bell: int = 0
    asleep: bool = False
    done: bool = False
    writer: int = 0
    saw_sleeper: bool = False
    aborter: int = 0


SLEEPER_ORDER = {
    Rule.LOOK_BEFORE_BELL: ("count", "look", "bell", "sleep"),
    Rule.COUNT_AFTER_LOOK: ("bell", "look", "count", "sleep"),
}
WRITER_ORDER = {Rule.NO_FENCE: ("look", "store", "ring")}


def _sleeper_moves(state: State, rule: Rule) -> list[State]:
    if state.done or state.asleep:
        return []
    order = SLEEPER_ORDER.get(rule, ("count", "bell", "look", "sleep"))
    onward = replace(state, sleeper=state.sleeper + 1)
    match order[state.sleeper]:
        case "count":
            return [replace(onward, sleepers=1)]
        case "bell":
            return [replace(onward, read_bell=state.bell)]
        case "look":
            return [replace(onward, done=True, sleepers=0) if state.word or state.aborted else onward]
        case _:
            if state.bell == state.read_bell:
                return [replace(state, asleep=True)]
            return [replace(state, sleeper=0, sleepers=0)]


def _rung(state: State) -> State:
    if state.asleep:
        return replace(state, bell=state.bell + 1, asleep=False, sleeper=0, sleepers=0)
    return replace(state, bell=state.bell + 1)


def _writer_moves(state: State, rule: Rule) -> list[State]:
    order = WRITER_ORDER.get(rule, ("store", "look", "ring"))
    if state.writer == len(order):
        return []
    onward = replace(state, writer=state.writer + 1)
    match order[state.writer]:
        case "store":
            return [replace(onward, word=True)]
        case "look":
            return [replace(onward, saw_sleeper=state.sleepers > 0)]
        case _:
            return [_rung(onward) if state.saw_sleeper else onward]


def _aborter_moves(state: State, rule: Rule) -> list[State]:
    match state.aborter:
        case 0:
            return [replace(state, aborter=1, aborted=True)]
        case 1:
            onward = replace(state, aborter=2)
            return [onward if rule is Rule.QUIET_ABORT else _rung(onward)]
        case _:
            return []


def explore(rule: Rule, *, writes: bool, aborts: bool) -> tuple[int, bool]:
    """Returns the number of states and whether one of them leaves the sleeper asleep for good."""
    start = State(writer=0 if writes else len(("store", "look", "ring")), aborter=0 if aborts else 2)
    seen, pending, lost = {start}, [start], False
    while pending:
        state = pending.pop()
        moves = [*_sleeper_moves(state, rule), *_writer_moves(state, rule), *_aborter_moves(state, rule)]
        lost = lost or (not moves and not state.done)
        for following in moves:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return len(seen), lost
