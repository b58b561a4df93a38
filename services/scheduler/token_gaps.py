"""The longest time between two tokens of a request that lived across a flip. Pure: times come in with the events."""

from collections.abc import Iterable

from services.core.ids import RequestId
from services.core.request import Emitted, Finished, RequestEvent


class TokenGaps:
    """Remembers when each open request last got a token, and measures around one flip at a time."""

    def __init__(self) -> None:
        self._last_ns: dict[RequestId, int] = {}
        self._waiting: set[RequestId] = set()
        self._longest_ns: int | None = None

    def note(self, events: Iterable[RequestEvent], now_ns: int) -> None:
        """Takes what is delivered to routers, in order."""
        for event in events:
            match event:
                case Emitted(request_id=request_id):
                    self._close(request_id, now_ns)
                    self._last_ns[request_id] = now_ns
                case Finished(request_id=request_id):
                    self._last_ns.pop(request_id, None)
                    self._waiting.discard(request_id)
                case _:
                    pass

    def begin(self) -> int:
        """The flip's outcome is in the log: from here on each decoding request's next token closes its gap.

        Returns how many requests are decoding.
        """
        self._waiting = set(self._last_ns)
        self._longest_ns = None
        return len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """Whether every request that was decoding has gone on or ended."""
        return not self._waiting

    @property
    def longest_ns(self) -> int | None:
        """The longest gap closed since `begin`, or None while there is none."""
        return self._longest_ns

    def _close(self, request_id: RequestId, now_ns: int) -> None:
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            gap_ns = now_ns - self._last_ns[request_id]
            self._longest_ns = max(gap_ns, self._longest_ns or 0)
