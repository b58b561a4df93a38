"""A scheduler's loop and toy ranks in one process, over real gRPC: the log, its faults and the routers' streams.

The ranks execute with the toy model of the unit tests, so answers are checked to the token without torch. A rank can be
told to hold its answers, to disagree, or to end.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from flipmesh.worker.v1 import worker_service_pb2 as worker_pb
from flipmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

from services.core.ids import LayoutKind, Rank, RequestId, TokenId
from services.core.request import Emitted, RequestEvent, SamplingParams, Submission
from services.core.step import ResetEntry, StepPlan, StepReport
from services.mesh.codec.scheduler import event_from_proto, submission_to_proto
from services.mesh.codec.worker import entry_from_proto, report_to_proto
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import identify
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import DeadlineSettings
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from services.scheduler.batch.limits import BatchLimits
from services.scheduler.generation import GenerationRun, Surroundings
from services.scheduler.generation_counter import GenerationCounter
from services.scheduler.group import Group
from services.scheduler.memory_watch import MemoryWatch
from services.scheduler.meters import Meters
from services.scheduler.server import SchedulerServer
from services.scheduler.sizing import GroupSize
from services.scheduler.streams.joining import WorkerFinder
from services.scheduler.streams.rank_stream import RankStream
from services.scheduler.streams.sessions import Sessions
from tests.support.toy_rank import ToyRank, layout_of, limits_of

NUM_RANKS = 2
WAIT_S = 10.0


class ToyWorker(WorkerServiceServicer):
    """One life of one rank: serves one log."""

    def __init__(self, rank: int) -> None:
        self.rank, self.toy = rank, ToyRank()
        self.plans: list[StepPlan] = []
        self.entries: list[bytes] = []
        self.generation = 0
        self.digest_offset = 0
        self.num_blocks: int | None = None
        self.model_digest = "toy"
        self.claimed_rank = rank
        self.is_ready = True
        self.was_asked = anyio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_plan = asyncio.Event()
        self.end = asyncio.Event()
        self.fault: str | None = None

    async def ExecuteSteps(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._execute, request_iterator, context, tasks.cancel_scope)
            await self.end.wait()
            if self.fault is not None:
                fault = worker_pb.WorkerFault(kind=worker_pb.FAULT_KIND_INTERNAL, rank=self.rank, message=self.fault)
                await context.write(worker_pb.ExecuteStepsResponse(fault=fault))
            tasks.cancel_scope.cancel()

    async def _execute(self, requests: AsyncIterator[Any], context: Any, scope: anyio.CancelScope) -> None:
        async for message in requests:
            self.entries.append(message.SerializeToString())
            entry = entry_from_proto(message)
            self.generation = entry.generation
            match entry.entry:
                case ResetEntry() as reset if self.is_ready:
                    await context.write(worker_pb.ExecuteStepsResponse(ready=self._ready(message, reset)))
                case StepPlan() as plan:
                    await self._step(message, entry.sequence, plan, context)
        scope.cancel()

    async def _step(self, message: Any, sequence: Any, plan: StepPlan, context: Any) -> None:
        sampled = self.toy.execute(sequence, plan)
        self.plans.append(plan)
        self.has_plan.set()
        await self.may_answer.wait()
        tokens = sampled if self.rank == NUM_RANKS - 1 and plan.sampled_row else None
        report = report_to_proto(StepReport(sequence, sequence + self.digest_offset, 1000, 10, tokens))
        reports = worker_pb.StepReports(fence=message.fence, reports=[report])
        await context.write(worker_pb.ExecuteStepsResponse(reports=reports))

    def _ready(self, message: Any, reset: ResetEntry) -> worker_pb.WorkerReady:
        num_blocks = reset.num_blocks if self.num_blocks is None else self.num_blocks
        return worker_pb.WorkerReady(
            fence=message.fence, rank=self.claimed_rank, num_blocks=num_blocks, model_digest=self.model_digest
        )


class Router:
    """One router's stream, read as it comes."""

    def __init__(self, channel: grpc.aio.Channel, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self.call = SchedulerServiceStub(channel).ServeRequests(wait_for_ready=True)
        self.events: dict[str, list[RequestEvent]] = {}

    async def next(self) -> pb.ServeRequestsResponse:
        with anyio.fail_after(self._wait_s):
            message = await self.call.read()
        assert isinstance(message, pb.ServeRequestsResponse), f"the stream has ended: {await self.call.details()}"
        for event in message.events.events:
            self.events.setdefault(event.request_id, []).append(event_from_proto(event))
        return message

    async def until(self, kind: str) -> pb.ServeRequestsResponse:
        while (message := await self.next()).WhichOneof("message") != kind:
            pass
        return message

    async def submit(self, name: str, prompt: list[int], max_output: int = 8) -> None:
        """Submits, or submits again with what was emitted so far."""
        submission = Submission(
            RequestId(name),
            tuple(map(TokenId, [*prompt, *self.output(name)])),
            len(prompt),
            max_output,
            SamplingParams(),
        )
        await self.call.write(pb.ServeRequestsRequest(submit=submission_to_proto(submission)))

    async def ended(self, *names: str) -> None:
        while not all(type(self.events.get(name, [None])[-1]).__name__ in ("Finished", "Rejected") for name in names):
            await self.next()

    def output(self, name: str) -> list[int]:
        emitted = [event for event in self.events.get(name, []) if isinstance(event, Emitted)]
        return [token for event in emitted for token in event.token_ids]


class ToyGroup:
    """The scheduler and its workers. Workers are replaced as their supervisor would replace them."""

    def __init__(
        self,
        root: Path,
        log: Log,
        kind: LayoutKind,
        limits: BatchLimits,
        deadlines: DeadlineSettings,
        memory: MemoryWatch | None = None,
        ranks_meet: bool = False,
    ) -> None:
        self.paths = StatePaths(root)
        self.log, self.peers = log, Peers(self.paths, log)
        self.workers: list[ToyWorker] = []
        self._stacks: list[contextlib.AsyncExitStack] = []
        identity = identify("scheduler", None)
        self.progress, self.metrics = Progress(identity.name), Metrics()
        self.introspection = Introspection(identity, self.progress, self.metrics)
        self.server = GrpcServer(self.paths.socket("scheduler"), self.introspection, log)
        layouts = {kind: layout_of(kind, NUM_RANKS) for kind in LayoutKind}
        self.loop = Group(
            size=GroupSize(limits, layouts, 1024, "test"),
            layout=kind,
            finder=WorkerFinder(self.peers, NUM_RANKS, deadlines.rpc_s),
            counter=GenerationCounter(self.paths.root / "generation"),
            deadlines=deadlines,
            around=Surroundings(
                peers=self.peers,
                sessions=Sessions(),
                meters=Meters(self.metrics),
                progress=self.progress,
                log=log,
                rpc_s=deadlines.rpc_s,
                memory=memory,
            ),
            set_serving=self.server.set_serving,
            ranks_meet_in_flips=ranks_meet,
        )
        self.introspection.report(self.loop.fill_status)

    async def start_workers(self, *workers: ToyWorker) -> None:
        """Fresh processes for every rank, the old ones being gone."""
        for stack in self._stacks:
            await stack.aclose()
        self._stacks, self.workers = [], list(workers) or [ToyWorker(rank) for rank in range(NUM_RANKS)]
        for worker in self.workers:
            stack = contextlib.AsyncExitStack()
            await stack.enter_async_context(self._worker_server(worker).running())
            self._stacks.append(stack)

    async def stop_workers(self) -> None:
        for stack in self._stacks:
            await stack.aclose()
        self._stacks = []

    def router(self) -> Router:
        return Router(self.peers.channel("scheduler"))

    async def joined(self) -> Router:
        """A router that has heard of the group."""
        router = self.router()
        await router.until("opened")
        return router

    def generation_run(self) -> GenerationRun:
        """A generation on the workers as they are, without the loop around it."""
        streams = [RankStream(Rank(rank), self.peers.channel("worker", Rank(rank))) for rank in range(NUM_RANKS)]
        return self.loop._generation(streams)

    @property
    def run(self) -> GenerationRun:
        """The generation that serves."""
        assert self.loop.generation is not None
        return self.loop.generation

    async def close(self) -> None:
        """Ends workers and channels."""
        for worker in self.workers:
            worker.may_answer.set()
            worker.end.set()
        await self.peers.close()
        await self.stop_workers()

    async def status(self) -> introspection_pb2.SchedulerStatus:
        response = introspection_pb2.GetStatusResponse()
        self.loop.fill_status(response)
        return response.scheduler

    def _worker_server(self, worker: ToyWorker) -> GrpcServer:
        identity = identify("worker", Rank(worker.rank))
        introspection = Introspection(identity, Progress(identity.name), Metrics())

        def fill(status: introspection_pb2.GetStatusResponse) -> None:
            status.worker.generation = worker.generation
            worker.was_asked.set()

        introspection.report(fill)
        server = GrpcServer(self.paths.socket("worker", worker.rank), introspection, self.log)
        descriptor = worker_pb.DESCRIPTOR.services_by_name["WorkerService"]
        server.add(add_WorkerServiceServicer_to_server, worker, descriptor)
        return server


@contextlib.asynccontextmanager
async def running_group(
    root: Path,
    log: Log,
    kind: LayoutKind = LayoutKind.TP,
    limits: BatchLimits | None = None,
    deadlines: DeadlineSettings | None = None,
    workers: list[ToyWorker] | None = None,
    memory: MemoryWatch | None = None,
    ranks_meet: bool = False,
) -> AsyncIterator[ToyGroup]:
    """A group with its workers; all of it is gone afterwards."""
    group = ToyGroup(root, log, kind, limits or limits_of(), deadlines or DeadlineSettings(), memory, ranks_meet)
    descriptor = pb.DESCRIPTOR.services_by_name["SchedulerService"]
    group.server.add(add_SchedulerServiceServicer_to_server, SchedulerServer(group.loop), descriptor)
    async with group.server.running(is_serving=False), anyio.create_task_group() as tasks:
        tasks.start_soon(group.loop.serve)
        await group.start_workers(*(workers or []))
        try:
            yield group
        finally:
            with anyio.CancelScope(shield=True):
                tasks.cancel_scope.cancel()
                await group.close()
