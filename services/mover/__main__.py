"""The mover process: `python -m services.mover`."""

import anyio
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import add_MoverServiceServicer_to_server

from services.core.flip.messages import FlipDeadlines
from services.mesh.process import run_service
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase
from services.mover.journal import Journal
from services.mover.server import Mover


async def main(shell: Shell) -> None:
    """Coordinates flips until told to stop."""
    deadlines = shell.settings.deadlines
    journal = Journal(shell.paths.root / "flips.journal")
    mover = Mover(
        shell.settings.group.num_ranks,
        FlipDeadlines(
            park_ns=int(deadlines.park_s * 1e9),
            presence_ns=int(deadlines.presence_s * 1e9),
            data_plane_ns=int(deadlines.flip_data_plane_s * 1e9),
        ),
        journal,
        shell.peers,
        shell.log,
        shell.tracer,
        shell.metrics,
        shell.holds,
    )
    shell.introspection.report(mover.fill_status)
    descriptor = mover_service_pb2.DESCRIPTOR.services_by_name["MoverService"]
    shell.server.add(add_MoverServiceServicer_to_server, mover, descriptor)
    async with anyio.create_task_group() as tasks, shell.server.running():
        tasks.start_soon(mover.links.run)
        tasks.start_soon(_end_with_the_journal, mover)
        shell.progress.enter(Phase.READY)
        await shell.stop.wait()
        tasks.cancel_scope.cancel()
    journal.close()


async def _end_with_the_journal(mover: Mover) -> None:
    """A mover that cannot write an outcome down must not go on from memory: it is started afresh."""
    await mover.journal_failed.wait()
    raise OSError("the flip journal cannot be written: free space in the state directory")


if __name__ == "__main__":
    run_service("mover", main)
