"""Numbers of generations, which that grow over every restart of this process, of the machine and of the clock."""

import time
from collections.abc import Callable
from pathlib import Path

from services.core.ids import Generation
from services.mesh.settings.paths import write_atomically

NS_PER_MS = 1_000_000


class GenerationCounter:
    """Milliseconds of wall time, or one more than the last one where the clock went back; kept in one small file."""

    def __init__(self, path: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._path, self._clock_ns = path, clock_ns
        self._last = self._read()

    def next(self) -> Generation:
        """A generation above every earlier one; written down before it is used."""
        self._last = max(self._last + 1, self._clock_ns() // NS_PER_MS)
        write_atomically(self._path, f"{self._last}\n")
        return Generation(self._last)

    def _read(self) -> int:
        try:
            return int(self._path.read_text("ascii"))
        except (OSError, ValueError):
            # Absent at the first start; damaged, the wall clock alone is above it in all likelihood.
            return 0
