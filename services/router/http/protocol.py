"""Reads HTTP/1.1 from one connection, within a bound: the library's protocol, which has none for a request's head.

Bodies are bounded where they are read; what is pipelined waits unread in the system.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 65_536
"""Request line and headers, beyond what comes with their first bytes: proxies allow less."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. A head that does not end is a 400 and the end of the connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_in_head = False
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parses what came; called by the loop."""
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins; called by the parser."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """A head has ended; called by the parser."""
        self._is_in_head = False
        super().on_headers_complete()
