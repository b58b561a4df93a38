"""One rank as a process: boots off the loop, serves one log, and leaves so that it is started afresh.

One `ExecuteSteps` stream in the life of a process; when it ends, however it ends, the generation has ended for this
rank. Never executes a step: the model thread does (execution.py). Never outlives its log: on a stop it waits for the
scheduler to end the stream, within the shell's grace.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread
import grpc
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb
from flipmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

from kernels.cpu.collective_status import AbortReason
from services.core.errors import ConfigurationError
from services.core.ids import Rank
from services.core.log import LogState
from services.core.step import StepReport
from services.mesh.codec.common import layout_to_proto
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase
from services.worker.boot import RankRuntime, build_runtime
from services.worker.breakpoints import held_commands
from services.worker.memory.ledger_report import memory_line
from services.worker.memory.trimmed_pages import Released
from services.worker.ring import RingWriter
from services.worker.stream import StepStream

ExecuteContext = grpc.aio.ServicerContext[pb.ExecuteStepsRequest, pb.ExecuteStepsResponse]
JoinContext = grpc.aio.ServicerContext[pb.JoinFlipRequest, pb.JoinFlipResponse]
NS_PER_S = 1e9


class WorkerServer(WorkerServiceServicer):
    """Serves the log of one generation and tells how it stands."""

    def __init__(self, shell: Shell, rig: RankRuntime) -> None:
        self._shell, self._rig = shell, rig
        rig.runner.on_release = self._log_release
        self.stream: StepStream | None = None
        self._begun = anyio.Event()
        self.ended = anyio.Event()
        metrics = shell.metrics
        self._steps = metrics.counter("flipmesh_worker_steps", "Steps executed")
        self._compute_s = metrics.counter("flipmesh_worker_compute_seconds", "Time in kernels")
        self._wait_s = metrics.counter("flipmesh_worker_wait_seconds", "Time waiting for peers")
        self._sampled = metrics.counter("flipmesh_worker_sampled_tokens", "Ids sampled by this rank")
        self._non_finite = metrics.counter("flipmesh_worker_non_finite_rows", "Rows whose logits were not finite")

    async def ExecuteSteps(  # noqa: N802 (the proto's name)
        self, request_iterator: AsyncIterator[pb.ExecuteStepsRequest], context: ExecuteContext
    ) -> AsyncIterator[pb.ExecuteStepsResponse]:
        """Executes one log to its end."""
        if self.stream is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this worker has had its log, one in the life of a process: wait for its restart",
            )
        incarnation = hashlib.blake2b(self._shell.identity.incarnation.encode(), digest_size=8).digest()
        self.stream = StepStream(self._rig, int.from_bytes(incarnation, "little"), self._count, self._shell.holds)
        # However the call ends: a stream that breaks while a response is being sent is not seen by a generator.
        context.add_done_callback(lambda _: self._end())  # type: ignore[arg-type]  # the stub has a class for a protocol
        self._begun.set()
        self._shell.progress.enter(Phase.READY, "executing the step log")
        async for response in self.stream.responses(request_iterator):
            yield response

    def _end(self) -> None:
        assert self.stream is not None
        self.stream.abort(AbortReason.SHUTDOWN if self._shell.stop.is_set() else AbortReason.PEER_LOST)
        self.ended.set()

    async def JoinFlip(  # noqa: N802 (the proto's name)
        self, request_iterator: AsyncIterator[pb.JoinFlipRequest], context: JoinContext
    ) -> AsyncIterator[pb.JoinFlipResponse]:
        """Takes part in the flips of this process's log; waits for the log to begin."""
        await self._begun.wait()
        assert self.stream is not None
        holds = self._shell.holds
        commands = request_iterator if holds is None else held_commands(request_iterator, holds)
        async for response in self.stream.participation.responses(commands):
            yield response

    def _count(self, report: StepReport) -> None:
        self._steps.inc()
        self._compute_s.inc(report.compute_ns / NS_PER_S)
        self._wait_s.inc(report.wait_ns / NS_PER_S)
        if report.tokens is not None:
            self._sampled.inc(len(report.tokens.token_ids))
            self._non_finite.inc(len(report.tokens.non_finite))
        self._shell.progress.beat()

    def _log_release(self, released: Released) -> None:
        """On the model thread."""
        if not released.is_refused:
            self._shell.log.info("blocks-released", dead_from=released.dead_from, bytes=released.num_bytes)
            return
        self._shell.log.warning(
            "release-refused",
            dead_from=released.dead_from,
            own_end=released.own_end,
            reason="this rank has tables with blocks that are said to be dead: the pages stay",
        )

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """Writes what only a worker has."""
        runner, worker = self._rig.runner, status.worker
        follower = runner.follower
        worker.rank = worker.stage = worker.tp_rank = self._rig.rank
        if follower.layout is not None:
            worker.layout = layout_to_proto(follower.layout)
        worker.generation, worker.epoch = follower.generation or 0, follower.epoch or 0
        if follower.state is not LogState.AWAITING_RESET and follower.sequence is not None:
            worker.last_sequence = follower.sequence
        worker.weights_bytes = self._rig.memory.weights_bytes
        worker.pool_bytes = runner.pool.num_bytes if runner.pool is not None else 0
        worker.mode = self._shell.settings.group.mode
        worker.compute_ns_total, worker.wait_ns_total = runner.compute_ns, runner.waited_ns


