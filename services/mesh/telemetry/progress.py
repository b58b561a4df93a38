"""What a process is at, and how long that may take: declared, so that a long phase is not taken for a hang.

Pure: time comes in as a clock. Decides nothing about what follows from being overdue; who watches decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where in its life a process is; the values are the protos'."""

    STARTING = 1
    WAITING = 2
    WORKING = 3
    READY = 4
    DRAINING = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """A phase, what it is about, when it began and how long it may last (None: for ever)."""

    phase: Phase
    detail: str
    began_s: float
    deadline_s: float | None


class Progress:
    """The process's own account of where it is. Written by its owner, read by anybody in the process."""

    def __init__(self, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._clock = clock
        self._mark = PhaseMark(Phase.STARTING, "", clock(), None)
        self._beat_s: float | None = None

    @property
    def mark(self) -> PhaseMark:
        """The phase now."""
        return self._mark

    def enter(self, phase: Phase, detail: str = "", deadline_s: float | None = None) -> None:
        """Begins a phase. `detail` says in words what it is about, or what is waited for."""
        now_s = self._clock()
        self._mark = PhaseMark(phase, detail, now_s, deadline_s)
        self._beat_s = now_s

    @contextmanager
    def working(self, detail: str, deadline_s: float) -> Iterator[None]:
        """A long operation with a declared end (a load, a compilation); the phase before it is entered again after."""
        before = self._mark
        self.enter(Phase.WORKING, detail, deadline_s)
        try:
            yield
        finally:
            self.enter(before.phase, before.detail, before.deadline_s)

    def beat(self) -> None:
        """Says that the process got on. Cheap: call it for every step."""
        self._beat_s = self._clock()

    def age_s(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._mark.began_s

    def beat_age_s(self) -> float | None:
        """Seconds since the last sign of progress, or None if there never was one."""
        return None if self._beat_s is None else self._clock() - self._beat_s

    def overdue(self, stall_s: float) -> str | None:
        """Why the process counts as stalled, or None.

        A phase with a declared deadline is measured against that alone; READY is not measured here, as only its owner
        knows whether there is work; every other phase may go `stall_s` seconds without a beat, WAITING for ever.
        """
        mark, age_s = self._mark, self.age_s()
        about = f" ({mark.detail})" if mark.detail else ""
        if mark.deadline_s is not None:
            if age_s <= mark.deadline_s:
                return None
            return f"{self._owner}: {mark.phase.name}{about} for {age_s:.1f} s, declared to last {mark.deadline_s:g} s"
        beat_age_s = self.beat_age_s()
        silent_s = age_s if beat_age_s is None else beat_age_s
        if mark.phase in (Phase.WAITING, Phase.READY) or silent_s <= stall_s:
            return None
        return f"{self._owner}: {mark.phase.name}{about} without progress for {silent_s:.1f} s, allowed {stall_s:g} s"
