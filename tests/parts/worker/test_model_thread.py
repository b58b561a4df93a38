"""The model thread: what a flip's work is answered with when nobody foresaw what happened in it."""

import threading
from collections.abc import Callable

from services.core.ids import FlipId
from services.core.step import LogEntry
from services.worker.model_thread import Execution
from services.worker.participation import FlipAnswer, WorkLost

DEADLINE_S = 20.0


class Raising:
    """A runner whose flip's work raises."""

    notice: Callable[[FlipAnswer], None]

    def execute(self, entry: LogEntry) -> None:
        raise AssertionError(f"no entry is given, got {entry}")

    def work(self, flip_id: FlipId) -> FlipAnswer:
        raise KeyError(f"of flip {flip_id}")


def test_what_nobody_foresaw_in_a_flips_work_is_broken_and_never_restored() -> None:
    heard = threading.Event()
    execution = Execution(Raising(), heard.set)
    execution.start()
    execution.offer_work(FlipId(3))
    assert heard.wait(DEADLINE_S)
    assert list(execution.take()) == [WorkLost(FlipId(3), "KeyError: 'of flip 3'", restored=False)]
    assert execution.finish(DEADLINE_S) and execution.error is None, "the log goes on: the group decides"
