"""The scheduler's life: sizes the group from its settings and its model, serves routers, outlives them at the end."""

import anyio
import anyio.to_thread
from flipmesh.scheduler.v1 import scheduler_service_pb2
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server

from services.core.errors import ConfigurationError
from services.core.layout import LayoutError
from services.mesh.host_memory import HostMemoryReader
from services.mesh.limits import SHUTDOWN_GRACE_S
from services.mesh.settings.deployment import deployment_of
from services.mesh.settings.tables import Settings
from services.mesh.shell import Shell
from services.models.geometry import ModelGeometry
from services.models.model_files import open_model
from services.placement.demand import Model, plan_memory, price_line
from services.placement.ledger import Ledger
from services.scheduler.generation import Surroundings
from services.scheduler.generation_counter import GenerationCounter
from services.scheduler.group import Group
from services.scheduler.memory_watch import MemoryWatch
from services.scheduler.meters import Meters
from services.scheduler.server import SchedulerServer
from services.scheduler.sizing import GroupSize, free_memory_bytes, size_group
from services.scheduler.streams.joining import WorkerFinder
from services.scheduler.streams.sessions import Sessions

OUTLIVE_ROUTERS_S = SHUTDOWN_GRACE_S - 0.3
"""How long, from the first signal, routers may take to leave: they drain, and the ranks work for them meanwhile."""


async def serve(shell: Shell) -> None:
    """Runs the group until told to stop, then as long as routers still drain."""
    size = await _size(shell)
    group = make_group(shell, size)
    shell.introspection.report(group.fill_status)
    descriptor = scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    shell.server.add(add_SchedulerServiceServicer_to_server, SchedulerServer(group), descriptor)
    async with shell.server.running(is_serving=False), anyio.create_task_group() as tasks:
        tasks.start_soon(group.serve)
        await shell.stop.wait()
        with anyio.move_on_after(OUTLIVE_ROUTERS_S):
            await group.around.sessions.is_empty.wait()
        group.around.sessions.cut_all("the scheduler ends: submit again to its successor")
        tasks.cancel_scope.cancel()


def make_group(shell: Shell, size: GroupSize) -> Group:
    """The group of this process, with nothing running yet."""
    settings = shell.settings
    return Group(
        size=size,
        layout=settings.group.layout,
        finder=WorkerFinder(shell.peers, settings.group.num_ranks, settings.deadlines.rpc_s),
        counter=GenerationCounter(shell.paths.root / "generation"),
        deadlines=settings.deadlines,
        around=Surroundings(
            peers=shell.peers,
            sessions=Sessions(),
            meters=Meters(shell.metrics),
            progress=shell.progress,
            log=shell.log,
            rpc_s=settings.deadlines.rpc_s,
            memory=_memory_watch(shell, size),
        ),
        set_serving=shell.server.set_serving,
        ranks_meet_in_flips=settings.group.mode != "shared",
        holds=shell.holds,
    )


def _memory_watch(shell: Shell, size: GroupSize) -> MemoryWatch | None:
    """None where no floor is set, or where pools are not in the memory that it is the floor of."""
    group = shell.settings.group
    if not group.free_floor_bytes:
        return None
    if group.device != "cpu":
        shell.log.info("pressure-not-watched", device=group.device, reason="pools are not in host memory")
        return None
    return MemoryWatch(group.free_floor_bytes, size.block_bytes, HostMemoryReader())


async def _size(shell: Shell) -> GroupSize:
    with shell.progress.working("reading the model's geometry", shell.settings.deadlines.boot_s):
        geometry, ledger = await anyio.to_thread.run_sync(_priced, shell.settings)
    size = size_group(shell.settings, geometry, free_memory_bytes(), ledger)
    num_blocks = size.limits.num_blocks
    shell.log.info("priced", **price_line(ledger, shell.settings.group.budgets, free_memory_bytes(), num_blocks))
    if size.limits.context_tokens < size.limits.max_context_tokens:
        shell.log.warning(
            "window-cut",
            asked=size.limits.max_context_tokens,
            effective=size.limits.context_tokens,
            remedy="raise pool.num_blocks or pool.kv_bytes, or set model.context_tokens",
        )
    shell.log.info(
        "sized",
        num_blocks=size.limits.num_blocks,
        kv_bytes=size.limits.num_blocks * size.block_bytes,
        context_tokens=size.limits.context_tokens,
        asked_context_tokens=size.limits.max_context_tokens,
        resident_requests=size.limits.max_resident_requests,
        reason=size.reason,
    )
    return size


def _priced(settings: Settings) -> tuple[ModelGeometry, Ledger]:
    files = open_model(settings.model.path or settings.model.name)
    model = Model(files.geometry, files.tensors, sum(len(buffer) for buffer in files.buffers))
    try:
        return files.geometry, plan_memory(deployment_of(settings), model)
    except LayoutError as error:
        raise ConfigurationError(f"[group] does not fit this model: {error}") from error
