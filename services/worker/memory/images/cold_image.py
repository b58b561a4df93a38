"""One image of weights as a file that is whole or absent: written aside, synchronised, renamed, checked as it is read.

A crash at any instant leaves the old file, the new file or none, never a part of one under its name; what it leaves
beside is removed by the next writer. The file says what it holds (identity, sizes, a checksum a chunk, and which
checksum function) and every claim is checked before a byte is believed. Reads and writes go in bounded parts, straight
from and into the image's memory, and leave nothing in the page cache, so that spilled memory is free memory.

Layout of the file: `HEADER`, checksums (u64 each), digest of both (16 bytes), zeros up to a whole page, image.
"""

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.worker.memory.images.chunks import Checksum, chunk_ranges

MAGIC = b"FLIPCOLD"
VERSION = 1
HEADER = struct.Struct("<8sIIQ32sQ")
"""Magic, version, bytes of a chunk, bytes of the image, identity, checksum of `PROBE`."""
PROBE = bytes(range(256))
"""Added up by the given function, tells files of another function from broken ones."""
DIGEST_BYTES = 16
IDENTITY_BYTES = 32
PAGE_BYTES = 4096
IO_BYTES = 4 << 20
"""Most that one read or write asks for."""

OnPart = Callable[[int], None]
"""Called with the bytes done so far, after every part; what it raises ends the work."""


class ColdImageError(OSError):
    """Base: a cold image that cannot be written or read; the message has both numbers and what to do."""


class ColdImageBusyError(ColdImageError):
    """Another process has this cold image."""


class DiskFullError(ColdImageError):
    """The image does not fit on its disk: it stays in memory, and no part of it stays on the disk."""


class ColdImageMissingError(ColdImageError):
    """There is no file."""


class TornImageError(ColdImageError):
    """The file is shorter or longer than its header says, or than a header."""


class CorruptImageError(ColdImageError):
    """Header or image is not what was written."""


class ForeignImageError(ColdImageError):
    """A whole file, but of another model, layout, chunk size, format or checksum function."""


