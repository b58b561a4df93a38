"""The region that the ranks of one host share: an anonymous memfd, its layout, its abort word and its mirror words.

Created once per generation, inherited by descriptor, nothing named to leak. Never imports torch, so that the process
that creates it and those that only read it stay small. The words' places are those of native/collectives.h, by test.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final, Self

import kernels._native as _native
from kernels.cpu.collective_status import AbortReason, Operation, Wait

MAGIC: Final = 0x3168736D70696C66
HEADER: Final = struct.Struct("<7Q")
ABORT_OFFSET: Final = 64
LINE_BYTES: Final = 64
RANK_BYTES: Final = 5 * LINE_BYTES
CHANNEL_BYTES: Final = 2 * LINE_BYTES
WORD: Final = struct.Struct("<Q")
MIRROR: Final = struct.Struct("<6I4Q")
MIRROR_OFFSET: Final = 4 * LINE_BYTES
WAITED_OFFSET: Final = MIRROR_OFFSET + struct.calcsize("<6I2Q")


@dataclass(frozen=True, slots=True)
class RegionShape:
    """What the sizes of a region follow from; every rank reads it from the region's header."""

    num_ranks: int
    max_message_bytes: int
    max_rows: int
    max_messages_in_flight: int = 2
    num_board_steps: int = 64
    stage_bytes: int = 256 * 1024
    slot_bytes: int = 64 * 1024

    @property
    def num_slots(self) -> int:
        """Chunks a channel holds: whole messages, so that a sender is never held up below its depth."""
        return max(2, self.max_messages_in_flight * max(1, -(-self.max_message_bytes // self.slot_bytes)))

    def words(self) -> tuple[int, int, int, int, int, int]:
        """The six sizes in the header's order."""
        return (
            self.num_ranks,
            self.stage_bytes,
            self.num_slots,
            self.slot_bytes,
            self.num_board_steps,
            self.max_rows,
        )


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Offsets and sizes in bytes, computed in one place (native/collectives_wait.c)."""

    ranks: int
    channels: int
    board: int
    board_entry_bytes: int
    stages: int
    slots: int
    slot_stride: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class RankWords:
    """One rank's words read from outside without a lock: each is true, together they may be of different moments."""

    pid: int
    operation: Operation
    purpose: int
    status: int
    wait: Wait
    peer: int
    waited: int
    seen: int
    wait_ns: int
    num_operations: int
    acknowledged: int
    published: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChannelWords:
    """Chunks sent and consumed on one ordered pair of ranks."""

    from_rank: int
    to_rank: int
    sent: int
    consumed: int


@dataclass(frozen=True, slots=True)
class MirrorWords:
    """Everything a reader outside needs to name who is stuck in what, and on whom."""

    abort_reason: AbortReason | None
    ranks: tuple[RankWords, ...]
    channels: tuple[ChannelWords, ...]


class ShmRegion:
    """The mapped memfd. Created once per generation, inherited by descriptor, attached by every rank."""

    def __init__(self, fd: int) -> None:
        """Maps a region that `create` made; raises ValueError if the descriptor holds none."""
        self.fd = fd
        size = os.fstat(fd).st_size
        if size < mmap.PAGESIZE:
            raise ValueError(f"descriptor {fd} has {size} bytes, no region: create it before the ranks start")
        self._memory = mmap.mmap(fd, size)
        magic, *sizes = HEADER.unpack_from(self._memory, 0)
        if magic != MAGIC:
            raise ValueError(f"descriptor {fd} holds no region: magic {MAGIC:#x} expected, got {magic:#x}")
        self.num_ranks: int = sizes[0]
        self.max_rows: int = sizes[5]
        self.layout = RegionLayout(*_native.collectives_layout(*sizes))
        self.num_bytes = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def create(cls, shape: RegionShape) -> Self:
        """Makes a zeroed region in an anonymous memfd, closed on exec unless the spawner passes it on."""
        layout = RegionLayout(*_native.collectives_layout(*shape.words()))
        fd = os.memfd_create("flipmesh-flags", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.total_bytes)
        os.pwrite(fd, HEADER.pack(MAGIC, *shape.words()), 0)
        return cls(fd)

    def reset(self) -> None:
        """Zeroes everything but the header, for the next generation; only while no rank is attached."""
        header = self._memory[: HEADER.size]
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, self.num_bytes)
        self._memory[: HEADER.size] = header

    def abort(self, reason: AbortReason) -> None:
        """Releases every wait of every rank within a scheduling delay; callable from any thread and any process."""
        _native.collectives_abort(self.address, int(reason))

    def abort_reason(self) -> AbortReason | None:
        """Returns the first reason given, if any."""
        reason = self._word(ABORT_OFFSET)
        return AbortReason(reason) if reason else None

    def mirror(self) -> MirrorWords:
        """Reads the rounds, acknowledgements and counters of all ranks: plain reads that disturb nobody."""
        pairs = [(a, b) for a in range(self.num_ranks) for b in range(self.num_ranks) if a != b]
        return MirrorWords(
            abort_reason=self.abort_reason(),
            ranks=tuple(self.rank_words(rank) for rank in range(self.num_ranks)),
            channels=tuple(self._channel_words(a, b) for a, b in pairs),
        )

    def rank_words(self, rank: int) -> RankWords:
        """Reads one rank's words."""
        lines = self.layout.ranks + rank * RANK_BYTES
        pid, operation, purpose, status, wait, peer, waited, seen, wait_ns, num_operations = MIRROR.unpack_from(
            self._memory, lines + MIRROR_OFFSET
        )
        return RankWords(
            pid=pid,
            operation=Operation(operation),
            purpose=purpose,
            status=status,
            wait=Wait(wait),
            peer=peer,
            waited=waited,
            seen=seen,
            wait_ns=wait_ns,
            num_operations=num_operations,
            acknowledged=self._word(lines + LINE_BYTES),
            published=(self._word(lines + 2 * LINE_BYTES), self._word(lines + 3 * LINE_BYTES)),
        )

    def waited_ns(self, rank: int) -> int:
        """Reads the one word that a step's own times need."""
        return self._word(self.layout.ranks + rank * RANK_BYTES + WAITED_OFFSET)

    def close(self) -> None:
        """Unmaps and closes the descriptor; communicators are closed first."""
        self._memory.close()
        os.close(self.fd)

    def _word(self, offset: int) -> int:
        return int(WORD.unpack_from(self._memory, offset)[0])

    def _channel_words(self, from_rank: int, to_rank: int) -> ChannelWords:
        lines = self.layout.channels + (from_rank * self.num_ranks + to_rank) * CHANNEL_BYTES
        return ChannelWords(from_rank, to_rank, self._word(lines), self._word(lines + LINE_BYTES))
