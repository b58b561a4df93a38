"""The scheduler process: `python -m services.scheduler`."""

from services.mesh.process import run_service
from services.mesh.shell import Shell


async def main(shell: Shell) -> None:
    """Serves one group until told to stop."""
    from services.scheduler.service import serve

    await serve(shell)


if __name__ == "__main__":
    run_service("scheduler", main)