@dataclass(frozen=True, slots=True)
class ColdForm:
    """What a cold image is of, known before it is read."""

    identity: bytes
    """32 bytes: a digest over model, geometry, layout and rank."""
    num_bytes: int
    chunk_bytes: int
    checksum: Checksum

    @property
    def num_chunks(self) -> int:
        """Checksums in the file."""
        return -(-self.num_bytes // self.chunk_bytes)

    @property
    def image_offset(self) -> int:
        """Where the image begins in the file."""
        head_bytes = HEADER.size + 8 * self.num_chunks + DIGEST_BYTES
        return -(-head_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.image_offset + self.num_bytes

    def header(self) -> bytes:
        """The fixed part."""
        probe = self.checksum(memoryview(PROBE))
        return HEADER.pack(MAGIC, VERSION, self.chunk_bytes, self.num_bytes, self.identity, probe)


class ColdImage:
    """The file `path`; this process is its only reader and writer for as long as this lives."""

    def __init__(self, path: Path, form: ColdForm) -> None:
        """Takes the lock beside the file and removes what a crashed writer left.

        Raises:
            ColdImageBusyError: another process has it.
            ColdImageError: the directory cannot be used.
        """
        assert len(form.identity) == IDENTITY_BYTES, "an identity is a digest of 32 bytes"
        self.path, self.form = path, form
        self._aside = path.with_name(path.name + ".part")
        try:
            self._lock_fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ColdImageError(f"{path}: its directory cannot be written ({error}): name one that can") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise ColdImageBusyError(
                f"{path}: another process has it, one at a time may: give each deployment its own directory"
            ) from error
        self._aside.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another process have it; the file stays."""
        os.close(self._lock_fd)

    def write(self, image: memoryview, checksums: tuple[int, ...], on_part: OnPart = lambda done: None) -> None:
        """Replaces the file by `image`, whose `checksums` are known; until it returns, the file is the old one.

        Raises:
            DiskFullError: before or while writing; nothing is left of it.
            ColdImageError: the disk refused.
        """
        assert len(image) == self.form.num_bytes and len(checksums) == self.form.num_chunks, "an image of this form"
        self._check_disk()
        try:
            self._write_aside(image, checksums, on_part)
            self._aside.rename(self.path)
            _sync_directory(self.path.parent)
        except BaseException as error:
            self._aside.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full() from error
            if isinstance(error, OSError) and not isinstance(error, ColdImageError):
                raise ColdImageError(f"{self.path}: not written ({error}): the image stays in memory") from error
            raise

    def read_head(self) -> tuple[int, ...]:
        """The checksums of a file that has this form and its whole length.

        Raises:
            ColdImageMissingError, TornImageError, CorruptImageError, ForeignImageError: it has not.
        """
        fd = self._open()
        try:
            return self._head(fd)
        finally:
            os.close(fd)

    def read_into(self, image: memoryview, on_part: OnPart = lambda done: None) -> tuple[int, ...]:
        """Reads the file into `image`, checking each chunk there as it comes; returns the checksums.

        Raises:
            ColdImageMissingError, TornImageError, ForeignImageError: before anything is read.
            CorruptImageError: naming the chunk; what is in `image` is worthless then.
        """
        assert len(image) == self.form.num_bytes, "an image of this form"
        return self._read_chunks(lambda begin, end: image[begin:end], on_part)

    def verify(self, on_part: OnPart = lambda done: None) -> tuple[int, ...]:
        """Reads the file for its checks alone, a chunk's memory at a time; raises as `read_into` does."""
        scratch = memoryview(bytearray(min(self.form.chunk_bytes, self.form.num_bytes)))
        return self._read_chunks(lambda begin, end: scratch[: end - begin], on_part)

    def _read_chunks(self, place: Callable[[int, int], memoryview], on_part: OnPart) -> tuple[int, ...]:
        fd = self._open()
        try:
            expected = self._head(fd)
            ranges = chunk_ranges(self.form.num_bytes, self.form.chunk_bytes)
            for index, (begin, end) in enumerate(ranges):
                chunk = place(begin, end)
                self._read_chunk(fd, chunk, begin, on_part)
                found = self.form.checksum(chunk)
                if found != expected[index]:
                    raise CorruptImageError(
                        f"{self.path}: chunk {index} of {len(expected)} has checksum {found:#x}, {expected[index]:#x} "
                        "was written: the disk lost it; delete the file and load the layout again"
                    )
            return expected
        finally:
            os.close(fd)

    def delete(self) -> None:
        """Removes the file, if there is one."""
        self.path.unlink(missing_ok=True)

    def _write_aside(self, image: memoryview, checksums: tuple[int, ...], on_part: OnPart) -> None:
        fd = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.form.file_bytes)
            for begin in range(0, len(image), IO_BYTES):
                part = image[begin : begin + IO_BYTES]
                _write_all(fd, part, self.form.image_offset + begin)
                # Written back now, so that dirty pages are bounded, and dropped, so that they are not memory in use.
                os.fdatasync(fd)
                os.posix_fadvise(fd, self.form.image_offset + begin, len(part), os.POSIX_FADV_DONTNEED)
                on_part(begin + len(part))
            _write_all(fd, memoryview(self._head_bytes(checksums)), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _head_bytes(self, checksums: tuple[int, ...]) -> bytes:
        head = self.form.header() + struct.pack(f"<{len(checksums)}Q", *checksums)
        return head + hashlib.blake2b(head, digest_size=DIGEST_BYTES).digest()

    def _head(self, fd: int) -> tuple[int, ...]:
        expected = self.form.header()
        head_bytes = HEADER.size + 8 * self.form.num_chunks + DIGEST_BYTES
        found = os.pread(fd, head_bytes, 0)
        self._check_same_form(found[: HEADER.size], expected)
        size = os.fstat(fd).st_size
        if size != self.form.file_bytes:
            raise TornImageError(
                f"{self.path}: {size} bytes, {self.form.file_bytes} expected: it was cut or appended to; delete it and "
                "load the layout again"
            )
        body, digest = found[:-DIGEST_BYTES], found[-DIGEST_BYTES:]
        if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
            raise CorruptImageError(
                f"{self.path}: its header's digest does not match: delete it and load the layout again"
            )
        return struct.unpack_from(f"<{self.form.num_chunks}Q", body, HEADER.size)

    def _check_same_form(self, found: bytes, expected: bytes) -> None:
        if len(found) < HEADER.size:
            raise TornImageError(
                f"{self.path}: {len(found)} bytes, not even a header of {HEADER.size}: delete it, load the layout again"
            )
        if found[: len(MAGIC)] != MAGIC:
            raise CorruptImageError(f"{self.path}: begins with {found[: len(MAGIC)]!r}, {MAGIC!r} expected: delete it")
        if found == expected:
            return
        fields = ("magic", "version", "bytes of a chunk", "bytes", "identity", "checksum function")
        pairs = zip(fields, HEADER.unpack(found), HEADER.unpack(expected), strict=True)
        name, got, wanted = next(pair for pair in pairs if pair[1] != pair[2])
        raise ForeignImageError(
            f"{self.path}: {name} {_shown(got)}, {_shown(wanted)} expected: it is of another model, layout or version; "
            "delete it"
        )

    def _read_chunk(self, fd: int, chunk: memoryview, begin: int, on_part: OnPart) -> None:
        done = 0
        while done < len(chunk):
            place = self.form.image_offset + begin + done
            count = os.preadv(fd, [chunk[done : done + IO_BYTES]], place)
            if count == 0:
                raise TornImageError(
                    f"{self.path}: ends at byte {begin + done} of {self.form.num_bytes}: cut while it was read"
                )
            os.posix_fadvise(fd, place, count, os.POSIX_FADV_DONTNEED)
            done += count
            on_part(begin + done)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ColdImageMissingError(f"{self.path}: there is no such file: load the layout again") from error

    def _check_disk(self) -> None:
        """Before anything is written, so that a disk that cannot hold the image is not filled up to its last byte."""
        if _free_bytes(self.path.parent) < self.form.file_bytes:
            raise self._disk_full()

    def _disk_full(self) -> DiskFullError:
        return DiskFullError(
            f"{self.path}: {self.form.file_bytes} bytes are to be written, {_free_bytes(self.path.parent)} are free on "
            "its disk: the image stays in memory; free space or name another directory"
        )


def _free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
