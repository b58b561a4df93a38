"""Samples of free memory in a bounded file that outlives its writer: what an out-of-memory kill leaves behind.

One writer, any reader. The file is mapped, so a killed process has lost nothing it wrote. It belongs to one boot of the
machine: a sentinel that is started again goes on where the last one stopped, one after a reboot begins anew.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from services.core.ring import RecordKind
from services.mesh.settings.paths import make_reserved

MAGIC = 0x464C_4950_4D45_4D52
VERSION = 1
CAPACITY = 18_000
"""Samples a file holds: half an hour at ten a second, 0.9 MB."""

HEADER = struct.Struct("<QII36s")
"""magic, version, capacity, boot id."""
HEAD = struct.Struct("<Q")
HEAD_OFFSET = 64
RECORDS_OFFSET = 128
RECORD = struct.Struct("<QQQQQII")
"""ordinal, monotonic ns, bytes left, sequence, epoch, kind (0: no rank has begun), rank."""
FILE_BYTES = RECORDS_OFFSET + CAPACITY * RECORD.size


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Free memory at one moment, and what the rank that moved last had entered then."""

    time_ns: int
    """Monotonic."""
    left_bytes: int
    sequence: int = 0
    epoch: int = 0
    """0: no generation has begun."""
    kind: RecordKind | None = None
    rank: int = 0


class MemoryRing:
    """The writer's end."""

    def __init__(self, path: Path, boot_id: str) -> None:
        """Continues the file of this boot, or puts a fresh one in its place."""
        header = HEADER.pack(MAGIC, VERSION, CAPACITY, boot_id.encode("ascii")[:36])
        if not _is_of(path, header):
            make_reserved(path, FILE_BYTES, header)
        with path.open("r+b") as file:
            self._buffer = mmap.mmap(file.fileno(), FILE_BYTES)
        (self._head,) = HEAD.unpack_from(self._buffer, HEAD_OFFSET)

    def write(self, sample: MemorySample) -> None:
        """Adds one sample; the oldest gives way."""
        offset = _offset(self._head)
        kind = 0 if sample.kind is None else sample.kind.value
        fields = (self._head, sample.time_ns, sample.left_bytes, sample.sequence, sample.epoch, kind, sample.rank)
        RECORD.pack_into(self._buffer, offset, *fields)
        self._head += 1
        # The head last: a reader that sees it sees the sample.
        HEAD.pack_into(self._buffer, HEAD_OFFSET, self._head)

    def close(self) -> None:
        """Unmaps; the file stays."""
        self._buffer.close()


def read_samples(buffer: bytes | memoryview, max_samples: int) -> list[MemorySample]:
    """The newest samples of a file's bytes, oldest first.

    Raises:
        ValueError: not such a file, or of another version.
    """
    if len(buffer) < FILE_BYTES or HEADER.unpack_from(buffer)[:3] != (MAGIC, VERSION, CAPACITY):
        raise ValueError(f"samples of memory, version {VERSION} in {FILE_BYTES} bytes expected; this is another file")
    (head,) = HEAD.unpack_from(buffer, HEAD_OFFSET)
    found = []
    for ordinal in range(max(0, head - min(max_samples, CAPACITY - 1)), head):
        seen, time_ns, left, sequence, epoch, kind, rank = RECORD.unpack_from(buffer, _offset(ordinal))
        if seen == ordinal:
            found.append(MemorySample(time_ns, left, sequence, epoch, RecordKind(kind) if kind else None, rank))
    return found


def _offset(ordinal: int) -> int:
    return RECORDS_OFFSET + ordinal % CAPACITY * RECORD.size


def _is_of(path: Path, header: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header and path.stat().st_size == FILE_BYTES
    except FileNotFoundError:
        return False
