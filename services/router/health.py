"""Whether the mesh behind this router lives and serves: what /health and /ready answer. Passive: never generates.

Life is progress, not output: a long prompt gives no token for a while and is well; a process that does not answer is
not, however recently it did something. Pure over what `ProcessWatch` heard.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
from flipmesh.common.v1 import introspection_pb2 as pb
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from flipmesh.sentinel.v1.sentinel_service_pb2 import ListVerdictsRequest
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import SentinelServiceStub

from services.core.errors import MeshError
from services.core.ids import Generation, Rank
from services.mesh.rpc import Peers, unary
from services.mesh.settings.paths import process_name
from services.router.admission import Admission
from services.router.streams.scheduler_client import SchedulerClient

ASK_INTERVAL_S = 1.0
"""Between two questions to one process, while there is work."""
ASK_AT_REST_S = 2.0
"""While there is none: two questions still fit into `SILENT_S`, and nothing competes with their answers."""
ASK_TIMEOUT_S = 1.5
"""A process answers from what it knows, in a millisecond; busy cores may stretch that."""
SILENT_S = 4.0
"""A process not heard for so long counts as dead or stopped: above one lost question, below 5 s with the next."""

Place = tuple[str, Rank | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Good, or the reasons why not."""

    status: str
    reasons: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """True if nothing speaks against it."""
        return not self.reasons

    def body(self) -> dict[str, object]:
        """For the endpoint."""
        return {"status": self.status if self.is_good else f"not {self.status}", "reasons": list(self.reasons)}


class ProcessWatch:
    """Asks the scheduler and every rank, once a second, how they are; keeps the last answer of each."""

    def __init__(self, peers: Peers, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers, self._clock = peers, clock
        self.places: Sequence[Place] = [("scheduler", None), *(("worker", Rank(rank)) for rank in range(num_ranks))]
        self._heard_s: dict[Place, float] = {}
        self._num_steps = 0
        self._stepped_s = clock()
        self._interval_s = ASK_INTERVAL_S
        self.scheduler: pb.GetStatusResponse | None = None
        """Its last answer."""
        self.findings: tuple[str, ...] = ()
        """What the sentinel says is wrong now; empty while it is silent: its own loss is no ailment of serving."""

    async def run(self) -> None:
        """Asks until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._ask_sentinel)
            for place in self.places:
                tasks.start_soon(self._ask_again_and_again, place)

    def silence_s(self, place: Place) -> float:
        """Seconds since the process was heard; infinite if it never was."""
        return self._clock() - self._heard_s.get(place, float("-inf"))

    def idle_s(self) -> float:
        """Seconds since the scheduler last had no work, or had finished one more step."""
        return self._clock() - self._stepped_s

    async def _ask_again_and_again(self, place: Place) -> None:
        stub = IntrospectionServiceStub(self._peers.channel(*place))
        while True:
            # Silence is what is counted; why it is silent stands in that process's log.
            with suppress(MeshError):
                self.hear(place, await unary(stub.GetStatus, pb.GetStatusRequest(), timeout_s=ASK_TIMEOUT_S))
            await anyio.sleep(self._interval_s)

    async def _ask_sentinel(self) -> None:
        stub = SentinelServiceStub(self._peers.channel("sentinel"))
        while True:
            try:
                answer = await unary(stub.ListVerdicts, ListVerdictsRequest(), timeout_s=ASK_TIMEOUT_S)
                self.findings = tuple(verdict.statement for verdict in answer.verdicts)
            except MeshError:
                self.findings = ()
            await anyio.sleep(self._interval_s)

    def hear(self, place: Place, status: pb.GetStatusResponse) -> None:
        """Takes an answer."""
        self._heard_s[place] = self._clock()
        if place[0] != "scheduler":
            return
        self.scheduler = status
        scheduler = status.scheduler
        has_work = scheduler.num_resident_requests + scheduler.num_queued_requests > 0
        self._interval_s = ASK_INTERVAL_S if has_work else ASK_AT_REST_S
        if not has_work or scheduler.num_steps_total != self._num_steps:
            self._num_steps, self._stepped_s = scheduler.num_steps_total, self._clock()


class Health:
    """Puts together what is known. `step_s`: how long one step may take."""

    def __init__(self, client: SchedulerClient, watch: ProcessWatch, admission: Admission, *, step_s: float) -> None:
        self._client, self._watch, self._admission = client, watch, admission
        self._step_s = step_s
        self.served_generation: Generation | None = None
        """The generation in which a real generation went through the whole path."""

    def verdict(self) -> Verdict:
        """What /health says."""
        return Verdict("healthy", tuple(self._ailments()))

    def readiness(self) -> Verdict:
        """What /ready says."""
        return Verdict("ready", tuple(self._hindrances()))

    def _ailments(self) -> Iterator[str]:
        for place in self._watch.places:
            if (silence_s := self._watch.silence_s(place)) > SILENT_S:
                since = f"for {silence_s:.1f} s" if silence_s < float("inf") else "yet"
                yield f"{process_name(*place)} was not heard {since}"
        yield from self._watch.findings
        if self._client.group is None:
            yield f"waiting for {self._client.waiting_for}"
        elif (idle_s := self._watch.idle_s()) > self._step_s:
            yield f"there is work and no step has ended for {idle_s:.1f} s, allowed {self._step_s:g} s"

    def _hindrances(self) -> Iterator[str]:
        yield from self._ailments()
        if self._admission.closed_because is not None:
            yield self._admission.closed_because
        group = self._client.group
        if group is not None and group.generation != self.served_generation:
            yield f"generation {group.generation} has not generated yet"
