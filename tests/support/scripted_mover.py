"""A mover by script, beside the real scheduler's loop and toy ranks; and what a test asks of all of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from flipmesh.mover.v1 import mover_service_pb2 as mover_pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceServicer, add_MoverServiceServicer_to_server
from flipmesh.worker.v1 import worker_service_pb2

from services.core.ids import LayoutKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, StepPlan
from services.mesh.codec.worker import entry_from_proto
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import identify
from services.mesh.logs.log import Log
from services.mesh.settings.tables import DeadlineSettings
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from tests.mesh.support.toy_group import WAIT_S, Router, ToyGroup, running_group

PP, TP = LayoutKind.PP, LayoutKind.TP
PROMPT = list(range(40))
COMMITTED, ABANDONED = mover_pb.FLIP_STATE_COMMITTED, mover_pb.FLIP_STATE_ABANDONED
BROKEN, ARMED = mover_pb.FLIP_STATE_BROKEN, mover_pb.FLIP_STATE_ARMED
BREAKS = "breaks"
"""The stream ends with an error."""
STANDS = "stands"
"""It says that it is there, and nothing more."""
SOON = DeadlineSettings(mover_silence_s=0.2)


class ScriptedMover(MoverServiceServicer):
    """Answers each question with the next word of its script, once it may."""

    def __init__(self, *script: "mover_pb.FlipState.ValueType | str") -> None:
        self.script = list(script)
        self.asked: list[mover_pb.RunFlipRequest] = []
        self.reports: asyncio.Queue[mover_pb.ReportCarryRequest] = asyncio.Queue()
        self.was_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def RunFlip(  # noqa: N802
        self, request: mover_pb.RunFlipRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[mover_pb.RunFlipResponse]:
        self.asked.append(request)
        self.was_asked.set()
        yield mover_pb.RunFlipResponse(flip_id=request.flip_id, state=ARMED)
        await self.may_answer.wait()
        word = self.script.pop(0)
        if word == STANDS:
            await asyncio.Event().wait()
        if isinstance(word, str):
            await context.abort(grpc.StatusCode.INTERNAL, "out of luck")
            return
        reason = "" if word == COMMITTED else "rank 1 refuses: a test"
        yield mover_pb.RunFlipResponse(flip_id=request.flip_id, state=word, reason=reason)

    async def ReportCarry(  # noqa: N802
        self, request: mover_pb.ReportCarryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> mover_pb.ReportCarryResponse:
        self.reports.put_nowait(request)
        return mover_pb.ReportCarryResponse()

    async def report(self) -> mover_pb.ReportCarryRequest:
        with anyio.fail_after(WAIT_S):
            return await self.reports.get()


@contextlib.asynccontextmanager
async def serving(
    group: ToyGroup, name: str, register: Callable[..., None], servicer: Any, file: Any
) -> AsyncIterator[None]:
    """One more process of the group, for as long as the context lasts."""
    identity = identify(name, None)
    introspection = Introspection(identity, Progress(identity.name), Metrics())
    server = GrpcServer(group.paths.socket(name), introspection, group.log)
    server.add(register, servicer, next(iter(file.services_by_name.values())))
    async with server.running():
        yield


@contextlib.asynccontextmanager
async def flipping(
    root: Path, log: Log, mover: ScriptedMover, **options: Any
) -> AsyncIterator[tuple[ToyGroup, Router]]:
    async with running_group(root, log, **options) as group:
        with_mover = serving(group, "mover", add_MoverServiceServicer_to_server, mover, mover_pb.DESCRIPTOR)
        async with with_mover:
            yield group, await group.joined()


def entries(group: ToyGroup, rank: int = 0) -> list[Any]:
    """What the log holds so far, as a rank was given it."""
    messages = [worker_service_pb2.ExecuteStepsRequest.FromString(entry) for entry in group.workers[rank].entries]
    return [entry_from_proto(message) for message in messages]


def kinds(group: ToyGroup) -> list[type]:
    """The entries of flips, in order, and steps around them as one."""
    found: list[type] = []
    for entry in entries(group):
        kind = type(entry.entry)
        if kind in (FlipEntry, CommitEntry, AbandonEntry) or (kind is StepPlan and found[-1:] != [StepPlan]):
            found.append(kind)
    return found


def metric(group: ToyGroup, name: str) -> float:
    [family] = [family for family in group.metrics.families() if family.name == name]
    return family.samples[0].value


async def hold(group: ToyGroup, router: Router, name: str = "held", first: int = 0, num_tokens: int = 8) -> None:
    """A request at work whose steps nobody answers."""
    for worker in group.workers:
        worker.may_answer.clear()
        worker.has_plan.clear()
    await router.submit(name, [first, *PROMPT[1:]], num_tokens)
    with anyio.fail_after(WAIT_S):
        for worker in group.workers:
            await worker.has_plan.wait()


def go_on(group: ToyGroup) -> None:
    for worker in group.workers:
        worker.may_answer.set()


async def asked(mover: ScriptedMover) -> None:
    with anyio.fail_after(WAIT_S):
        await mover.was_asked.wait()
