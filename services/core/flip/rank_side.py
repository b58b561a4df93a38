"""One rank's part in flips as decisions: what is heard of whom, and what the participant's table makes of it. Pure.

Streams of the mover are numbered in the order they open: only the newest is heard, since a word of an earlier life of
the mover could undo what its successor has said. Commands count for the generation of the log alone. Never touches
memory, a stream or a clock: the shell and the simulator run the same code.
"""

from services.core.flip.messages import (
    AssembleReceived,
    DisarmReceived,
    EnterReceived,
    EntryReached,
    MoverConnected,
    ParticipantEffect,
    ParticipantEvent,
)
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.ids import FlipId

Effects = list[ParticipantEffect]


class RankFlips:
    """The flips of one rank's life."""

    def __init__(self, table: FlipParticipant) -> None:
        self._table = table
        self.generation = 0
        """Of the log, from its first FLIP entry on."""
        self.stream = 0
        """The newest one of the mover."""

    def connect(self) -> tuple[int, Effects]:
        """A stream of the mover opens: its number, and what holds now."""
        self.stream += 1
        return self.stream, self._table.on_event(MoverConnected())

    def park(self, entry: EntryReached, generation: int) -> Effects:
        """The model thread is at the FLIP entry."""
        self.generation = generation
        return self._table.on_event(entry)

    def on_event(self, event: ParticipantEvent) -> Effects:
        """What the model thread did, or the log's outcome."""
        return self._table.on_event(event)

    def is_present(self, flip_id: FlipId) -> bool:
        """Whether presence in this attempt is said, and ENTER has not come."""
        return self._table.flip_id == flip_id and self._table.state is ParticipantState.PRESENT

    def on_command(
        self, stream: int, generation: int, command: AssembleReceived | EnterReceived | DisarmReceived
    ) -> Effects:
        """From the mover, on a stream of that number; nothing comes of what is stale."""
        if stream != self.stream or generation != self.generation:
            return []
        return self._table.on_event(command)
