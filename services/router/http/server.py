"""Serves the HTTP application on a socket of its own making, and ends it without cutting an answer off.

The server's own signal handling stays out: the process has one way to end, and this is a part of it.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from services.core.errors import ConfigurationError
from services.router.http.protocol import BoundedConfig, BoundedHttp, ConnectionBounds

BACKLOG = 1024
OTHER_DESCRIPTORS = 512
"""What the process needs besides connections of clients: files, its peers, connections over gRPC."""
TICK_S = 1.0
KEEP_ALIVE_S = 75
"""An idle connection is kept above the usual 60 s of proxies, so that it is they who close it."""


def allow_descriptors(max_connections: int) -> None:
    """Lets the process have a descriptor for each connection, as far as the system's hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        ConfigurationError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"router.http_host and http_port: {host}:{port} cannot be bound ({error.strerror}); "
            "choose another port, or 0 for a free one"
        ) from error
    return bound


class HttpServer(uvicorn.Server):
    """Serves until `end` is called; then takes no connection any more and waits for the open answers."""

    def __init__(self, app: ASGIApp, bounds: ConnectionBounds) -> None:
        self._is_ending = asyncio.Event()
        super().__init__(
            BoundedConfig(
                bounds,
                app,
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def serve_on(self, bound: socket.socket) -> None:
        """Serves on the socket until `end`, and until the last open answer is sent."""
        await self.serve([bound])

    async def main_loop(self) -> None:
        """Ticks once a second, for the date that answers carry; the library's own ten times are a cost at rest."""
        while not self.should_exit:
            await self.on_tick(0)
            with anyio.move_on_after(TICK_S):
                await self._is_ending.wait()

    def end(self) -> None:
        """Stops accepting."""
        self.should_exit = True
        self._is_ending.set()
