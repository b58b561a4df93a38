"""How much the router takes on at once. Pure counting; the one place that says "too much" or "not any more".

Bounds: bytes of bodies being received, requests open at once, and characters of prompts waiting for the tokeniser.
Output needs no bound of its own: what a slow client has not taken is coalesced into one delta of each choice, at most
the tokens that it may have.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.router.openai.refusal import Kind, RefusalError

RETRY_AFTER_S = 1
"""What a refused client is told to wait, in seconds: a request takes about as long."""


@dataclass(slots=True)
class Admission:
    """Counts what is open. Whoever enters leaves, by the context managers."""

    max_open_requests: int
    max_tokenising_chars: int
    max_receiving_bytes: int
    num_open_requests: int = 0
    num_streams: int = 0
    num_requests_total: int = 0
    """Of those that were taken."""
    tokenising_chars: int = 0
    receiving_bytes: int = 0
    closed_because: str | None = None
    """Set once the router drains: nothing new is taken."""
    on_empty: Callable[[], object] | None = None
    """Called whenever the last open request ends."""

    def check_room(self) -> None:
        """Refuses now what `request` would refuse: before a body is received that nobody will answer.

        Raises:
            RefusalError: as many requests are open as may be, or the router is ending.
        """
        if self.closed_because is not None:
            raise RefusalError(Kind.UNAVAILABLE, self.closed_because, code="draining", retry_after_s=RETRY_AFTER_S)
        if self.num_open_requests >= self.max_open_requests:
            raise _overloaded(f"{self.num_open_requests} requests are open, the most that may be")

    @contextmanager
    def receiving(self, num_bytes: int) -> Iterator[None]:
        """A body of a declared length, from before its first byte is read until it is parsed; one alone always passes.

        Raises:
            RefusalError: bodies of too many bytes are being received already.
        """
        if self.receiving_bytes and self.receiving_bytes + num_bytes > self.max_receiving_bytes:
            raise _overloaded(f"bodies of {self.receiving_bytes} bytes are being received")
        self.receiving_bytes += num_bytes
        try:
            yield
        finally:
            self.receiving_bytes -= num_bytes

    @contextmanager
    def request(self, *, stream: bool) -> Iterator[None]:
        """A request, from its validation to its last byte.

        Raises:
            RefusalError: as many are open as may be, or the router is ending.
        """
        self.check_room()
        self.num_open_requests += 1
        self.num_requests_total += 1
        self.num_streams += stream
        try:
            yield
        finally:
            self.num_open_requests -= 1
            self.num_streams -= stream
            if self.num_open_requests == 0 and self.on_empty is not None:
                self.on_empty()

    @contextmanager
    def tokenising(self, num_chars: int) -> Iterator[None]:
        """A prompt on its way through the tokeniser; one alone may be of any size that its request may have.

        Raises:
            RefusalError: too much waits already.
        """
        if self.tokenising_chars and self.tokenising_chars + num_chars > self.max_tokenising_chars:
            raise _overloaded(f"{self.tokenising_chars} characters of prompts wait for the tokeniser")
        self.tokenising_chars += num_chars
        try:
            yield
        finally:
            self.tokenising_chars -= num_chars

    def close(self, why: str) -> None:
        """Takes nothing new from now on."""
        self.closed_because = why


def _overloaded(why: str) -> RefusalError:
    return RefusalError(
        Kind.OVERLOADED, f"{why}: try again later", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S
    )
