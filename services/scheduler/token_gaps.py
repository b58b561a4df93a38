"""The longest time between two tokens of a request that lived across a flip. Pure: times come in with the events."""

from collections import deque
from collections.abc import Iterable

from services.core.ids import RequestId
from services.core.request import Emitted, Finished, RequestEvent

MAX_OPEN_GAPS = 32
"""Flips whose requests have not all gone on; the oldest is given up first."""


class FlipGaps:
    """One flip's gaps: open until each request that was decoding has its next token or has ended."""

    def __init__(self, waiting: Iterable[RequestId]) -> None:
        self._waiting = set(waiting)
        self.num_decoding = len(self._waiting)
        """Requests that were decoding when the outcome was written."""
        self.longest_ns: int | None = None
        """The longest gap closed so far, or None while there is none."""

    @property
    def is_closed(self) -> bool:
        """Whether every request that was decoding has gone on or ended."""
        return not self._waiting

    def went_on(self, request_id: RequestId, gap_ns: int) -> None:
        """A request got a token, `gap_ns` after the one before it."""
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            self.longest_ns = max(gap_ns, self.longest_ns or 0)

    def ended(self, request_id: RequestId) -> None:
        """A request is over: it waits for no token."""
        self._waiting.discard(request_id)


class TokenGaps:
    """Remembers when each open request last got a token, and measures around each flip by itself.

    Flips may follow each other faster than requests get tokens: a token then closes the gaps of all of them.
    """

    def __init__(self) -> None:
        self._last_ns: dict[RequestId, int] = {}
        self._open: deque[FlipGaps] = deque(maxlen=MAX_OPEN_GAPS)

    def note(self, events: Iterable[RequestEvent], now_ns: int) -> bool:
        """Takes what is delivered to routers, in order; whether a flip's gaps are all closed by it."""
        for event in events:
            match event:
                case Emitted(request_id=request_id):
                    gap_ns = now_ns - self._last_ns.get(request_id, now_ns)
                    for gaps in self._open:
                        gaps.went_on(request_id, gap_ns)
                    self._last_ns[request_id] = now_ns
                case Finished(request_id=request_id):
                    self._last_ns.pop(request_id, None)
                    for gaps in self._open:
                        gaps.ended(request_id)
                case _:
                    pass
        closed = [gaps for gaps in self._open if gaps.is_closed]
        for gaps in closed:
            self._open.remove(gaps)
        return bool(closed)

    def begin(self) -> FlipGaps:
        """A flip's outcome is in the log: from here on each decoding request's next token closes its gap."""
        gaps = FlipGaps(self._last_ns)
        if not gaps.is_closed:
            self._open.append(gaps)
        return gaps
