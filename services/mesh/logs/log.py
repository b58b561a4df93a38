"""The process's log: one line per event, never in the way.

A call formats and enqueues; one thread writes. When the queue is full, lines are dropped and counted, so neither a
flood nor a paused terminal can hold up a loop. What other libraries say through `logging` comes out here as well.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable

from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import MAX_LINES_PER_WINDOW, WINDOW_S, EventRates, Level, format_line

MAX_QUEUED_LINES = 4096
"""Lines between the loop and the writer: some seconds of the worst flood that the rates let through."""

CLOSE_TIMEOUT_S = 0.5
"""How long the end of the process waits for the last lines."""


class Log:
    """Writes events. Safe to call from any thread; never blocks on a reader.

    An event is a literal name in the code (`peer-lost`), never a composed text: rates are counted by it.
    """

    def __init__(self, name: str, level: Level, file: RotatedFile | None, output: PatientOutput) -> None:
        self._name, self._level = name, level
        self._file, self._output = file, output
        self._rates = EventRates()
        self._lock = threading.Lock()
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._thread.start()

    def debug(self, event: str, **fields: object) -> None:
        """Writes what only a developer asks for."""
        self.write(Level.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Writes what an operator reads in a normal run."""
        self.write(Level.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Writes what is wrong and was dealt with."""
        self.write(Level.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Writes what is wrong and needs somebody."""
        self.write(Level.ERROR, event, fields)

    def failure(self, event: str, error: BaseException, **fields: object) -> None:
        """Writes an error with its stack, in one line."""
        stack = "".join(traceback.format_exception(error)).rstrip()
        self.write(Level.ERROR, event, {**fields, "error": str(error) or type(error).__name__, "stack": stack})

    def write(self, level: Level, event: str, fields: dict[str, object]) -> None:
        """Writes one event, unless its level is below the log's or its rate above the bound."""
        if level < self._level:
            return
        with self._lock:
            now_s = time.monotonic()
            self._report_held_back(self._rates.expired(now_s))
            number = self._rates.count(event, now_s)
            if number <= MAX_LINES_PER_WINDOW:
                self._enqueue(level, event, fields)
            elif number == MAX_LINES_PER_WINDOW + 1:
                # Also wakes the writer, which from now on looks at the window's end by itself.
                self._enqueue(Level.WARNING, "holding-lines-back", {"of": event, "for_s": WINDOW_S})

    def close(self) -> None:
        """Writes what is queued, within `CLOSE_TIMEOUT_S`, and ends the writer."""
        with self._lock:
            self._report_held_back(self._rates.remaining())
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def _report_held_back(self, held_back: list[tuple[str, int]]) -> None:
        for event, count in held_back:
            self._enqueue(Level.WARNING, "lines-held-back", {"of": event, "count": count, "window_s": WINDOW_S})

    def _enqueue(self, level: Level, event: str, fields: dict[str, object]) -> None:
        try:
            self._queue.put_nowait(format_line(time.time(), level, self._name, event, fields))
        except queue.Full:
            self._num_dropped += 1

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._report_held_back(self._rates.expired(time.monotonic()))
                timeout_s = WINDOW_S if self._rates.holding_back else None
            try:
                line = self._queue.get(timeout=timeout_s)
            except queue.Empty:
                continue
            if line is None:
                break
            self._write_line(line)
            self._report_dropped()
        if self._file is not None:
            self._file.close()

    def _write_line(self, line: str) -> None:
        encoded = (line + "\n").encode("utf-8", "backslashreplace")
        if self._file is not None:
            self._file.write(encoded)
        if self._output.write(encoded) and (count := self._output.take_dropped()):
            notice = format_line(time.time(), Level.WARNING, self._name, "output-was-full", {"lines_dropped": count})
            self._output.write((notice + "\n").encode())

    def _report_dropped(self) -> None:
        with self._lock:
            if self._num_dropped == 0 or self._queue.qsize() > MAX_QUEUED_LINES // 2:
                return
            count, self._num_dropped = self._num_dropped, 0
        self._write_line(format_line(time.time(), Level.WARNING, self._name, "lines-dropped", {"count": count}))


class ForeignLines(logging.Handler):
    """Brings what libraries say through `logging` into the log; the event is the library's logger."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record, with its stack if it has one."""
        fields: dict[str, object] = {"message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["stack"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self._log.write(_level_of(record.levelno), record.name, fields)


def _level_of(number: int) -> Level:
    return Level(min(max(number // 10 * 10, Level.DEBUG), Level.ERROR))


def adopt_foreign_lines(log: Log) -> Callable[[], None]:
    """Makes `log` the destination of the standard library's logging; returns what undoes it."""
    root = logging.getLogger()
    before = root.handlers[:]
    handler = ForeignLines(log)
    root.handlers[:] = [handler]

    def restore() -> None:
        root.handlers[:] = before

    return restore
