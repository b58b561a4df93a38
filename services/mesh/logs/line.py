"""One event as one line, and how many of a kind may pass: the pure part of logging.

Standard library only: the supervisor writes the same lines. A line is at most `MAX_LINE_BYTES`, so that a pipe takes it
whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from time import gmtime, strftime

MAX_LINE_BYTES = 4096
"""What a pipe takes atomically (PIPE_BUF)."""

MAX_VALUE_CHARS = 3000
"""Of one value, its end: a stack's last frames say most."""

MAX_LINES_PER_WINDOW = 20
WINDOW_S = 10.0
"""Of one event; what is above is counted and reported in one line."""

MAX_EVENT_KINDS = 1024
"""Kinds counted at once. Names of events are literals in the code, so this is not reached but by other libraries."""

_PLAIN = re.compile(r"[\w.,:;/@+\-\[\](){}<>%*#!?&|^~$]+")


class Level(IntEnum):
    """How much a line matters."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


def format_line(time_s: float, level: Level, name: str, event: str, fields: Mapping[str, object]) -> str:
    """`2026-01-02T03:04:05.678Z WARNING worker-1 event key=value …` without a newline, cut to the bound."""
    stamp = strftime("%Y-%m-%dT%H:%M:%S", gmtime(time_s)) + f".{int(time_s % 1 * 1000):03d}Z"
    words = [stamp, level.name, name, event, *(f"{key}={_format_value(value)}" for key, value in fields.items())]
    line = " ".join(words)
    encoded = line.encode("utf-8", "backslashreplace")
    if len(encoded) < MAX_LINE_BYTES:
        return line
    return encoded[: MAX_LINE_BYTES - 8].decode("utf-8", "ignore") + "…cut"


def _format_value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = "…" + text[-MAX_VALUE_CHARS:]
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class _Window:
    began_s: float
    num_seen: int = 0


@dataclass(slots=True)
class EventRates:
    """Lets `MAX_LINES_PER_WINDOW` lines of each event through in `WINDOW_S` seconds and counts the rest."""

    _windows: dict[str, _Window] = field(default_factory=dict)

    def count(self, event: str, now_s: float) -> int:
        """Counts a line and returns its number in the event's window; one above `MAX_LINES_PER_WINDOW` may not pass.

        A window that is over must first be taken out by `expired`.
        """
        window = self._windows.get(event)
        if window is None:
            if len(self._windows) >= MAX_EVENT_KINDS:
                self._windows.pop(next(iter(self._windows)))
            window = self._windows[event] = _Window(now_s)
        window.num_seen += 1
        return window.num_seen

    def expired(self, now_s: float) -> list[tuple[str, int]]:
        """Forgets the windows that are over; returns (event, lines held back) of those that held any back."""
        over = [(event, window) for event, window in self._windows.items() if now_s - window.began_s >= WINDOW_S]
        for event, _ in over:
            del self._windows[event]
        return _held_back(over)

    def remaining(self) -> list[tuple[str, int]]:
        """(event, lines held back so far) of all windows, for the end."""
        return _held_back(list(self._windows.items()))

    @property
    def holding_back(self) -> bool:
        """Whether some event is over its rate now, so that somebody must look again later."""
        return any(window.num_seen > MAX_LINES_PER_WINDOW for window in self._windows.values())


def _held_back(windows: list[tuple[str, _Window]]) -> list[tuple[str, int]]:
    return [(e, w.num_seen - MAX_LINES_PER_WINDOW) for e, w in windows if w.num_seen > MAX_LINES_PER_WINDOW]
