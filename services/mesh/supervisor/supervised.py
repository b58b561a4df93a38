"""Processes that a supervisor started: it signals these and no others, by descriptor, so never a reused pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.mesh.settings.paths import process_name


@dataclass(slots=True)
class Child:
    """One started process. `code` is None until it is reaped; negative: the signal that ended it."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    began_s: float
    began_unix_s: float = field(default_factory=time.time)
    code: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process is gone."""
        if self.code is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Takes the exit code of a process whose pidfd is readable, and closes that."""
        self.code = self.process.wait()
        os.close(self.pidfd)
        return self.code


def start(module: str, service: str, rank: int | None, fds: Mapping[str, int], now_s: float) -> Child:
    """Starts `python -m module` in a session of its own, so that a signal to honcho's group does not reach it twice."""
    command = [sys.executable, "-m", module, "--supervisor-pid", str(os.getpid())]
    if rank is not None:
        command += ["--rank", str(rank)]
    if fds:
        command += ["--fds", ",".join(f"{name}={fd}" for name, fd in fds.items())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=tuple(fds.values()), start_new_session=True)
    return Child(process_name(service, rank), process, os.pidfd_open(process.pid), now_s)


def describe_exit(code: int) -> str:
    """`exit 1`, or `SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
