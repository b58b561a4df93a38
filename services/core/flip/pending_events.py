"""What ranks said about an attempt that nobody coordinates yet, kept until the scheduler asks for it. Pure.

A rank's stream and the scheduler's question race each other: a rank with nothing to execute parks before the question
is here, and after a restart of this process ranks say what they have verified before the scheduler asks again. They
say it once. Bounded: the oldest is forgotten first. Never decides; the coordinator's table judges what is late.
"""

from collections import deque

from services.core.flip.messages import CoordinatorEvent, DeadlineReached
from services.core.flip.records import FlipKey
from services.core.ids import Rank

MAX_EARLY_EVENTS = 1024
"""Over all ranks; each says a handful about one attempt, and one attempt is pending at a time."""


class PendingEvents:
    """Events of ranks, each with the attempt it names."""

    def __init__(self) -> None:
        self._events: deque[tuple[FlipKey, CoordinatorEvent]] = deque(maxlen=MAX_EARLY_EVENTS)

    def keep(self, key: FlipKey, event: CoordinatorEvent) -> None:
        """A rank said this, and no attempt `key` is open."""
        self._events.append((key, event))

    def forget(self, rank: Rank) -> None:
        """The rank's stream ended: it will say again what holds then."""
        kept = [(key, event) for key, event in self._events if _rank_of(event) != rank]
        self._events = deque(kept, maxlen=MAX_EARLY_EVENTS)

    def take(self, key: FlipKey) -> list[CoordinatorEvent]:
        """What was said about `key`, in order; what is of attempts before it is over, and forgotten.

        What is of later ones stays: the question taken now may be one whose scheduler has long gone on, heard late.
        """
        events = [event for early_key, event in self._events if early_key == key]
        later = [(early_key, event) for early_key, event in self._events if early_key > key]
        self._events = deque(later, maxlen=MAX_EARLY_EVENTS)
        return events


def _rank_of(event: CoordinatorEvent) -> Rank | None:
    return None if isinstance(event, DeadlineReached) else event.rank
