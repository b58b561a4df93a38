"""The thread that owns the tensors, and the two bounded ways in and out of it.

Entries go in through a queue, answers come out in a list that the event loop takes whole, so one wake-up may carry
many. Blocked in `get` when there is nothing to do. Ends at the first error: the error is the last answer, and nothing
after it is executed. Never touches the loop but by one threadsafe call.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.core.ids import FlipId
from services.core.log import ProtocolError
from services.core.step import LogEntry, StepReport
from services.worker.participation import FlipAnswer, Looked, WorkLost
from services.worker.steps.reset import Opened

MAX_QUEUED_ENTRIES = 256
"""Entries received and not executed. A scheduler issues a few steps ahead; more means that it forgot to wait."""

Answer = Opened | StepReport | FlipAnswer
"""What an entry, or the work of a flip, was answered with."""


@dataclass(frozen=True, slots=True)
class FlipWork:
    """Read, seam, write and verify: asked for by the gate, done between the FLIP entry and its outcome."""

    flip_id: FlipId


@dataclass(frozen=True, slots=True)
class FlipLook:
    """Whether the flip that this rank is parked for could still begin."""

    flip_id: FlipId


class Executes(Protocol):
    """What the thread drives: `runner.Runner`, and nothing else in the service."""

    notice: Callable[[FlipAnswer], None]
    """To be called, on this thread, with where the rank is in a flip."""

    def execute(self, entry: LogEntry) -> Opened | StepReport | None:
        """Executes the next entry."""

    def work(self, flip_id: FlipId) -> FlipAnswer:
        """Does this rank's part of a flip."""

    def look(self, flip_id: FlipId) -> FlipAnswer:
        """Looks whether it could begin; touches nothing and waits for nobody."""


class Execution:
    """One model thread. `offer` and `take` are for the event loop, `notify` is called on the model thread."""

    def __init__(self, runner: Executes, notify: Callable[[], None]) -> None:
        self._runner, self._notify = runner, notify
        runner.notice = self._answer
        self._entries: queue.Queue[LogEntry | FlipWork | FlipLook | None] = queue.Queue(MAX_QUEUED_ENTRIES)
        self._answers: deque[Answer] = deque()
        self._notified = False
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """Why the thread ended; `take` gives what was answered before."""
        self.failed_at = 0
        """Sequence of the entry at which it did."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def offer(self, entry: LogEntry) -> None:
        """Hands over the next entry; never waits.

        Raises:
            ProtocolError: more than `MAX_QUEUED_ENTRIES` are waiting.
        """
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            raise ProtocolError(
                f"entry {entry.sequence} is the {MAX_QUEUED_ENTRIES + 1}th that waits here: the scheduler must wait "
                "for reports before it writes on"
            ) from None

    def offer_work(self, flip_id: FlipId) -> None:
        """Hands over a flip's work; the thread is parked then and has nothing else."""
        self._entries.put_nowait(FlipWork(flip_id))

    def offer_look(self, flip_id: FlipId) -> None:
        """Asks it to look whether a flip could begin; answered behind whatever has been given before."""
        self._entries.put_nowait(FlipLook(flip_id))

    def take(self) -> Iterator[Answer]:
        """Yields what was answered since the last call, in order."""
        with self._lock:
            self._notified = False
            answers, self._answers = self._answers, deque()
        yield from answers

    def finish(self, timeout_s: float) -> bool:
        """Asks the thread to end after what is queued and waits for it; whether it ended."""
        try:
            self._entries.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._entries.get()) is not None:
            if isinstance(item, FlipWork):
                self._work(item)
                continue
            if isinstance(item, FlipLook):
                self._look(item)
                continue
            try:
                answer = self._runner.execute(item)
            except BaseException as error:
                self.failed_at, self.error = item.sequence, error
                self._notify()
                return
            if answer is not None:
                self._answer(answer)

    def _work(self, work: FlipWork) -> None:
        """A failure is the flip's, not the log's. What nobody foresaw is no evidence that anything is whole."""
        try:
            self._answer(self._runner.work(work.flip_id))
        except Exception as error:
            self._answer(WorkLost(work.flip_id, f"{type(error).__name__}: {error}", restored=False))

    def _look(self, look: FlipLook) -> None:
        """One that cannot be made is a reason not to begin."""
        try:
            self._answer(self._runner.look(look.flip_id))
        except Exception as error:
            self._answer(Looked(look.flip_id, f"{type(error).__name__}: {error}"))

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            notified, self._notified = self._notified, True
        if not notified:
            self._notify()
