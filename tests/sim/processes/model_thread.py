"""What a simulated rank's model thread is: a generator that yields what it waits for, its bounds, and a flip's work."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from services.core.ids import FlipId

MAX_UNREAD_STEPS = 32
"""As of the worker: ids are applied unasked when they are this old."""

LAYOUT_PARTS = ("stage", "algorithm", "draft")
"""What must be asked after a switch."""

NOT_READY_NS = 3_000_000
"""How often a rank that is behind a FLIP entry says so."""

HOP_NS = 2_000_000
"""From the model thread to the event loop, at most: meanwhile the loop decides on what it knows."""

Work = Generator[tuple[Any, ...], Any, None]


@dataclass(frozen=True, slots=True)
class FlipWork:
    """For the model thread, behind whatever entries have come before."""

    flip_id: FlipId
