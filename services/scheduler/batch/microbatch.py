"""The window of unacknowledged steps, and how work is spread over it.

TP has one batch and issues `steps_ahead` steps of it. PP has as many batches in flight as stages: the index of a
microbatch is free again once every rank has acknowledged its step, so at most one step of an index is in the log
unexecuted. A request is not tied to an index: it belongs to the step it is in, and whoever is ready is shared out over
the free indexes, so that a burst never fills one of them while stages idle.
"""

from collections import deque

from services.core.ids import LayoutKind
from services.core.ids import LogIndex as StepSequence
from services.core.layout import Layout


class StepsInFlight:
    """Unacknowledged steps of one layout."""

    __slots__ = ("_free", "_microbatch_of", "capacity", "max_samples_in_flight", "num_stages")

    def __init__(self, layout: Layout, steps_ahead: int) -> None:
        self.num_stages = layout.num_stages
        is_tp = layout.kind is LayoutKind.TP
        self.capacity = steps_ahead if is_tp else self.num_stages
        self.max_samples_in_flight = steps_ahead if is_tp else 1
        """Of one request: in PP the other stages' time goes by before its next step, its token is back by then."""
        self._free = deque(0 if is_tp else slot for slot in range(self.capacity))
        self._microbatch_of: dict[StepSequence, int] = {}

    @property
    def num_in_flight(self) -> int:
        """Steps that some rank has not acknowledged."""
        return len(self._microbatch_of)

    @property
    def is_open(self) -> bool:
        """Whether one more step may be issued."""
        return bool(self._free)

    def issue(self, sequence: StepSequence) -> int:
        """The microbatch of a new step; the one free for longest, which keeps stages in turn."""
        microbatch = self._free.popleft()
        self._microbatch_of[sequence] = microbatch
        return microbatch

    def acknowledge(self, sequence: StepSequence) -> None:
        """Every rank has executed the step."""
        self._free.append(self._microbatch_of.pop(sequence))

    def decode_share(self, num_ready: int, num_decoding: int) -> int:
        """Rows of the next step where `num_ready` could decode now, of `num_decoding` in all."""
        if self.num_stages == 1:
            return num_ready
        return min(_ceil_div(num_ready, len(self._free)), _ceil_div(num_decoding, self.num_stages))

    def token_budget(self, max_tokens: int, *, anyone_decodes: bool) -> int:
        """Tokens of the next step: while requests decode, all steps in flight share `max_tokens`.

        A decoding request waits for every step ahead of its own, so what they hold together is its token gap.
        """
        return max(1, max_tokens // self.capacity) if anyone_decodes else max_tokens

    def prefill_share(self, num_ready: int) -> int:
        """Prompts of the next step where `num_ready` have tokens to compute or could be admitted."""
        return num_ready if self.num_stages == 1 else _ceil_div(num_ready, len(self._free))


def _ceil_div(total: int, parts: int) -> int:
    return -(-total // parts)
