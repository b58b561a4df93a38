"""A process's gRPC server: its own unix socket, open to its owner only, and TCP where asked.

Always serves health, reflection and introspection besides the service's own. Binds, publishes and takes away; who binds
chooses the port, so nothing is probed and taken later by somebody else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.common.v1.introspection_pb2_grpc import add_IntrospectionServiceServicer_to_server
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.core.errors import ConfigurationError
from services.mesh import limits
from services.mesh.logs.log import Log
from services.mesh.settings.paths import write_atomically
from services.mesh.telemetry.introspection import Introspection

Servicer = TypeVar("Servicer")

MAX_CONCURRENT_CALLS = 4096
"""Open calls of one server; above it callers get RESOURCE_EXHAUSTED at once, not a growing queue."""

STOP_GRACE_S = 0.3
"""How long calls may still run once the service's own work is over; streams were ended by their owners before."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *limits.BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", limits.MIN_PING_INTERVAL_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.MIN_PING_INTERVAL_MS),
    ("grpc.so_reuseport", 0),
)


class GrpcServer:
    """Collects services, then serves them for the length of `running()`."""

    def __init__(self, socket: Path, introspection: Introspection, log: Log) -> None:
        self._socket, self._log = socket, log
        self._server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        descriptor = introspection_pb2.DESCRIPTOR.services_by_name["IntrospectionService"]
        self.add(add_IntrospectionServiceServicer_to_server, introspection, descriptor)

    def add(
        self,
        add_to_server: Callable[[Servicer, grpc.aio.Server], None],
        servicer: Servicer,
        descriptor: ServiceDescriptor,
    ) -> None:
        """Adds a service before `running()`.

        `descriptor` is `x_service_pb2.DESCRIPTOR.services_by_name["XService"]`; health and reflection name it.
        """
        add_to_server(servicer, self._server)
        self._names.append(descriptor.full_name)

    @asynccontextmanager
    async def running(
        self, *, tcp_address: str | None = None, publish: Path | None = None, is_serving: bool = True
    ) -> AsyncIterator[None]:
        """Serves on the socket, and on `tcp_address` (`host:port`, 0 for a free one) written to `publish`.

        Health turns SERVING with the entry, unless the service says itself when it is (`is_serving` False, then
        `set_serving`), and NOT_SERVING with the exit, which ends what is still open.
        """
        reflection.enable_server_reflection(self._names, self._server)
        self._bind_socket()
        if tcp_address is not None:
            self._bind_tcp(tcp_address, publish)
        await self._server.start()
        await self.set_serving(is_serving)
        self._log.info("serving", socket=self._socket)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._health.enter_graceful_shutdown()
                await self._server.stop(STOP_GRACE_S)
            self._withdraw(publish)

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for this process and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    def _bind_socket(self) -> None:
        # The process's lock says that nobody living has this socket; the umask keeps others out from the start.
        self._socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._socket.chmod(0o600)

    def _withdraw(self, publish: Path | None) -> None:
        self._socket.unlink(missing_ok=True)
        if publish is not None:
            publish.unlink(missing_ok=True)

    def _bind_tcp(self, address: str, publish: Path | None) -> None:
        host = address.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigurationError(f"{address} cannot be bound: {error}; choose another port, or 0") from error
        if publish is not None:
            write_atomically(publish, f"{host}:{port}\n")
        self._log.info("serving-tcp", address=f"{host}:{port}")
