"""`python -m services.router`: one router process."""

from services.mesh.process import run_service
from services.mesh.shell import Shell


async def main(shell: Shell) -> None:
    """Runs the router; what is heavy is imported here, once the process is tied to its parent."""
    from services.router.http.body import bound_integers
    from services.router.service import main as serve

    bound_integers()
    await serve(shell)


if __name__ == "__main__":
    run_service("router", main)
