"""Attempts at a flip as the log's owner makes them: asked for, frozen once the mover has answered, concluded. Pure.

One attempt at a time, numbers never used again in a generation. The mover is asked before anything stands still, and
its first word lets the log freeze; it decides the outcome, and this says which entry an outcome becomes. Two clocks
bound what clients see: of the mover's silence, and of the whole time that the batch is frozen. A question that fails is
silence, and so is the first word of one that is put again. Never waits, and touches no request.
"""

from dataclasses import dataclass

from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, FlipId, Generation, LayoutKind
from services.core.step import AbandonEntry, CommitEntry

NS_PER_S = 1_000_000_000


class FlipBrokenError(Exception):
    """What was active is not whole on every rank: the generation must end."""


@dataclass(frozen=True, slots=True)
class FlipClocks:
    """Bounds of one attempt."""

    silence_ns: int
    """How long the mover may say nothing."""
    frozen_ns: int
    """How long the batch may stand still, whatever the mover says; above what the mover's own clocks add up to."""
    again_ns: int = 50_000_000
    """Between a question that failed and the next one."""


@dataclass(frozen=True, slots=True)
class PastAttempts:
    """What is known of attempts over generations, so that none of them makes a policy start afresh."""

    abandoned_in_a_row: int = 0
    last_abandon_reason: str = ""
    ended_ns: int | None = None
    """When the last one ended; None: there was none."""


@dataclass(slots=True)
class Attempt:
    """The one under way."""

    flip_id: FlipId
    target: LayoutKind
    cause: str
    heard_ns: int
    """The mover's last word that counts, or the question where it has said nothing."""
    ask_ns: int | None
    """When the question is to be put; None: it is open."""
    is_first_question: bool = True
    has_spoken: bool = False
    """Whether the open question has had an answer."""
    frozen_ns: int | None = None
    """Since when the batch stands still; None: it does not yet."""
    outcome: FlipOutcome | None = None
    reason: str = ""


