"""Attempts at a flip as decisions: which is made, what its outcome leads to, what advice is too old. Pure.

One attempt at a time, numbers never used again in a generation. The mover decides outcomes; this says which entry an
outcome becomes, and what a mover that is gone leads to. Never waits and writes nothing.
"""

from dataclasses import dataclass

from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, FlipId, Generation, LayoutKind
from services.core.step import AbandonEntry, CommitEntry


class FlipBrokenError(Exception):
    """What was active is not whole on every rank: the generation must end."""


@dataclass(slots=True)
class FlipAttempts:
    """Those of one generation."""

    ranks_meet: bool = False
    """Whether ranks wait for each other in a flip's work."""
    pending: FlipId | None = None
    target: LayoutKind | None = None
    """Of the pending attempt."""
    abandoned_in_a_row: int = 0
    last_abandon_reason: str = ""
    _last_id: int = 0

    def refusal(self, target: LayoutKind, kind: LayoutKind) -> str | None:
        """Why no attempt is made to go from `kind` to `target`; None: it may begin."""
        if self.pending is not None:
            return self.busy
        return f"the layout is {target.value.upper()} already" if target is kind else None

    @property
    def busy(self) -> str:
        """What is said to whoever asks while one is under way."""
        return f"flip {self.pending} is under way: one at a time"

    def begin(self, target: LayoutKind) -> FlipId:
        """The number of the attempt that is made now."""
        assert self.pending is None, self.busy
        self._last_id += 1
        self.pending, self.target = FlipId(self._last_id), target
        return self.pending

    def end(self) -> None:
        """Its outcome is written, or the generation is over."""
        self.pending = self.target = None

    def entry_for(self, outcome: FlipOutcome, reason: str, *, is_parked: bool) -> CommitEntry | AbandonEntry | None:
        """The entry to write for the pending attempt's outcome; None: not before every step is acknowledged.

        Raises:
            FlipBrokenError: no entry can follow, the generation must end.
        """
        assert self.pending is not None and self.target is not None
        match outcome:
            case FlipOutcome.COMMITTED:
                if not is_parked:
                    return None
                self.abandoned_in_a_row = 0
                return CommitEntry(self.pending, self.target)
            case FlipOutcome.ABANDONED | FlipOutcome.RESTORED:
                self.abandoned_in_a_row += 1
                self.last_abandon_reason = reason
                return AbandonEntry(self.pending, reason)
            case FlipOutcome.BROKEN:
                raise FlipBrokenError(f"flip {self.pending}: {reason}")

    @property
    def without_mover(self) -> FlipOutcome:
        """What a mover that is given up leads to: nobody knows whether ranks have entered.

        Where they meet in the work, some may be inside an exchange that others never enter: no ABANDON reaches those.
        """
        return FlipOutcome.BROKEN if self.ranks_meet else FlipOutcome.ABANDONED


def is_advice(
    advised: LayoutKind, asked: tuple[Generation, Epoch], kind: LayoutKind, now: tuple[Generation, Epoch]
) -> bool:
    """Whether an answer to a signal under the fence `asked` is to be followed: it asks for a change, and is not late.

    To stay in a layout that a flip has left meanwhile is no advice to go back to it.
    """
    return asked == now and advised is not kind
