"""Reads HTTP/1.1 from one connection, within bounds: the library's protocol, which has none for an unfinished request.

Bounds are the number of connections, the bytes of a head, and the time that a head, and then a body, may take to come.
A body's bytes are bounded where it is read; what comes of one that is answered already is dropped here. What is
pipelined waits unread in the system, and no clock runs against a client that is not being read.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 65_536
"""Request line and headers, beyond what comes with their first bytes: proxies allow less."""
MAX_DROPPED_BYTES = 134_217_728
"""How much is taken of a body that was refused, so that its sender sees the answer and not a broken pipe."""
_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How many connections there may be, and how long each may take for a head and for a body."""

    max_connections: int
    head_s: float
    body_s: float


class BoundedConfig(Config):
    """The library's configuration, which is all that a connection is given, with the bounds."""

    def __init__(self, bounds: ConnectionBounds, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bounds = bounds


class BoundedHttp(HttpToolsProtocol):
    """One connection. A head that does not end is a 400 and the end of the connection, an idle one a 408."""

    def __init__(
        self,
        config: BoundedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = config.bounds
        self._is_in_head = self._is_in_body = False
        self._num_head_bytes = 0
        self._num_dropped_bytes = 0
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins, unless there are too many already; called by the loop."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._allow(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what came; called by the loop."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
        elif self._clock is None:
            # Bytes between two requests: a head begins with them, or nothing that is of use.
            self._allow(self._bounds.head_s)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins; called by the parser."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._allow(self._bounds.head_s)

    def on_headers_complete(self) -> None:
        """A head has ended; called by the parser."""
        self._is_in_head, self._is_in_body, self._num_dropped_bytes = False, True, 0
        self._allow(self._bounds.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body; called by the parser."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._num_dropped_bytes += len(body)
            if self._num_dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        """A request is all there; called by the parser."""
        self._is_in_body = False
        self._stop_clock()
        super().on_message_complete()

    def _allow(self, seconds: float) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, self._give_up, seconds)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _give_up(self, seconds: float) -> None:
        """Ends a connection whose request does not; not while this side is what is waited for."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (is_answering and not self._is_in_body):
            self._allow(seconds)
            return
        if not self._is_in_body or not self.cycle.response_started:
            self.transport.write(_LATE)
        self.transport.close()
