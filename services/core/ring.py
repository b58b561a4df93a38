"""The format of a rank's ring: fixed-size records in a file that one rank writes and anybody reads.

A flight recorder: a record is written before the operation it names, so the last one says what the rank entered; the
file outlives the process, SIGKILL included. Single writer, no lock; readers take the head first and drop what was
overwritten meanwhile. The chain is a 64-bit FNV-1a over what every rank of the group must do alike, word by word:
sizes and times stay out of it, since uneven shards differ legitimately.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = 0x464C_4950_5249_4E47
"""Says what the file is, and with the version below how to read it."""
VERSION = 1
CAPACITY = 4096
"""Records a ring holds: minutes of steps."""

HEADER = struct.Struct("<QIIQQQQ")
"""magic, version, rank, pid, start time of the process (clock ticks), capacity, boot time of this writer (ns)."""
HEAD = struct.Struct("<Q")
"""Records written so far; the newest is at (head - 1) mod capacity."""
HEAD_OFFSET = 64
RECORDS_OFFSET = 128
RECORD = struct.Struct("<QQIIQQQQ")
"""ordinal, monotonic ns, kind, key, sequence, epoch, payload, chain."""
RING_BYTES = RECORDS_OFFSET + CAPACITY * RECORD.size

FNV_OFFSET = 0xCBF2_9CE4_8422_2325
FNV_PRIME = 0x0000_0100_0000_01B3
WORD = 2**64 - 1


class RecordKind(IntEnum):
    """What the rank was about to do."""

    RESET = 1
    STEP_BEGAN = 2
    TOKENS_AWAITED = 3
    """Key: 0. Sampled ids of an earlier step are waited for."""
    HIDDEN_AWAITED = 4
    """Key: the rank they come from."""
    LAYERS_ENTERED = 5
    """The forward pass; in TP its collectives."""
    HIDDEN_SENT = 6
    """Key: the rank they go to."""
    SAMPLING = 7
    TOKENS_PUBLISHED = 8
    STEP_ENDED = 9
    """Payload: compute nanoseconds."""
    PARKED = 10
    FLIP_WORK = 11
    COMMITTED = 12
    ABANDONED = 13
    FLIP_DONE = 14
    """This rank's part of a flip is done: it waits for the outcome in the log, however long that takes."""


PARTNERED = frozenset({RecordKind.HIDDEN_AWAITED, RecordKind.HIDDEN_SENT})
"""Their key is the rank that is waited for, or that is given something."""

CHAINED = frozenset(
    {RecordKind.RESET, RecordKind.STEP_BEGAN, RecordKind.PARKED, RecordKind.COMMITTED, RecordKind.ABANDONED}
)
"""What every rank does alike in either layout; the rest differs between stages."""

QUIET = frozenset({RecordKind.STEP_ENDED, RecordKind.RESET, RecordKind.COMMITTED, RecordKind.ABANDONED})
"""After these a rank owes nothing: it waits for the log."""


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Whose ring it is."""

    rank: int
    pid: int
    start_ticks: int
    """Start time of the process as /proc gives it: tells a process from a later one with its pid."""
    began_ns: int


@dataclass(frozen=True, slots=True)
class RingRecord:
    """One record; `chain` covers every chained record up to and including this one."""

    ordinal: int
    time_ns: int
    kind: RecordKind
    key: int
    sequence: int
    epoch: int
    payload: int
    chain: int


def chained(chain: int, kind: RecordKind, sequence: int, epoch: int, digest: int) -> int:
    """The chain after one more record; `digest` is what the ranks agree on inside the entry (rows, ids)."""
    for word in (kind, sequence, epoch, digest):
        chain = ((chain ^ word) * FNV_PRIME) & WORD
    return chain


def pack_header(header: RingHeader) -> bytes:
    """The file's first bytes."""
    return HEADER.pack(MAGIC, VERSION, header.rank, header.pid, header.start_ticks, CAPACITY, header.began_ns)


def unpack_header(buffer: bytes | memoryview) -> RingHeader:
    """Whose ring `buffer` is.

    Raises:
        ValueError: not a ring, or of another version; the message names both.
    """
    if len(buffer) < RING_BYTES:
        raise ValueError(f"a ring has {RING_BYTES} bytes, this file {len(buffer)}")
    magic, version, rank, pid, start_ticks, capacity, began_ns = HEADER.unpack_from(buffer)
    if magic != MAGIC or version != VERSION or capacity != CAPACITY:
        raise ValueError(f"ring version {VERSION} of {CAPACITY} records expected, got {version} of {capacity}")
    return RingHeader(rank, pid, start_ticks, began_ns)


def record_offset(ordinal: int) -> int:
    """Where a record lies in the file."""
    return RECORDS_OFFSET + ordinal % CAPACITY * RECORD.size


def read_tail(buffer: bytes | memoryview, max_records: int) -> list[RingRecord]:
    """The newest records, oldest first; what the writer overwrote while they were read is left out."""
    (head,) = HEAD.unpack_from(buffer, HEAD_OFFSET)
    first = max(0, head - min(max_records, CAPACITY - 1))
    found = []
    for ordinal in range(first, head):
        fields = RECORD.unpack_from(buffer, record_offset(ordinal))
        if fields[0] == ordinal:
            found.append(RingRecord(fields[0], fields[1], RecordKind(fields[2]), *fields[3:]))
    return found
