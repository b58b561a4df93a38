"""Cold images on a real disk: whole or absent, whatever happens; and everything about a file is checked."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.memory.images.background import Background, CancelledError
from services.worker.memory.images.cold_image import (
    IO_BYTES,
    ColdForm,
    ColdImage,
    ColdImageBusyError,
    ColdImageError,
    ColdImageMissingError,
    CorruptImageError,
    DiskFullError,
    ForeignImageError,
    TornImageError,
)
from tests.support.memory_stand import checksum, random_bytes, small_disk

CHUNK = 64 << 10
NUM_BYTES = 3 * CHUNK + 1000
FORM = ColdForm(bytes(range(32)), NUM_BYTES, CHUNK, checksum)
IMAGE = random_bytes(NUM_BYTES, 1).numpy().data


def sums(image: memoryview, chunk_bytes: int = CHUNK) -> tuple[int, ...]:
    return tuple(checksum(image[begin : begin + chunk_bytes]) for begin in range(0, len(image), chunk_bytes))


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdImage]:
    image = ColdImage(tmp_path / "pp-rank0.cold", FORM)
    yield image
    image.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 1 MiB, where this process may mount one."""
    with small_disk(tmp_path):
        yield tmp_path


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_was_written_is_read(cold: ColdImage) -> None:
    parts: list[int] = []
    cold.write(IMAGE, sums(IMAGE), parts.append)
    assert parts == [NUM_BYTES]
    assert cold.path.stat().st_size == FORM.file_bytes and FORM.image_offset % 4096 == 0
    into = memoryview(bytearray(NUM_BYTES))
    parts.clear()
    assert cold.read_into(into, parts.append) == sums(IMAGE) == cold.read_head() == cold.verify()
    assert into == IMAGE and parts == [CHUNK, 2 * CHUNK, 3 * CHUNK, NUM_BYTES]
    assert names(cold.path.parent) == {"pp-rank0.cold", "pp-rank0.cold.lock"}


def test_parts_are_bounded(tmp_path: Path) -> None:
    num_bytes = 2 * IO_BYTES + 5
    cold = ColdImage(tmp_path / "big", ColdForm(bytes(32), num_bytes, num_bytes, checksum))
    image = random_bytes(num_bytes, 2).numpy().data
    written: list[int] = []
    read: list[int] = []
    cold.write(image, (checksum(image),), written.append)
    cold.verify(read.append)
    assert written == read == [IO_BYTES, 2 * IO_BYTES, num_bytes]
    cold.close()


def test_a_new_image_replaces_the_old_one_whole(cold: ColdImage) -> None:
    cold.write(IMAGE, sums(IMAGE))
    other = random_bytes(NUM_BYTES, 9).numpy().data
    into = memoryview(bytearray(NUM_BYTES))

    def look(done_bytes: int) -> None:
        assert cold.read_into(into) == sums(IMAGE) and into == IMAGE, "until it is whole, the old one is there"

    cold.write(other, sums(other), look)
    assert cold.read_into(into) == sums(other) and into == other


def test_an_image_of_no_bytes(tmp_path: Path) -> None:
    cold = ColdImage(tmp_path / "empty", ColdForm(bytes(32), 0, CHUNK, checksum))
    cold.write(memoryview(b""), ())
    assert cold.read_into(memoryview(bytearray())) == ()
    cold.close()


def test_no_file_is_no_image(cold: ColdImage) -> None:
    with pytest.raises(ColdImageMissingError, match="there is no such file"):
        cold.read_into(memoryview(bytearray(NUM_BYTES)))
    cold.write(IMAGE, sums(IMAGE))
    cold.delete()
    with pytest.raises(ColdImageMissingError):
        cold.read_head()


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 4095, FORM.image_offset, FORM.file_bytes - 1, FORM.file_bytes + 1])
def test_a_torn_file_is_named(cold: ColdImage, num_bytes: int) -> None:
    cold.write(IMAGE, sums(IMAGE))
    os.truncate(cold.path, num_bytes)
    untouched = bytearray(NUM_BYTES)
    with pytest.raises(TornImageError, match=rf"{cold.path.name}: {num_bytes} bytes"):
        cold.read_into(memoryview(untouched))
    assert not any(untouched)


def test_a_file_cut_while_it_is_read(cold: ColdImage) -> None:
    cold.write(IMAGE, sums(IMAGE))
    with pytest.raises(TornImageError, match="cut while it was read"):
        cold.read_into(memoryview(bytearray(NUM_BYTES)), lambda done: os.truncate(cold.path, FORM.image_offset + 10))


