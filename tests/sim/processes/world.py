"""Virtual time: a heap of events, processes that stop and die, channels that are FIFO each and race each other.

One generator of random numbers decides every delay, so a seed is a schedule and a schedule is a seed. Nothing here
knows what is simulated. Never reads a clock of the machine.

Invariants: an event for an earlier life of a process never happens; what reaches a stopped process happens when it
goes on, in the order of arrival; messages of one channel arrive in the order they were sent.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import Any

TAIL_EVENTS = 40
"""What a failure prints."""
MAX_EVENTS = 200_000
"""Of one schedule: far above what the largest needs, so that reaching it is a livelock."""

LOSS_SHARE = 0.5
"""How often the end of a sender takes with it what it had sent."""

Delay = tuple[int, int]
"""[shortest, longest] in ns; most are short, a few are long."""
Call = Callable[..., None]
Note = tuple[int, str, str, tuple[object, ...]]


class InvariantError(AssertionError):
    """The system did what it must never do; `invariant` names the rule."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant, self.text = invariant, text

    def __reduce__(self) -> tuple[type["InvariantError"], tuple[str, str]]:
        """So that it may come from another process."""
        return type(self), (self.invariant, self.text)


class Process:
    """Something that receives events, can be stopped, and can die and live again."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.life = 0
        self.is_up = False
        self.is_stopped = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def hold(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Keeps an event until the process goes on."""
        self._backlog.append((call, args))

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT: what came meanwhile happens now, in order."""
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        life = self.life
        for call, args in backlog:
            if self.life != life:
                return
            call(*args)

    def die(self) -> None:
        """This life is over: nothing that was sent to it arrives."""
        self.life += 1
        self.is_up = self.is_stopped = False
        self._backlog = []


class World:
    """The heap, the clock and what has been seen."""

    def __init__(self, rng: Random, *, keeps_all: bool = False, slow_share: float = 0.0, slow_ns: int = 0) -> None:
        self.rng = rng
        self._slow_share, self._slow_ns = slow_share, slow_ns
        self.now_ns = 0
        self.num_events = 0
        self.notes: deque[Note] = deque(maxlen=None if keeps_all else TAIL_EVENTS)
        self.random = rng.random
        """The method itself: it is asked for every message."""
        self.heap: list[tuple[int, int, Process | None, int, Call, tuple[Any, ...]]] = []
        self.num_pushed = 0

    def at(self, delay_ns: int, process: Process | None, call: Callable[..., None], *args: Any) -> None:
        """Makes `call` happen to this life of `process` after `delay_ns`; None: to nobody who could die."""
        self.num_pushed += 1
        life = 0 if process is None else process.life
        heappush(self.heap, (self.now_ns + delay_ns, self.num_pushed, process, life, call, args))

    def draw(self, delay: Delay) -> int:
        """One delay; the cube makes long ones rare."""
        share = self.random()
        return delay[0] + int(share * share * share * (delay[1] - delay[0]))

    def delay_of_channel(self, delay: Delay) -> Delay:
        """Some channels are many times slower than others, so that what is sent last arrives first."""
        if self._slow_share and self.rng.random() < self._slow_share:
            return (delay[0], min(20 * delay[1], self._slow_ns))
        return delay

    def note(self, who: str, what: str, *details: object) -> None:
        """Remembers what happened; `details` must be values, as they are written out later or never."""
        self.notes.append((self.now_ns, who, what, details))

    def run(self, until_ns: int) -> None:
        """Until nothing is left to happen.

        Raises:
            InvariantError: it goes on after `until_ns` or for too many events.
        """
        heap, num_events = self.heap, 0
        while heap:
            at_ns, _, process, life, call, args = heappop(heap)
            if process is not None:
                if process.life != life:
                    continue
                if process.is_stopped:
                    process.hold(call, args)
                    continue
            self.now_ns = at_ns
            self.num_events = num_events = num_events + 1
            call(*args)
            if at_ns > until_ns or num_events > MAX_EVENTS:
                raise InvariantError(
                    "liveness", f"still at work at {at_ns / 1e6:.3f} ms after {self.num_events} events"
                )

    def lines(self) -> list[str]:
        """What was noted, in fixed columns: time in ms, who, what, details."""
        return [
            f"{at_ns / 1e6:>10.3f}  {who:<9} {what:<12} {' '.join(map(str, details))}".rstrip()
            for at_ns, who, what, details in self.notes
        ]

    def fingerprint(self) -> str:
        """Hash of all notes that were kept: equal for equal schedules."""
        return blake2b("\n".join(self.lines()).encode(), digest_size=16).hexdigest()


class Channel:
    """One direction of a stream to one life of a process."""

    __slots__ = ("_arrive", "_first_ns", "_is_cut", "_last_ns", "_life", "_span_ns", "_target", "_world", "is_open")

    def __init__(self, world: World, target: Process, arrive: Call, delay: Delay) -> None:
        self._world, self._target, self._arrive = world, target, arrive
        self._first_ns, longest_ns = world.delay_of_channel(delay)
        self._span_ns = longest_ns - self._first_ns
        self._life = target.life
        self._last_ns = 0
        self._is_cut = False
        self.is_open = True

    def send(self, *message: Any) -> None:
        """Arrives after everything sent before; nothing happens once the channel has ended."""
        if self.is_open:
            self._post(self._deliver, message)

    def end(self, on_end: Call, *args: Any) -> None:
        """The sender is gone: `on_end` happens to the receiver, after what was sent, or instead of it.

        What a killed process had not yet given to the kernel is lost with it.
        """
        if self.is_open:
            self.is_open = False
            self._is_cut = self._world.rng.random() < LOSS_SHARE
            self._post(on_end, args)

    def cut(self) -> None:
        """Both directions are gone at once: what is on the way is lost."""
        self.is_open, self._is_cut = False, True

    def _post(self, call: Call, args: tuple[Any, ...]) -> None:
        # `World.draw` and `World.at` in one, as no other line of a schedule runs as often.
        target, life = self._target, self._life
        if target.life != life:
            return
        world = self._world
        share = world.random()
        at_ns = world.now_ns + self._first_ns + int(share * share * share * self._span_ns)
        if at_ns < self._last_ns:
            at_ns = self._last_ns
        self._last_ns = at_ns
        world.num_pushed += 1
        heappush(world.heap, (at_ns, world.num_pushed, target, life, call, args))

    def _deliver(self, *message: Any) -> None:
        if not self._is_cut:
            self._arrive(*message)
