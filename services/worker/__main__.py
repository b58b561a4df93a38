"""Starts one rank: `python -m services.worker --rank K --fds weights=5,pool=6,flags=7`."""

from services.mesh.process import run_service
from services.mesh.shell import Shell


async def main(shell: Shell) -> None:
    """Imports the worker only here, after the process is tied to its parent: torch takes seconds."""
    from services.worker.server import serve

    await serve(shell)


if __name__ == "__main__":
    run_service("worker", main)
