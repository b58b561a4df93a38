"""What the two halves of a rank's memory, weights and rows, have in common: a verdict on a flip, and asks performed.

`Performs` maps each kind of ask (core.flip.work_asks) that a half can be given to what does it. None is well; an answer
is that answer; an error is a failure with its reason, or unknown where the ask waits for other ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.core.flip.work_table import Answer

Performs = Mapping[type[Any], Callable[[Any], Answer | None]]


class NotDoneError(RuntimeError):
    """An ask that was not done, or whose result is wrong; its message is the whole reason."""


@dataclass(frozen=True, slots=True)
class FlipPlan:
    """A rank's verdict on a flip, before anything is touched."""

    hash: int
    """Of what is to move: equal on all ranks or not the same plan."""
    refusal: str = ""
    """Why it does not fit; empty: it fits."""