def flip_a_bit(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("chunk", range(4))
def test_a_changed_byte_is_found_and_its_chunk_named(cold: ColdImage, chunk: int) -> None:
    cold.write(IMAGE, sums(IMAGE))
    flip_a_bit(cold.path, FORM.image_offset + chunk * CHUNK + 77)
    for read in (lambda: cold.read_into(memoryview(bytearray(NUM_BYTES))), cold.verify):
        with pytest.raises(CorruptImageError, match=f"chunk {chunk} of 4"):
            read()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (0, CorruptImageError),
        (8, ForeignImageError),
        (12, ForeignImageError),
        (16, ForeignImageError),
        (24, ForeignImageError),
        (56, ForeignImageError),
        (64, CorruptImageError),
        (64 + 31, CorruptImageError),
        (64 + 32 + 15, CorruptImageError),
    ],
)
def test_a_changed_header_is_found(cold: ColdImage, place: int, error: type[ColdImageError]) -> None:
    cold.write(IMAGE, sums(IMAGE))
    flip_a_bit(cold.path, place)
    with pytest.raises(error, match=r"pp-rank0\.cold"):
        cold.read_head()


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (ColdForm(bytes(32), NUM_BYTES, CHUNK, checksum), "identity"),
        (ColdForm(FORM.identity, NUM_BYTES + 1, CHUNK, checksum), f"bytes {NUM_BYTES}, {NUM_BYTES + 1} expected"),
        (ColdForm(FORM.identity, NUM_BYTES, CHUNK // 2, checksum), "bytes of a chunk"),
        (ColdForm(FORM.identity, NUM_BYTES, CHUNK, lambda view: sum(view)), "checksum function"),
    ],
)
def test_a_file_of_something_else_is_not_believed(cold: ColdImage, form: ColdForm, what: str) -> None:
    cold.write(IMAGE, sums(IMAGE))
    cold.close()
    other = ColdImage(cold.path, form)
    with pytest.raises(ForeignImageError, match=what):
        other.read_into(memoryview(bytearray(form.num_bytes)))
    cold._lock_fd = other._lock_fd


def test_one_process_at_a_time(cold: ColdImage) -> None:
    with pytest.raises(ColdImageBusyError, match="another process has it"):
        ColdImage(cold.path, FORM)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ColdImageError, match="cannot be written"):
        ColdImage(tmp_path / "absent" / "pp.cold", FORM)


def test_a_disk_that_is_too_small_is_refused_before_a_byte(tiny_disk: Path) -> None:
    form = ColdForm(bytes(32), 2 << 20, CHUNK, checksum)
    cold = ColdImage(tiny_disk / "pp.cold", form)
    image = random_bytes(form.num_bytes, 3).numpy().data
    with pytest.raises(DiskFullError, match=rf"{form.file_bytes} bytes are to be written, \d+ are free"):
        cold.write(image, sums(image))
    assert names(tiny_disk) == {"pp.cold.lock"}
    cold.close()


def test_a_disk_that_fills_up_meanwhile_keeps_the_old_file_and_no_part(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = ColdForm(bytes(32), 768 << 10, CHUNK, checksum)
    cold = ColdImage(tiny_disk / "pp.cold", form)
    image = random_bytes(form.num_bytes, 3).numpy().data
    monkeypatch.setattr(ColdImage, "_check_disk", lambda self: None)
    cold.write(image, sums(image))
    other = random_bytes(form.num_bytes, 4).numpy().data
    with pytest.raises(DiskFullError, match="the image stays in memory"):
        cold.write(other, sums(other))
    assert names(tiny_disk) == {"pp.cold", "pp.cold.lock"}
    assert cold.verify() == sums(image)
    cold.close()


WRITER = """
import sys, zlib
from pathlib import Path
from services.worker.memory.images import cold_image

image = memoryview(b"half of this is written" * 9000)
form = cold_image.ColdForm(bytes(range(32)), len(image), len(image), zlib.crc32)
cold_image.IO_BYTES = 32 << 10
cold = cold_image.ColdImage(Path(sys.argv[1]), form)

def stop_in_the_middle(done_bytes):
    if done_bytes > len(image) // 2:
        print("in the middle", flush=True)
        sys.stdin.read()

cold.write(image, (zlib.crc32(image),), stop_in_the_middle)
"""


@pytest.mark.parametrize("has_old", [False, True])
def test_a_writer_killed_in_the_middle_leaves_the_old_file_or_none(tmp_path: Path, has_old: bool) -> None:
    path = tmp_path / "pp.cold"
    old = random_bytes(NUM_BYTES, 11).numpy().data
    if has_old:
        first = ColdImage(path, FORM)
        first.write(old, sums(old))
        first.close()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None and writer.stdout.readline() == "in the middle\n"
        with pytest.raises(ColdImageBusyError):
            ColdImage(path, FORM)
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
    assert "pp.cold.part" in names(tmp_path), "it was killed with the file half written"
    cold = ColdImage(path, FORM)
    assert "pp.cold.part" not in names(tmp_path)
    if has_old:
        assert cold.verify() == sums(old)
    else:
        with pytest.raises(ColdImageMissingError):
            cold.read_head()
    cold.write(IMAGE, sums(IMAGE))
    assert cold.verify() == sums(IMAGE)
    cold.close()


def test_work_that_is_cancelled_leaves_no_part(cold: ColdImage) -> None:
    def work(check: object) -> None:
        def cancelled(done_bytes: int) -> None:
            raise CancelledError

        cold.write(IMAGE, sums(IMAGE), cancelled)

    background = Background("write", work)
    assert background.wait(60) and isinstance(background.error, CancelledError)
    assert names(cold.path.parent) == {"pp-rank0.cold.lock"}
