"""The sentinel process: `python -m services.sentinel`."""

import anyio
from flipmesh.sentinel.v1 import sentinel_service_pb2
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import add_SentinelServiceServicer_to_server

from services.mesh.host_memory import HostMemoryReader
from services.mesh.process import run_service
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase
from services.sentinel.corridor import Corridor, CorridorWatch
from services.sentinel.memory_ring import MemoryRing
from services.sentinel.rings import RingReader
from services.sentinel.server import Sentinel


async def main(shell: Shell) -> None:
    """Watches until told to stop."""
    settings = shell.settings
    rings = [shell.paths.ring(rank) for rank in range(settings.group.num_ranks)]
    corridor = Corridor(settings.group.free_floor_bytes, settings.group.layout)
    sentinel = Sentinel(rings, settings.deadlines.stall_s, shell.log, shell.metrics, corridor)
    readers = [RingReader(path, rank) for rank, path in enumerate(rings)]
    samples = MemoryRing(shell.paths.memory_ring, shell.identity.boot_id)
    watch = CorridorWatch(corridor, samples, readers, HostMemoryReader())
    shell.introspection.report(sentinel.fill_status)
    descriptor = sentinel_service_pb2.DESCRIPTOR.services_by_name["SentinelService"]
    shell.server.add(add_SentinelServiceServicer_to_server, sentinel, descriptor)
    async with anyio.create_task_group() as tasks, shell.server.running():
        tasks.start_soon(sentinel.watch)
        if settings.group.free_floor_bytes:
            tasks.start_soon(watch.watch)
        shell.progress.enter(Phase.READY)
        await shell.stop.wait()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    run_service("sentinel", main)
