"""The service by which every process tells who it is, what it is at, and its counts.

Passive: an answer is made from what the process already knows; it waits for nobody and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import grpc.aio
from flipmesh.common.v1 import introspection_pb2 as pb
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceServicer

from services.mesh.identity import Identity
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress

FillStatus = Callable[[pb.GetStatusResponse], None]
MEMORY_ROLLUP = Path("/proc/self/smaps_rollup")
MEMORY_AGE_S = 5.0
"""How old a reading of the process's memory may be: walking a large mapping costs milliseconds."""


class Introspection(IntrospectionServiceServicer):
    """Answers `GetStatus` and `GetMetrics`. `report` adds what only this service knows."""

    def __init__(self, identity: Identity, progress: Progress, metrics: Metrics) -> None:
        self._identity, self._progress, self._metrics = identity, progress, metrics
        self._began_ns = time.monotonic_ns()
        self._fill: FillStatus | None = None
        self._memory_bytes = 0
        self._memory_read_s = -MEMORY_AGE_S

    def report(self, fill: FillStatus) -> None:
        """Sets what writes the service's own part of a status: one of the response's `service` fields."""
        self._fill = fill

    async def GetStatus(  # noqa: N802 (the proto's name)
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.GetStatusResponse]
    ) -> pb.GetStatusResponse:
        """The process now."""
        mark = self._progress.mark
        status = pb.GetStatusResponse(
            identity=identity_message(self._identity),
            uptime_ns=time.monotonic_ns() - self._began_ns,
            phase=pb.Phase.ValueType(mark.phase.value),
            waiting_for=mark.detail,
            phase_age_ns=int(self._progress.age_s() * 1e9),
            memory_bytes=await self._memory() if request.with_memory else 0,
        )
        if mark.deadline_s is not None:
            status.phase_deadline_ns = int(mark.deadline_s * 1e9)
        if (beat_age_s := self._progress.beat_age_s()) is not None:
            status.progress_age_ns = int(beat_age_s * 1e9)
        if self._fill is not None:
            self._fill(status)
        return status

    async def GetMetrics(  # noqa: N802 (the proto's name)
        self,
        request: pb.GetMetricsRequest,
        context: grpc.aio.ServicerContext[pb.GetMetricsRequest, pb.GetMetricsResponse],
    ) -> pb.GetMetricsResponse:
        """The process's counts."""
        return self.metrics_now()

    def metrics_now(self) -> pb.GetMetricsResponse:
        """What `GetMetrics` answers, for a process that publishes its own counts as well."""
        return pb.GetMetricsResponse(identity=identity_message(self._identity), families=self._metrics.families())

    async def _memory(self) -> int:
        if time.monotonic() - self._memory_read_s >= MEMORY_AGE_S:
            self._memory_read_s = time.monotonic()
            self._memory_bytes = await anyio.to_thread.run_sync(read_memory_bytes)
        return self._memory_bytes


def identity_message(identity: Identity) -> pb.ProcessIdentity:
    """The identity as it travels."""
    return pb.ProcessIdentity(
        service=identity.service,
        rank=identity.rank,
        pid=identity.pid,
        incarnation=identity.incarnation,
        boot_id=identity.boot_id,
    )


def read_memory_bytes() -> int:
    """Proportional set size of this process, or 0 where the system would not say."""
    try:
        for line in MEMORY_ROLLUP.read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
