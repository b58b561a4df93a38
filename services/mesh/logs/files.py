"""Where lines go: a rotated file, and a standard output that may be a paused terminal.

Neither ever waits for a reader. Standard library only. A file is renamed when it is full and the oldest one is removed;
nothing is truncated.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

STDOUT_PATIENCE_MS = 200
"""How long a full pipe is given to drain, once; while it stays full, lines for it are dropped and counted."""


class RotatedFile:
    """Appends lines to `path`; above `max_bytes` it becomes `path.1`, that `path.2`, up to `max_files` in all."""

    def __init__(self, path: Path, max_bytes: int, max_files: int) -> None:
        self._path, self._max_bytes, self._max_files = path, max_bytes, max_files
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._fd).st_size

    def write(self, line: bytes) -> None:
        """Appends a line, its newline included; a full disk loses the line, not the process."""
        if self._size_bytes and self._size_bytes + len(line) > self._max_bytes:
            self._rotate()
        try:
            self._size_bytes += os.write(self._fd, line)
        except OSError:
            return

    def _rotate(self) -> None:
        os.close(self._fd)
        for index in range(self._max_files - 1, 0, -1):
            older = self._numbered(index - 1)
            if older.exists():
                older.replace(self._numbered(index))
        if self._max_files == 1:
            self._path.unlink()
        self._open()

    def _numbered(self, index: int) -> Path:
        return self._path if index == 0 else self._path.with_name(f"{self._path.name}.{index}")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


class PatientOutput:
    """Writes lines to a descriptor that may be full, and counts those that it would not take."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._full = False
        self._gone = False
        self._num_dropped = 0

    def write(self, line: bytes) -> bool:
        """Writes a line of at most `MAX_LINE_BYTES`, or drops it and returns False."""
        if self._gone or not self._has_room():
            self._num_dropped += 1
            return False
        try:
            os.write(self._fd, line)
        except OSError:
            # The reader is gone for good; the file still has every line.
            self._gone = True
        return not self._gone

    def take_dropped(self) -> int:
        """Lines dropped since this was last asked."""
        count, self._num_dropped = self._num_dropped, 0
        return count

    def _has_room(self) -> bool:
        found = self._poll.poll(0 if self._full else STDOUT_PATIENCE_MS)
        self._full = not (found and found[0][1] & select.POLLOUT)
        return not self._full