async def serve(shell: Shell) -> None:
    """The life of a rank, from its settings to the end of its log."""
    if shell.identity.rank is None:
        raise ConfigurationError("a worker needs --rank: start it by the Procfile's worker line")
    rig = await _boot(shell, shell.identity.rank)
    if rig is None:
        return
    server = WorkerServer(shell, rig)
    shell.introspection.report(server.fill_status)
    descriptor = pb.DESCRIPTOR.services_by_name["WorkerService"]
    shell.server.add(add_WorkerServiceServicer_to_server, server, descriptor)
    async with shell.server.running():
        shell.progress.enter(Phase.WAITING, "the scheduler's step log")
        await _first(server.ended.wait, partial(_stopped_without_log, shell, server))
        if server.stream is not None:
            await server.ended.wait()
    if server.stream is None:
        return
    if not await anyio.to_thread.run_sync(server.stream.finish, abandon_on_cancel=True):
        shell.log.warning("model-thread-left", reason=server.stream.reason())
    if not shell.stop.is_set():
        raise server.stream.reason()


async def _boot(shell: Shell, rank: Rank) -> RankRuntime | None:
    """The rig, built in a thread; None if the process was stopped meanwhile."""
    rigs: list[RankRuntime] = []
    ring = RingWriter(shell.paths.ring(rank), rank)

    async def build() -> None:
        rigs.append(
            await anyio.to_thread.run_sync(build_runtime, shell.settings, rank, shell.fds, ring, abandon_on_cancel=True)
        )

    with shell.progress.working("mapping and expanding the weights", shell.settings.deadlines.boot_s):
        await _first(build, shell.stop.wait)
    if not rigs:
        return None
    rig = rigs[0]
    shell.log.info(
        "loaded",
        model=rig.files.name,
        choice=rig.files.choice,
        digest=rig.files.digest,
        boot_ms=rig.boot_ns // 1_000_000,
        expanded=rig.num_expanded,
        weights_bytes=rig.memory.weights_bytes,
        **{kind.value: rig.layouts[kind].shares[rank] for kind in rig.layouts},
    )
    shell.log.info("memory", **memory_line(rig.ledger, rank, rig.device))
    return rig


async def _stopped_without_log(shell: Shell, server: WorkerServer) -> None:
    """Returns when the process shall end and no scheduler would notice."""
    await shell.stop.wait()
    if server.stream is not None:
        await server.ended.wait()


async def _first(*waits: Callable[[], Awaitable[object]]) -> None:
    """Returns with the first of them, and cancels the others."""

    async def run(wait: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
        await wait()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        for wait in waits:
            tasks.start_soon(run, wait, tasks.cancel_scope)
