"""The smallest service there is, for tests of the shell; what it does beyond serving is said by a file in its state
directory, so that the supervisor starts it as it starts any other."""

import os
import sys
import time

import anyio

from services.core.errors import ConfigurationError, GenerationEndedError
from services.mesh.process import run_service
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase


async def main(shell: Shell) -> None:
    wish = shell.paths.root / "wish"
    words = wish.read_text().split() if wish.exists() else ["serve"]
    async with shell.server.running():
        match words:
            case ["refuse"]:
                raise ConfigurationError("tiny.key = 1 is wrong: leave it out")
            case ["crash"]:
                raise RuntimeError("as wished")
            case ["generation"]:
                raise GenerationEndedError("as wished")
            case ["block"]:
                shell.progress.enter(Phase.READY)
                await shell.stop.wait()
                time.sleep(60)  # noqa: ASYNC251 (a loop that hangs is what is wanted)
            case ["span"]:
                with shell.tracer.start_as_current_span("work"):
                    await shell.stop.wait()
            case ["linger"]:
                shell.progress.enter(Phase.READY)
                await anyio.sleep_forever()
            case _:
                write_fds(shell)
                shell.progress.enter(Phase.READY)
                await shell.stop.wait()


def write_fds(shell: Shell) -> None:
    """Marks every inherited region with this process's pid, after saying what was found in it."""
    for name, fd in shell.fds.items():
        found = os.pread(fd, 64, 0).rstrip(b"\0").decode()
        shell.log.info("region", region=name, found=found or "zeroes", size=os.fstat(fd).st_size)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


if __name__ == "__main__":
    run_service("worker" if "--rank" in sys.argv else "tiny", main)