class FlipAttempts:
    """Those of one generation."""

    __slots__ = ("_clocks", "_last_id", "_ranks_meet", "attempt", "past")

    def __init__(self, clocks: FlipClocks, *, ranks_meet: bool = False, past: PastAttempts | None = None) -> None:
        """`ranks_meet`: whether ranks wait for each other in a flip's work."""
        self._clocks, self._ranks_meet = clocks, ranks_meet
        self.past = past or PastAttempts()
        self.attempt: Attempt | None = None
        self._last_id = 0

    def refusal(self, target: LayoutKind, layout: LayoutKind) -> str | None:
        """Why no attempt is made to go from `layout` to `target`; None: it may begin."""
        if self.attempt is not None:
            return f"flip {self.attempt.flip_id} is under way: one at a time"
        return f"the layout is {target.value.upper()} already" if target is layout else None

    def begin(self, target: LayoutKind, cause: str, now_ns: int) -> Attempt:
        """A new attempt, whose question is to be put at once."""
        assert self.attempt is None, "one attempt at a time"
        self._last_id += 1
        self.attempt = Attempt(FlipId(self._last_id), target, cause, heard_ns=now_ns, ask_ns=now_ns)
        return self.attempt

    def is_to_ask(self, now_ns: int) -> bool:
        """Whether the question is to be put now; it counts as open from then on."""
        attempt = self.attempt
        if attempt is None or attempt.ask_ns is None or now_ns < attempt.ask_ns:
            return False
        attempt.ask_ns, attempt.has_spoken = None, False
        return True

    def on_word(self, flip_id: FlipId, now_ns: int) -> bool:
        """The mover says that it is at work; whether the batch is to be frozen now."""
        attempt = self._open(flip_id)
        if attempt is None:
            return False
        if attempt.has_spoken or attempt.is_first_question:
            attempt.heard_ns = now_ns
        attempt.has_spoken = True
        return attempt.frozen_ns is None

    def on_failure(self, flip_id: FlipId, reason: str, now_ns: int) -> None:
        """The question has failed: it is put again after a while."""
        attempt = self._open(flip_id)
        if attempt is not None:
            attempt.ask_ns, attempt.is_first_question, attempt.reason = now_ns + self._clocks.again_ns, False, reason

    def on_outcome(self, flip_id: FlipId, outcome: FlipOutcome, reason: str) -> None:
        """The mover has decided."""
        attempt = self._open(flip_id)
        if attempt is not None:
            attempt.outcome, attempt.reason, attempt.ask_ns = outcome, reason, None

    @property
    def clock_ns(self) -> int | None:
        """When something is to be done by time alone."""
        attempt = self.attempt
        if attempt is None or attempt.outcome is not None:
            return None
        given_up_ns = self._given_up_ns(attempt)
        return given_up_ns if attempt.ask_ns is None else min(given_up_ns, attempt.ask_ns)

    def on_clock(self, now_ns: int) -> None:
        """Gives the mover up where it is time: what was frozen has an outcome then."""
        attempt = self.attempt
        if attempt is None or attempt.outcome is not None or now_ns < self._given_up_ns(attempt):
            return
        last, silence_s = attempt.reason or "it said nothing", self._clocks.silence_ns / NS_PER_S
        if now_ns >= attempt.heard_ns + self._clocks.silence_ns:
            attempt.reason = f"no mover for {silence_s:g} s: {last}"
        else:
            attempt.reason = f"no outcome within {self._clocks.frozen_ns / NS_PER_S:g} s of standstill: {last}"
        attempt.outcome, attempt.ask_ns = self.without_mover, None

    def entry_for(self, *, is_parked: bool) -> CommitEntry | AbandonEntry | None:
        """The entry to write for the outcome of what is frozen; None: not before every step is acknowledged.

        Raises:
            FlipBrokenError: no entry can follow, the generation must end.
        """
        attempt = self.attempt
        assert attempt is not None
        match attempt.outcome:
            case None:
                return None
            case FlipOutcome.COMMITTED:
                return CommitEntry(attempt.flip_id, attempt.target) if is_parked else None
            case FlipOutcome.ABANDONED | FlipOutcome.RESTORED:
                return AbandonEntry(attempt.flip_id, attempt.reason)
            case FlipOutcome.BROKEN:
                raise FlipBrokenError(f"flip {attempt.flip_id}: {attempt.reason}")

    def end(self, now_ns: int) -> None:
        """The attempt is over, or its generation is."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        if attempt.outcome is FlipOutcome.COMMITTED and attempt.frozen_ns is not None:
            self.past = PastAttempts(0, self.past.last_abandon_reason, now_ns)
        else:
            in_a_row = self.past.abandoned_in_a_row + 1
            self.past = PastAttempts(in_a_row, attempt.reason or "its generation ended", now_ns)

    @property
    def without_mover(self) -> FlipOutcome:
        """What a mover that is given up leads to: nobody knows whether ranks have entered.

        Where they meet in the work, some may be inside an exchange that others never enter: no ABANDON reaches those.
        """
        return FlipOutcome.BROKEN if self._ranks_meet else FlipOutcome.ABANDONED

    def _open(self, flip_id: FlipId) -> Attempt | None:
        """The attempt, if it is this one and undecided."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.flip_id == flip_id and attempt.outcome is None else None

    def _given_up_ns(self, attempt: Attempt) -> int:
        silent_ns = attempt.heard_ns + self._clocks.silence_ns
        return silent_ns if attempt.frozen_ns is None else min(silent_ns, attempt.frozen_ns + self._clocks.frozen_ns)


def is_advice(
    advised: LayoutKind, asked: tuple[Generation, Epoch], layout: LayoutKind, now: tuple[Generation, Epoch]
) -> bool:
    """Whether an answer to a signal under the fence `asked` is to be followed: it asks for a change, and is not late.

    To stay in a layout that a flip has left meanwhile is no advice to go back to it.
    """
    return asked == now and advised is not layout
