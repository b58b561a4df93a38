"""A rank's view of the step log: which entry may come next, and which layout and epoch hold after it. Pure.

Never executes an entry and never looks inside a step beyond its place in the log. Invariants: sequences rise by one
from the RESET on; generation and epoch of every entry are the ones in force; between a FLIP and its COMMIT or ABANDON
no other entry is taken. An entry that breaks a rule leaves the follower as it was.
"""

from enum import Enum

from services.core.ids import Epoch, FlipId, Generation, LayoutKind, LogIndex
from services.core.step import AbandonEntry, CommitEntry, Entry, FlipEntry, LogEntry, ResetEntry, StepPlan


class ProtocolError(ValueError):
    """The log broke a rule; the message says what was expected, what came and the next step."""


class LogState(Enum):
    """Where a rank is in its log."""

    AWAITING_RESET = "awaiting reset"
    RUNNING = "running"
    PARKED = "parked"


_TAKES: dict[LogState, tuple[type[Entry], ...]] = {
    LogState.AWAITING_RESET: (ResetEntry,),
    LogState.RUNNING: (StepPlan, FlipEntry),
    LogState.PARKED: (CommitEntry, AbandonEntry),
}

FIRST_EPOCH = Epoch(1)
"""The epoch that a RESET opens."""


class LogFollower:
    """Follows one log from its RESET on; one follower for the life of a process."""

    __slots__ = ("epoch", "flip", "generation", "layout", "sequence", "state")

    def __init__(self) -> None:
        self.state = LogState.AWAITING_RESET
        self.generation: Generation | None = None
        self.epoch: Epoch | None = None
        self.sequence: LogIndex | None = None
        """Of the last entry taken."""
        self.layout: LayoutKind | None = None
        """In force; changes with COMMIT alone."""
        self.flip: FlipEntry | None = None
        """The attempt this rank is parked for."""

    def follow(self, entry: LogEntry) -> None:
        """Takes the next entry, so that the caller may execute it.

        Raises:
            ProtocolError: it is not the next entry of this log; nothing has changed.
        """
        if not isinstance(entry.entry, _TAKES[self.state]):
            raise ProtocolError(
                f"a rank that is {self.state.value} takes {_names(_TAKES[self.state])}, got "
                f"{type(entry.entry).__name__} at sequence {entry.sequence}: begin a new generation with RESET"
            )
        if self.state is not LogState.AWAITING_RESET:
            self._check_place(entry)
        self._take(entry)
        self.sequence = entry.sequence

    def _check_place(self, entry: LogEntry) -> None:
        fence, expected = (entry.generation, entry.epoch), (self.generation, self.epoch)
        if fence != expected:
            raise ProtocolError(
                f"(generation, epoch) {expected} expected, got {fence} at sequence {entry.sequence}: refused; the "
                "writer must refetch the layout"
            )
        assert self.sequence is not None
        if entry.sequence != self.sequence + 1:
            raise ProtocolError(
                f"sequence {self.sequence + 1} expected, got {entry.sequence}: an entry was lost or repeated; begin a "
                "new generation with RESET"
            )

    def _take(self, entry: LogEntry) -> None:
        match entry.entry:
            case ResetEntry():
                self._open(entry, entry.entry)
            case StepPlan(tokens_through=through):
                if through is not None and through >= entry.sequence:
                    raise ProtocolError(f"step {entry.sequence} reads tokens of step {through}, which is not before it")
            case FlipEntry():
                self._park(entry.entry)
            case CommitEntry():
                self._commit(entry.entry)
            case AbandonEntry(flip_id=flip_id):
                self._check_flip(flip_id, "ABANDON")
                self._unpark()

    def _open(self, entry: LogEntry, reset: ResetEntry) -> None:
        if entry.epoch != FIRST_EPOCH or entry.generation < 1 or entry.sequence < 1:
            raise ProtocolError(
                f"a RESET opens epoch {FIRST_EPOCH} of a generation and a sequence above 0, got generation "
                f"{entry.generation}, epoch {entry.epoch}, sequence {entry.sequence}"
            )
        self.generation, self.epoch, self.layout = entry.generation, entry.epoch, reset.layout
        self.state = LogState.RUNNING

    def _park(self, flip: FlipEntry) -> None:
        if flip.target is self.layout:
            raise ProtocolError(f"flip {flip.flip_id} leads to {flip.target.name}, which is in force already")
        self.flip, self.state = flip, LogState.PARKED

    def _commit(self, commit: CommitEntry) -> None:
        self._check_flip(commit.flip_id, "COMMIT")
        assert self.flip is not None and self.epoch is not None
        if commit.layout is not self.flip.target:
            raise ProtocolError(
                f"flip {commit.flip_id} leads to {self.flip.target.name}, its COMMIT names {commit.layout.name}"
            )
        self.layout, self.epoch = commit.layout, Epoch(self.epoch + 1)
        self._unpark()

    def _check_flip(self, flip_id: FlipId, what: str) -> None:
        assert self.flip is not None
        if flip_id != self.flip.flip_id:
            raise ProtocolError(f"parked for flip {self.flip.flip_id}, got {what} of flip {flip_id}")

    def _unpark(self) -> None:
        self.flip, self.state = None, LogState.RUNNING


def _names(kinds: tuple[type[Entry], ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)
