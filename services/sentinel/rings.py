"""Reads the ranks' rings from outside: maps files, asks the system about processes. Never signals, never waits."""

import mmap
import os
from pathlib import Path

from services.core.ring import RING_BYTES, RingHeader, RingRecord, read_tail, unpack_header
from services.sentinel.diagnose import ProcessState, RankView

TAIL_RECORDS = 512
"""Newest records read for a diagnosis: some tens of steps."""


class RingReader:
    """One rank's ring, mapped again whenever the rank has made a new one."""

    __slots__ = ("_buffer", "_header", "_inode", "_path", "_was_alive", "rank")

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._path = path
        self._inode: int | None = None
        self._buffer: mmap.mmap | None = None
        self._header: RingHeader | None = None
        self._was_alive = False

    def view(self, max_records: int = TAIL_RECORDS) -> RankView | None:
        """The rank now, or None while it has made no ring; a ring that only a dead process ever had is none."""
        self._remap()
        if self._buffer is None or self._header is None:
            return None
        state = process_state(self._header)
        self._was_alive |= state is not ProcessState.LOST
        if not self._was_alive:
            return None
        return RankView(self.rank, state, tuple(read_tail(memoryview(self._buffer), max_records)))

    def newest(self) -> RingRecord | None:
        """The last record, while its writer's pid exists; cheaper than `view`, and enough to say where it was."""
        self._remap()
        if self._buffer is None or self._header is None or not os.path.exists(f"/proc/{self._header.pid}"):  # noqa: PTH110 (ten times a second)
            return None
        tail = read_tail(memoryview(self._buffer), 1)
        return tail[0] if tail else None

    def _remap(self) -> None:
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return
        if inode == self._inode:
            return
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < RING_BYTES:
                return
            buffer = mmap.mmap(file.fileno(), RING_BYTES, prot=mmap.PROT_READ)
        self._header = unpack_header(memoryview(buffer))
        self._inode, self._buffer, self._was_alive = inode, buffer, False


def process_state(header: RingHeader) -> ProcessState:
    """Whether the ring's writer runs, is stopped, or is gone (its pid may belong to another process by now)."""
    try:
        state, *fields = Path(f"/proc/{header.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessState.LOST
    if int(fields[18]) != header.start_ticks or state in "ZX":
        return ProcessState.LOST
    return ProcessState.STOPPED if state in "Tt" else ProcessState.RUNNING
