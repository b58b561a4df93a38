"""Looks at the host's free memory for the pressure ladder, at most once a second. Decides nothing."""

import time
from collections.abc import Callable

from services.mesh.host_memory import HostMemoryReader
from services.scheduler.inputs import MemoryRead

LOOK_EVERY_S = 1.0
RECOVERY_MARGIN = 1.1
"""Of the floor: above it, retracted requests may come back."""


class MemoryWatch:
    """Over one host, for one generation after another."""

    def __init__(
        self,
        floor_bytes: int,
        block_bytes: int,
        memory: HostMemoryReader,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_bytes`: of a block's rows, all ranks together."""
        self.floor_bytes, self._block_bytes = floor_bytes, block_bytes
        self.free_bytes = 0
        """As it was last seen."""
        self._memory, self._clock_s = memory, clock_s
        self._looked_s = float("-inf")

    def look(self) -> MemoryRead | None:
        """What is missing to the floor; None where it was looked at within the last second."""
        if self._clock_s() - self._looked_s < LOOK_EVERY_S:
            return None
        self._looked_s = self._clock_s()
        free_bytes = self.free_bytes = self._memory.read().left_bytes
        num_needed = -(-(self.floor_bytes - free_bytes) // self._block_bytes)
        return MemoryRead(num_needed, is_enough=free_bytes >= self.floor_bytes * RECOVERY_MARGIN)
