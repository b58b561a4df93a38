"""Real processes under test: started, read line by line, waited for by descriptor. Nothing here sleeps."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 20.0
ROOT = Path(__file__).parents[3]


class Running:
    """A process whose output is read as it comes; `seen` holds all lines so far."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._rest = b""
        self._read = 0
        self.seen: list[str] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, pattern: str, timeout_s: float = WAIT_S) -> re.Match[str]:
        """Waits for the next line that has `pattern`, and returns the match."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            while self._read < len(self.seen):
                self._read += 1
                if found := re.search(pattern, self.seen[self._read - 1]):
                    return found
            if not self._more(deadline_s):
                raise AssertionError(f"no line with {pattern!r} in\n" + "\n".join(self.seen))

    def several(self, pattern: str, count: int, timeout_s: float = WAIT_S) -> list[re.Match[str]]:
        """Waits for `count` lines with `pattern` after the line that `line` returned last, in any order with others."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = [match for line in self.seen[self._read :] if (match := re.search(pattern, line))]
            if len(found) >= count:
                return found[:count]
            if not self._more(deadline_s):
                raise AssertionError(f"{len(found)} of {count} lines with {pattern!r} in\n" + "\n".join(self.seen))

    def rest(self, timeout_s: float = WAIT_S) -> list[str]:
        """Waits until every writer of the output is gone; returns all lines."""
        deadline_s = time.monotonic() + timeout_s
        while self._more(deadline_s):
            pass
        assert time.monotonic() < deadline_s, "still writing:\n" + "\n".join(self.seen)
        return self.seen

    def pump(self, timeout_s: float) -> None:
        """Takes in what is written within `timeout_s`, so that the writer never blocks."""
        self._more(time.monotonic() + timeout_s)

    def code(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def _more(self, deadline_s: float) -> bool:
        readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
        if not readable:
            return False
        chunk = os.read(self._fd, 65536)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self.seen += [line.decode("utf-8", "replace") for line in lines]
        return bool(chunk)


@contextmanager
def running(command: list[str], environment: dict[str, str], cwd: Path = ROOT) -> Iterator[Running]:
    """Starts a process and makes sure that it is gone afterwards."""
    process = Running(command, environment, cwd)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait(WAIT_S)
        assert process.process.stdout is not None
        process.process.stdout.close()


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def open_pid(pid: int) -> int:
    """A descriptor of a living process; to be opened while it is known to live."""
    return os.pidfd_open(pid)


def gone(pidfd: int, timeout_s: float = WAIT_S) -> bool:
    """Waits for a process to end and closes its descriptor."""
    readable, _, _ = select.select([pidfd], [], [], timeout_s)
    os.close(pidfd)
    return bool(readable)


def send(pidfd: int, number: signal.Signals) -> None:
    signal.pidfd_send_signal(pidfd, number)


def processes_with(text: str) -> list[tuple[int, str]]:
    """(pid, command) of every living process with `text` in its environment or command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if command and (text.encode() in environment or text.encode() in command):
            found.append((int(entry.name), command.replace(b"\0", b" ").decode()))
    return found
