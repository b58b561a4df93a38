"""The sentinel process: `python -m services.sentinel`."""

import anyio
from flipmesh.sentinel.v1 import sentinel_service_pb2
from flipmesh.sentinel.v1.sentinel_service_pb2_grpc import add_SentinelServiceServicer_to_server

from services.mesh.process import run_service
from services.mesh.progress import Phase
from services.mesh.shell import Shell
from services.sentinel.server import Sentinel


async def main(shell: Shell) -> None:
    """Watches until told to stop."""
    settings = shell.settings
    rings = [shell.paths.ring(rank) for rank in range(settings.group.num_ranks)]
    sentinel = Sentinel(rings, settings.deadlines.stall_s, shell.log, shell.metrics)
    shell.introspection.report(sentinel.fill_status)
    descriptor = sentinel_service_pb2.DESCRIPTOR.services_by_name["SentinelService"]
    shell.server.add(add_SentinelServiceServicer_to_server, sentinel, descriptor)
    async with anyio.create_task_group() as tasks, shell.server.running():
        tasks.start_soon(sentinel.watch)
        shell.progress.enter(Phase.READY)
        await shell.stop.wait()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    run_service("sentinel", main)
