"""How a command reaches the processes of a running mesh: their sockets, one short call each, a clear word if absent."""

import argparse
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from services.core.ids import Rank
from services.mesh.rpc import CHANNEL_OPTIONS
from services.mesh.settings.paths import StatePaths, process_name
from services.mesh.settings.tables import Settings, load_settings

CALL_S = 2.0
"""A passive answer comes within milliseconds; a stopped process never answers."""


class NotRunningError(Exception):
    """The process a command needs is not there."""


class MeshClient:
    """Channels to the processes of one deployment, for the length of a command."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.paths = StatePaths(settings.state.dir)
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def processes(self) -> list[tuple[str, Rank | None]]:
        """Every process this deployment has, in the order a request meets them."""
        ranks = [("worker", Rank(rank)) for rank in range(self.settings.group.num_ranks)]
        return [("router", None), ("scheduler", None), ("policy", None), ("mover", None), *ranks, ("sentinel", None)]

    def channel(self, service: str, rank: Rank | None = None) -> grpc.aio.Channel:
        """A channel to a process.

        Raises:
            NotRunningError: it has no socket.
        """
        socket = self.paths.socket(service, rank)
        if not socket.exists():
            raise NotRunningError(
                f"{process_name(service, rank)} is not running: no socket at {socket}. Start the mesh with "
                "`make serve` or `honcho start`, or name its configuration with --config or FLIPMESH_CONFIG"
            )
        if str(socket) not in self._channels:
            self._channels[str(socket)] = grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)
        return self._channels[str(socket)]

    async def close(self) -> None:
        """Closes what was opened."""
        for channel in self._channels.values():
            with contextlib.suppress(grpc.aio.BaseError):
                await channel.close()


@asynccontextmanager
async def mesh_client(config: Path | None) -> AsyncIterator[MeshClient]:
    """The mesh of a configuration file (None: the one `FLIPMESH_CONFIG` names, or the default)."""
    client = MeshClient(load_settings(config))
    try:
        yield client
    finally:
        await client.close()


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every command on a running mesh takes."""
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help="the deployment's TOML (default: FLIPMESH_CONFIG)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
