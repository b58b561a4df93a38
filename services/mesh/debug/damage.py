"""Damage to rows of the KV cache that a test asks of this process, carried from its event loop to its model thread.

Exists only where `[debug] enabled` made it. Never damages by itself; what nobody takes within its bound is taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum

MAX_PENDING = 16
"""Damages that wait for a step: one instrument asks for one at a time."""


class DamageKind(Enum):
    """What is damaged; the values are the proto's, which says what each one is."""

    BLOCK = 1
    HEAD = 2
    LAYER = 3
    ROW = 4
    FOREIGN_BLOCK = 5
    STALE_BLOCK = 6


class NothingToDamageError(Exception):
    """No running request has rows enough on this rank; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class DamageOrder:
    """One damage that was asked for, until the model thread has done it."""

    kind: DamageKind
    seed: int
    done: asyncio.Future[str]
    loop: asyncio.AbstractEventLoop

    def answer(self, what: str) -> None:
        """From the model thread: what was damaged."""
        self.loop.call_soon_threadsafe(self._set, what, None)

    def refuse(self, error: NothingToDamageError) -> None:
        """From the model thread: why nothing was."""
        self.loop.call_soon_threadsafe(self._set, "", error)

    def _set(self, what: str, error: NothingToDamageError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(what)
        else:
            self.done.set_exception(error)


class DamageOrders:
    """Orders of one process, from its event loop to its model thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[DamageOrder] = deque()

    async def order(self, kind: DamageKind, seed: int, bound_s: float) -> str:
        """Asks for one damage before the next step; what was damaged.

        Raises:
            NothingToDamageError: there were no such rows, or too many orders wait.
            TimeoutError: no step came within the bound.
        """
        loop = asyncio.get_running_loop()
        order = DamageOrder(kind, seed, loop.create_future(), loop)
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                raise NothingToDamageError(f"{MAX_PENDING} orders wait for a step already")
            self._pending.append(order)
        try:
            return await asyncio.wait_for(order.done, bound_s)
        finally:
            with self._lock:
                if order in self._pending:
                    self._pending.remove(order)

    def take(self) -> list[DamageOrder]:
        """On the model thread: what is to be done now."""
        if not self._pending:
            return []
        with self._lock:
            taken, self._pending = list(self._pending), deque()
        return taken
