"""Points of a flip at which a test may hold this process, and the holds that are set there.

A hold is for one arrival: what passes its point next stands there until the hold is released or its bound is over.
Without `[debug] enabled` there are no holds, and nobody who passes a point asks for one. Never holds what no call of
`HoldProcess` holds now.
"""

from __future__ import annotations

import asyncio
import threading
from enum import Enum

import anyio

from services.mesh.debug.damage import DamageOrders

MAX_HELD_MS = 600_000
"""Longest arrival: above every deadline that it may be held against."""


class HoldPoint(Enum):
    """Where a process may be held, the service first; the values are the protos', which say what each one is."""

    SCHEDULER_ARMING = 1
    SCHEDULER_ASKING = 2
    SCHEDULER_OUTCOME = 3
    MOVER_ARMED = 4
    MOVER_ASSEMBLING = 5
    MOVER_ENTERING = 6
    MOVER_ENTERED = 7
    MOVER_CONCLUDING = 8
    MOVER_CONCLUDED = 9
    WORKER_PARKED = 10
    WORKER_ASSEMBLING = 11
    WORKER_ENTERED = 12
    WORKER_VERIFIED = 13
    WORKER_OUTCOME = 14
    WORKER_SWITCHED = 15

    @property
    def service(self) -> str:
        """Which service passes it."""
        return self.name.partition("_")[0].lower()


class Hold:
    """One arrival to come at one point; made on the event loop, which alone waits for `reached` and `over`."""

    def __init__(self, point: HoldPoint, bound_s: float) -> None:
        self.point, self.bound_s = point, bound_s
        self.reached, self.over = asyncio.Event(), asyncio.Event()
        self._released, self._loop = threading.Event(), asyncio.get_running_loop()

    def release(self) -> None:
        """Whoever stands there, or comes later, goes on."""
        self._released.set()
        self.over.set()

    async def stand(self) -> None:
        """On the event loop: until released, or for the bound."""
        self.reached.set()
        with anyio.move_on_after(self.bound_s):
            await self.over.wait()
        self.release()

    def stand_in_thread(self) -> None:
        """The same on any other thread."""
        self._loop.call_soon_threadsafe(self.reached.set)
        self._released.wait(self.bound_s)
        self._loop.call_soon_threadsafe(self.release)


class Holds:
    """The holds of one process, at most one for each point, and the damage that is asked of it."""

    def __init__(self) -> None:
        self._set: dict[HoldPoint, Hold] = {}
        self.damage = DamageOrders()

    def set(self, point: HoldPoint, bound_s: float) -> Hold | None:
        """A hold for the next arrival; None where one is set already."""
        if point in self._set:
            return None
        hold = self._set[point] = Hold(point, bound_s)
        return hold

    def release(self, hold: Hold) -> None:
        """Takes a hold back, reached or not."""
        if self._set.get(hold.point) is hold:
            del self._set[hold.point]
        hold.release()

    async def passing(self, point: HoldPoint) -> None:
        """This process passes a point, on its event loop."""
        if (hold := self._set.pop(point, None)) is not None:
            await hold.stand()

    def passing_in_thread(self, point: HoldPoint) -> None:
        """The same on any other thread."""
        if (hold := self._set.pop(point, None)) is not None:
            hold.stand_in_thread()
