"""What ranks say to each other directly: hidden states down the pipeline, group operations, sampled ids.

Rich enough to deadlock: a send waits for room, a receive for its message, a group operation for every rank. It has no
deadline, so that a wait nobody ends is found as a wedge instead of being repaired. One data plane lives for one
generation.

Invariants it enforces: every rank meets the group operations in one order; a message is taken by the step it was sent
for; no message is under way when the ranks enter a flip.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from services.core.ids import Rank
from tests.sim.processes.world import Channel, Delay, InvariantError, Process, World

WAIT = object()
"""What an operation returns that is not done: the rank is resumed with its value later."""

GroupKey = tuple[object, ...]


class Member(Process):
    """What the data plane knows of a rank."""

    rank: Rank
    resume: Callable[[Any], None]


class Link:
    """Hidden states from one stage to the next, with room for `capacity` of them."""

    def __init__(self, world: World, sender: Member, receiver: Member, capacity: int, delay: Delay) -> None:
        self._world, self._sender, self._capacity, self._receiver = world, sender, capacity, receiver
        self._channel = Channel(world, receiver, self._arrive, delay)
        self._arrived: deque[tuple[int, Any]] = deque()
        self._blocked: tuple[int, Any] | None = None
        self._awaited: int | None = None
        self._sender_life = sender.life
        self.num_held = 0
        """Sent and not yet taken."""

    @property
    def waits(self) -> list[str]:
        """Who is stuck in it."""
        waits = []
        if self._blocked is not None:
            waits.append(f"{self._sender.name} in the send of step {self._blocked[0]}")
        if self._awaited is not None:
            waits.append(f"{self._receiver.name} in the receive of step {self._awaited}")
        return waits

    def send(self, sequence: int, payload: Any) -> object:
        """Puts one message in, or waits for room."""
        if self.num_held >= self._capacity:
            self._blocked = (sequence, payload)
            return WAIT
        self.num_held += 1
        self._channel.send(sequence, payload)
        return None

    def recv(self, sequence: int) -> object:
        """Takes the message of `sequence`, or waits for it."""
        if not self._arrived:
            self._awaited = sequence
            return WAIT
        return self._taken(sequence)

    def _arrive(self, sequence: int, payload: Any) -> None:
        self._arrived.append((sequence, payload))
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            self._receiver.resume(self._taken(awaited))

    def _taken(self, sequence: int) -> Any:
        sent, payload = self._arrived.popleft()
        if sent != sequence:
            raise InvariantError(
                "framing", f"{self._receiver.name} takes step {sequence}, the message is of step {sent}"
            )
        self.num_held -= 1
        if self._blocked is not None:
            blocked, self._blocked = self._blocked, None
            self.send(*blocked)
            if self._sender.life == self._sender_life:
                self._world.at(0, self._sender, self._sender.resume, None)
        return payload


class DataPlane:
    """Links, group operations and token boards of one generation."""

    def __init__(self, world: World, members: list[Member], capacity: int, delay: Delay) -> None:
        self._world, self._members, self._delay = world, members, delay
        self.links = [
            Link(world, members[rank], members[rank + 1], capacity, delay) for rank in range(len(members) - 1)
        ]
        self._lives = [member.life for member in members]
        """A process that was replaced is no member: its successor knows nothing of this generation."""
        self._order: list[GroupKey] = []
        self._places = [0] * len(members)
        self._joined: dict[GroupKey, dict[Rank, Any]] = {}
        self._boards: list[dict[int, tuple[int, ...]]] = [{} for _ in members]
        self._awaits: list[int | None] = [None] * len(members)
        self._board_channels = [Channel(world, member, self._post, delay) for member in members]

    @property
    def num_held(self) -> int:
        """Messages sent and not consumed."""
        return sum(link.num_held for link in self.links)

    @property
    def waits(self) -> str:
        """Which rank is in what, for a failure that says who waits for whom."""
        waits = [wait for link in self.links for wait in link.waits]
        waits += [f"rank-{rank} in group operation {key}" for key, ranks in self._joined.items() for rank in ranks]
        waits += [f"rank-{r} awaits the ids of step {s}" for r, s in enumerate(self._awaits) if s is not None]
        return ", ".join(waits) or "nobody waits for a rank"

    def join(self, rank: Rank, key: GroupKey, value: Any) -> object:
        """Enters a group operation; done when all have, with their values by rank."""
        place = self._places[rank]
        self._places[rank] += 1
        if place == len(self._order):
            self._order.append(key)
        elif self._order[place] != key:
            raise InvariantError(
                "collective order", f"rank {rank} enters {key} where another rank entered {self._order[place]}"
            )
        values = self._joined.setdefault(key, {})
        values[rank] = value
        if len(values) == len(self._members):
            del self._joined[key]
            together = [values[member.rank] for member in self._members]
            for member, life in zip(self._members, self._lives, strict=True):
                if member.life == life:
                    self._world.at(self._world.draw(self._delay), member, member.resume, together)
        return WAIT

    def publish(self, sequence: int, ids: tuple[int, ...]) -> None:
        """From the sampling rank, the last, to every other board."""
        for rank, channel in enumerate(self._board_channels[:-1]):
            channel.send(rank, sequence, ids)

    def take_ids(self, rank: Rank, sequence: int) -> object:
        """The ids that `sequence` sampled, or a wait for them."""
        ids = self._boards[rank].pop(sequence, None)
        if ids is None:
            self._awaits[rank] = sequence
            return WAIT
        return ids

    def _post(self, rank: Rank, sequence: int, ids: tuple[int, ...]) -> None:
        if self._awaits[rank] == sequence:
            self._awaits[rank] = None
            self._members[rank].resume(ids)
        else:
            self._boards[rank][sequence] = ids
