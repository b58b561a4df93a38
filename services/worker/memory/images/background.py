"""One piece of work in a thread of its own: begun at once, waited for with a deadline, asked to stop between parts.

Never kept in a queue: who starts a second one waits for the first. A process that ends does not wait for it, so the
work must leave nothing half done that matters.
"""

import threading
from collections.abc import Callable

CANCEL_WAIT_S = 30.0
"""How long a cancelled work may take to notice: one part and one synchronisation of a file."""


class CancelledError(Exception):
    """Raised within the work by `check` after `cancel`."""


class Background:
    """`work(check)` runs in a thread; `check(done_bytes)` is to be called after every part of it."""

    def __init__(self, name: str, work: Callable[[Callable[[int], None]], None]) -> None:
        self.done_bytes = 0
        """Progress, as the work last told it."""
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What ended it, once it has ended; None: it is complete."""
        return self._error

    def wait(self, deadline_s: float) -> bool:
        """Whether it ended, well or not, within the deadline."""
        return self._ended.wait(max(deadline_s, 0))

    def cancel(self) -> None:
        """Asks it to stop at its next part."""
        self._cancelled.set()

    def _check(self, done_bytes: int) -> None:
        self.done_bytes = done_bytes
        if self._cancelled.is_set():
            raise CancelledError

    def _run(self) -> None:
        try:
            self._work(self._check)
        except BaseException as error:  # Kept for whoever waits: a thread's own end would only print it.
            self._error = error
        finally:
            self._ended.set()
