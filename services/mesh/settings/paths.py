"""Where a process keeps what others find it by: sockets, published addresses, logs, records.

One state directory for each deployment: `run/` (0700, gone after a clean end save for lock files), `log/` (kept,
bounded) and, where weights may go to disk, `images/` (kept: the next start need not write them). Names are made here
and nowhere else. Standard library only; nothing named lives outside this directory.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigurationError

PUBLISHED_SUFFIXES = (".sock", ".http", ".grpc")
"""What a service puts into `run/` for others to find, and what its supervisor takes away when it ends."""


LOCK_WAIT_S = 2.0
"""How long a lock is waited for: a process that is killed gives its memory back first, and its lock after that."""
LOCK_RETRY_S = 0.02


def process_name(service: str, rank: int | None = None) -> str:
    """`worker-1`, or `router` where the service has one process."""
    return service if rank is None else f"{service}-{rank}"


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The files of one deployment."""

    root: Path

    @property
    def run(self) -> Path:
        """Sockets, published addresses, locks and supervisors' state."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """Rotated logs, traces and start-up records."""
        return self.root / "log"

    def create(self) -> None:
        """Makes the directories, for their owner only.

        Raises `ConfigurationError` if the system refuses.
        """
        for directory in (self.root, self.run, self.log):
            _make_private(directory)

    def create_images(self) -> Path:
        """Where weights may lie that are not needed next, one file for each rank and layout: made if it is not there.

        Raises `ConfigurationError` if the system refuses.
        """
        images = self.root / "images"
        _make_private(images)
        return images

    def socket(self, service: str, rank: int | None = None) -> Path:
        """Where the process serves gRPC."""
        return self.run / f"{process_name(service, rank)}.sock"

    def address(self, service: str, kind: str) -> Path:
        """The file in which a service publishes the `host:port` it got; `kind` is `http` or `grpc`."""
        return self.run / f"{service}.{kind}"

    def log_file(self, service: str, rank: int | None = None) -> Path:
        """The process's own log, besides its standard output."""
        return self.log / f"{process_name(service, rank)}.log"

    def ring(self, rank: int) -> Path:
        """A rank's flight recorder; a new life of the rank puts a new file in its place."""
        return self.log / f"worker-{rank}.ring"

    @property
    def memory_ring(self) -> Path:
        """Samples of free memory; the sentinel writes, of one boot of the machine."""
        return self.log / "memory.ring"

    def start_record(self, service: str, rank: int | None = None) -> Path:
        """What the process was started with."""
        return self.log / f"{process_name(service, rank)}.start.json"

    def supervisor_state(self, service: str) -> Path:
        """Restarts, last exits and backoff of a service, for `status`."""
        return self.run / f"{service}.supervisor.json"

    def published(self, service: str) -> Iterator[Path]:
        """Yields what the processes of a service have put there for others to find."""
        if not self.run.is_dir():
            return
        for path in self.run.iterdir():
            name, _, rank = path.stem.partition("-")
            if path.suffix in PUBLISHED_SUFFIXES and name == service and (rank == "" or rank.isdecimal()):
                yield path


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"state.dir: {directory} cannot be made ({error.strerror})") from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file; a reader sees the old text or the new, never a part."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(text, "utf-8")
    except OSError:
        # On a full disk every try would leave another one.
        fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)


def make_reserved(path: Path, num_bytes: int, header: bytes) -> None:
    """Makes a file of `header` and zeros that owns all its bytes, in the place of an earlier one.

    A hole in a file that is mapped would be SIGBUS in the middle of work, once the disk is full; here it is an
    `OSError` at the start, and no file.
    """
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.write(header)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)


def hold_lock(path: Path, owner: str, within_s: float = LOCK_WAIT_S) -> int:
    """Takes the lock file for the life of this process and returns its descriptor, not inheritable.

    A process that ends gives its lock up with its last descriptor, a moment after it is seen to end: the next one waits
    for it, up to `within_s`.

    Raises `ConfigurationError` if a living process has it: two of a kind would take each other's sockets.
    """
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(held, within_s):
        holder = os.read(held, 64).decode("ascii", "replace").strip() or "unknown"
        os.close(held)
        raise ConfigurationError(
            f"{owner} runs already in {path.parent.parent} (process {holder}): stop it, or give this deployment "
            "another [state] dir"
        )
    os.ftruncate(held, 0)
    os.write(held, f"{os.getpid()}\n".encode())
    return held


def _locked(fd: int, within_s: float) -> bool:
    """Whether the lock was free within the bound; the system has no wait for a lock that ends by itself."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(LOCK_RETRY_S)
        else:
            return True
