"""What a service's `main` is given: everything the mesh provides to one process, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio
from opentelemetry.trace import Tracer

from services.mesh.debug.breakpoints import Holds
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import Identity
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import Settings
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress


@dataclass(frozen=True, slots=True)
class Shell:
    """One process of the mesh, alive from the entry of `main` to its return.

    `main` adds its services to `server`, enters `server.running()`, says in `progress` what it is at, works, and
    returns soon after `stop` is set: on a signal it is given `limits.SHUTDOWN_GRACE_S`, then it is cancelled. `fds` are
    the descriptors inherited from the supervisor, by name. `holds` is None unless the settings enable it.
    """

    identity: Identity
    settings: Settings
    paths: StatePaths
    fds: Mapping[str, int]
    log: Log
    tracer: Tracer
    metrics: Metrics
    progress: Progress
    introspection: Introspection
    server: GrpcServer
    peers: Peers
    stop: anyio.Event
    holds: Holds | None = None
