"""The sentinel's service: looks at every local rank's ring once a second and says what is wrong.

Never on the data path: it reads files and /proc. A verdict stands while its cause does; each new one is logged once
with the statement of all peers.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.sentinel.v1 import sentinel_service_pb2 as pb
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import SentinelServiceServicer

from services.mesh.logs.log import Log
from services.mesh.telemetry.metrics import Metrics
from services.sentinel.corridor import Corridor
from services.sentinel.diagnose import Verdict, VerdictKind, diagnose
from services.sentinel.rings import RingReader

LOOK_EVERY_S = 1.0
"""A look costs well under a millisecond; detection within a second of the stall bound."""

_KINDS = {
    VerdictKind.DIVERGENCE: pb.VERDICT_KIND_DIVERGENCE,
    VerdictKind.STALL: pb.VERDICT_KIND_STALL,
    VerdictKind.FREEZE: pb.VERDICT_KIND_FREEZE,
    VerdictKind.LOST: pb.VERDICT_KIND_LOST,
    VerdictKind.STOPPED: pb.VERDICT_KIND_STOPPED,
    VerdictKind.CORRIDOR: pb.VERDICT_KIND_CORRIDOR,
}


class Sentinel(SentinelServiceServicer):
    """Watches the ranks of one host."""

    def __init__(
        self, rings: Sequence[Path], stall_s: float, log: Log, metrics: Metrics, corridor: Corridor | None = None
    ) -> None:
        """`rings[rank]` is where that rank's ring is, or will be; `corridor`: has a verdict beside theirs."""
        self._corridor = corridor
        self._readers = [RingReader(path, rank) for rank, path in enumerate(rings)]
        self._stall_ns = int(stall_s * 1e9)
        self._log = log
        self._standing: list[Verdict] = []
        self._num_watched = 0
        self._num_total = 0
        self._last = ""
        self._verdicts = metrics.counter("flipmesh_verdicts", "Findings of the sentinel.", ["kind"])

    async def watch(self) -> None:
        """Looks until cancelled."""
        while True:
            self.look(time.monotonic_ns())
            await anyio.sleep(LOOK_EVERY_S)

    def look(self, now_ns: int) -> list[Verdict]:
        """One look; returns what stands now."""
        views = [view for reader in self._readers if (view := reader.view()) is not None]
        self._num_watched = len(views)
        # Before every rank has its ring the group is starting, and its supervisor speaks for it.
        found = diagnose(views, now_ns, self._stall_ns) if len(views) == len(self._readers) else []
        if self._corridor is not None and (breach := self._corridor.tell()) is not None:
            found = [*found, breach]
        known = {(verdict.kind, verdict.rank, verdict.sequence) for verdict in self._standing}
        for verdict in found:
            if (verdict.kind, verdict.rank, verdict.sequence) not in known:
                self._announce(verdict)
        self._standing = found
        return found

    async def ListVerdicts(  # noqa: N802 (the proto's name)
        self,
        request: pb.ListVerdictsRequest,
        context: grpc.aio.ServicerContext[pb.ListVerdictsRequest, pb.ListVerdictsResponse],
    ) -> pb.ListVerdictsResponse:
        """What stands now; empty while all is well."""
        return pb.ListVerdictsResponse(verdicts=map(verdict_to_proto, self._standing))

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """The sentinel's part of a status."""
        status.sentinel.num_verdicts_total = self._num_total
        status.sentinel.last_verdict = self._last
        status.sentinel.num_ranks_watched = self._num_watched

    def _announce(self, verdict: Verdict) -> None:
        self._num_total += 1
        self._last = f"{verdict.kind.value}: {verdict.statement}"
        self._verdicts.labels(verdict.kind.value).inc()
        self._log.error("verdict", kind=verdict.kind.value, rank=verdict.rank, statement=verdict.statement)


def verdict_to_proto(verdict: Verdict) -> pb.Verdict:
    """A verdict as it travels."""
    return pb.Verdict(
        kind=_KINDS[verdict.kind],
        rank=verdict.rank,
        epoch=verdict.epoch,
        sequence=verdict.sequence,
        last_operation=verdict.last_operation,
        statement=verdict.statement,
        age_ns=verdict.age_ns,
    )
