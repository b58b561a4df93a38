"""A thread of its own for calls that cannot be interrupted: whoever waits for one may leave it behind."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

END_S = 0.5
"""How long a lane that was let go may take; one that is stuck in a call is left behind."""


class SerialExecutor:
    """One daemon thread that runs calls in order, so that a caller can leave one behind."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Hands over the next call; what it ends with."""
        done: Future[None] = Future()
        self._calls.put((done, call))
        return done

    def close(self) -> None:
        """Lets the thread end after what was handed over, and gives it a moment: one that comes back to an interpreter
        that is ending takes the process with it."""
        self._calls.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            done, call = item
            try:
                call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
