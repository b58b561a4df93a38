"""The mover's memory of flips: an append-only file of records, each with its own checksum.

What is appended survives the process, not the machine: a generation does not outlive the machine either, so nothing is
flushed to the disk within a flip. What is not whole (a tail torn by the process's death, or damage) is dropped at the
next start, and what stands behind it is kept. Bounded: a start keeps the newest `KEEP_RECORDS` records.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from services.core.flip.messages import FlipOutcome
from services.core.flip.records import Armed, Concluded, Entered, FlipKey, Record
from services.core.ids import FlipId, Generation

KEEP_RECORDS = 1024


class Journal:
    """The file and what it says, held open for the life of the process."""

    def __init__(self, path: Path) -> None:
        """Reads what is there, drops what is torn or old, and opens for appending."""
        kept = list(_read(path))[-KEEP_RECORDS:]
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"".join(map(_line, kept)))
        fresh.replace(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._last: dict[FlipKey, Record] = {record.key: record for record in kept}

    def last(self, key: FlipKey) -> Record | None:
        """The newest record of an attempt."""
        return self._last.get(key)

    def append(self, record: Record) -> None:
        """Writes one record; it is there for the next life of this process when the call returns.

        Raises:
            OSError: the disk is full or gone; the record is not written.
        """
        line = _line(record)
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"the flip journal took {written} of {len(line)} bytes: is the disk full?")
        self._last[record.key] = record
        while len(self._last) > KEEP_RECORDS:
            del self._last[next(iter(self._last))]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _line(record: Record) -> bytes:
    generation, flip_id = record.key
    match record:
        case Armed():
            words = ["armed"]
        case Entered():
            words = ["entered", str(record.round)]
        case Concluded():
            words = ["concluded", record.outcome.value, " ".join(record.reason.split())]
    text = " ".join([str(generation), str(flip_id), *words]).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> Iterator[Record]:
    """Yields the records that are whole: the last one of an attempt may stand behind a damaged one of another."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            yield _parse(text.decode())


def _parse(text: str) -> Record:
    generation, flip_id, kind, *rest = text.split(" ", 4)
    key = (Generation(int(generation)), FlipId(int(flip_id)))
    match kind, rest:
        case "armed", []:
            return Armed(key)
        case "entered", [round_number]:
            return Entered(key, int(round_number))
        case "concluded", [outcome, *reason]:
            return Concluded(key, FlipOutcome(outcome), " ".join(reason))
        case _:
            raise ValueError(f"the flip journal has a whole record of unknown kind: {text!r}")
