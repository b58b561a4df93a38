"""What one flip's work took and moved on this rank, added up by those who do it. Durations do not overlap."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Part = Literal["read_ns", "seam_ns", "write_ns", "verify_ns"]


@dataclass(slots=True)
class Tally:
    """Of the work at hand; the model thread's alone."""

    read_ns: int = 0
    seam_ns: int = 0
    write_ns: int = 0
    verify_ns: int = 0
    bytes_moved: int = 0
    """Received from other ranks."""
    rows_moved: int = 0
    """Rows received, in part or whole, from other ranks; a row that comes from two counts twice."""

    def clear(self) -> None:
        """Another flip's work begins."""
        self.read_ns = self.seam_ns = self.write_ns = self.verify_ns = self.bytes_moved = self.rows_moved = 0

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Adds what the block takes."""
        began_ns = time.perf_counter_ns()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter_ns() - began_ns)
