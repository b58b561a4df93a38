"""A process's gRPC server: its own unix socket, open to its owner only, and a public address where asked.

Always serves health, reflection and introspection besides the service's own. Binds, publishes and takes away; who binds
chooses the port, so nothing is probed and taken later by somebody else. The public address is a server of its own: it
looks at a caller's key before it looks at anything that the caller sends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
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
from services.mesh.bearer import KeyCheck
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


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """Where strangers may call: `host:port`, 0 for a free port, written to `publish`.

    `api_key` is what their calls must carry, health alone excepted; None: nobody is asked. No message of theirs is
    larger than `max_message_bytes`.
    """

    address: str
    publish: Path
    api_key: str | None
    max_message_bytes: int


class GrpcServer:
    """Collects services, then serves them for the length of `running()`."""

    def __init__(self, socket: Path, introspection: Introspection, log: Log) -> None:
        self._socket, self._log = socket, log
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        self._additions: list[Callable[[grpc.aio.Server], None]] = []
        self._additions.append(partial(health_pb2_grpc.add_HealthServicer_to_server, self._health))
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
        self._additions.append(partial(add_to_server, servicer))
        self._names.append(descriptor.full_name)

    @asynccontextmanager
    async def running(self, *, public: PublicAddress | None = None, is_serving: bool = True) -> AsyncIterator[None]:
        """Serves on the socket, and on a public address where there is one.

        Health turns SERVING with the entry, unless the service says itself when it is (`is_serving` False, then
        `set_serving`), and NOT_SERVING with the exit, which ends what is still open.
        """
        servers = [self._private()]
        if public is not None:
            servers.append(self._public(public))
        for server in servers:
            await server.start()
        await self.set_serving(is_serving)
        self._log.info("serving", socket=self._socket)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._health.enter_graceful_shutdown()
                async with anyio.create_task_group() as tasks:
                    for server in servers:
                        tasks.start_soon(server.stop, STOP_GRACE_S)
            self._socket.unlink(missing_ok=True)
            if public is not None:
                public.publish.unlink(missing_ok=True)

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for this process and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    def _with_services(self, server: grpc.aio.Server) -> grpc.aio.Server:
        for add in self._additions:
            add(server)
        reflection.enable_server_reflection(self._names, server)
        return server

    def _private(self) -> grpc.aio.Server:
        server = self._with_services(
            grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        )
        # The process's lock says that nobody living has this socket; the umask keeps others out from the start.
        self._socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self._socket}")
        self._socket.chmod(0o600)
        return server

    def _public(self, public: PublicAddress) -> grpc.aio.Server:
        received = ("grpc.max_receive_message_length", public.max_message_bytes)
        options = [received if option[0] == received[0] else option for option in SERVER_OPTIONS]
        checks = () if public.api_key is None else (KeyCheck(public.api_key),)
        server = self._with_services(
            grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS, interceptors=checks)
        )
        host = public.address.rpartition(":")[0]
        try:
            port = server.add_insecure_port(public.address)
        except RuntimeError as error:
            raise ConfigurationError(f"{public.address} cannot be bound: {error}; choose another port, or 0") from error
        write_atomically(public.publish, f"{host}:{port}\n")
        self._log.info("serving-tcp", address=f"{host}:{port}")
        return server
