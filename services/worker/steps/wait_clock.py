"""How long one thread has waited for its peers, call by call."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WaitClock:
    """Calls that wait for peers, and how long they took in all."""

    def __init__(self) -> None:
        self.waited_ns = 0

    def timed(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Makes one call and adds its time."""
        began_ns = time.perf_counter_ns()
        result = call(*args, **kwargs)
        self.waited_ns += time.perf_counter_ns() - began_ns
        return result
