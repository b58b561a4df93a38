"""When a service that ended is started again; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.mesh.limits import EX_CONFIG, EX_GENERATION_ENDED

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0
"""A life this long wipes out what went wrong before it."""

MAX_PROMPT_RESTARTS = 6
PROMPT_WINDOW_S = 60.0
"""So many ends of a generation in this time are followed at once; a group that ends faster than that is failing."""


@dataclass(slots=True)
class RestartPolicy:
    """Doubles the delay with every failure in a row, up to `MAX_DELAY_S`."""

    num_failures_in_row: int = 0
    _prompt_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PROMPT_RESTARTS))

    def delay_s(self, codes: Sequence[int], lived_s: float, now_s: float) -> float | None:
        """How long to wait before the next start, or None: never.

        `codes` are the exit codes of the processes that ended by themselves; at least one. A negative one is a signal.
        """
        assert codes, "nothing ended by itself, so there is nothing to decide"
        if EX_CONFIG in codes:
            return None
        if all(code == EX_GENERATION_ENDED for code in codes) and self._prompt_is_allowed(now_s):
            self._prompt_s.append(now_s)
            return 0.0
        if lived_s >= HEALTHY_S:
            self.num_failures_in_row = 0
        delay_s = min(FIRST_DELAY_S * float(2**self.num_failures_in_row), MAX_DELAY_S)
        if delay_s < MAX_DELAY_S:
            self.num_failures_in_row += 1
        return delay_s

    def _prompt_is_allowed(self, now_s: float) -> bool:
        return len(self._prompt_s) < MAX_PROMPT_RESTARTS or now_s - self._prompt_s[0] >= PROMPT_WINDOW_S
