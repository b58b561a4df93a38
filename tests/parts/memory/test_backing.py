"""Ranges of real memory: what is backed, what is returned, what is refused, and who sees it."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.worker.memory.pages import host_pages
from services.worker.memory.pages.backing import Backing, BackingError, MissingMemoryError, whole_pieces
from services.worker.memory.pages.host_pages import HostPages
from tests.support.memory_stand import MIB, PIECE, Device, plenty, shared_memory_bytes, small_disk


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 1 MiB, where this process may mount one."""
    with small_disk(tmp_path):
        yield tmp_path


def test_a_view_keeps_its_address_and_fresh_pages_are_zero() -> None:
    backing = Backing("pool", HostPages("pool", 4 * PIECE, piece_bytes=PIECE), plenty, 0)
    view = backing.tensor(torch.float32, (16, 64), offset_bytes=PIECE)
    address = view.data_ptr()
    assert address == backing.address + PIECE
    for _ in range(3):
        assert backing.back(PIECE, 2 * PIECE) == PIECE
        assert view.count_nonzero() == 0
        view.fill_(7.5)
        assert backing.tensor(torch.float32, (16, 64), PIECE).sum() == 7.5 * 16 * 64
        assert backing.release(PIECE, 2 * PIECE) == PIECE
        assert view.data_ptr() == address


def test_memory_returns_to_the_system() -> None:
    num_bytes = 32 * MIB
    backing = Backing("pool", HostPages("pool", num_bytes), plenty, 0)
    before = shared_memory_bytes()
    assert backing.held_bytes() == 0
    backing.back(0, num_bytes)
    backing.flat.fill_(1)
    assert backing.held_bytes() == backing.backed_bytes == num_bytes
    assert shared_memory_bytes() - before >= num_bytes
    backing.release(8 * MIB, 24 * MIB)
    assert backing.held_bytes() == backing.backed_bytes == num_bytes // 2
    assert shared_memory_bytes() - before < num_bytes // 2 + MIB
    backing.close()
    assert shared_memory_bytes() - before < MIB


def test_backing_and_releasing_count_only_what_changes() -> None:
    backing = Backing("arena", HostPages("arena", 8 * PIECE, piece_bytes=PIECE), plenty, 0)
    backing.back(2 * PIECE, 4 * PIECE)
    backing.flat[2 * PIECE : 4 * PIECE].fill_(9)
    assert backing.missing_bytes(0, 8 * PIECE) == 6 * PIECE
    assert backing.back(PIECE, 6 * PIECE) == 3 * PIECE
    assert backing.flat[2 * PIECE : 4 * PIECE].eq(9).all(), "what had memory keeps its content"
    assert backing.is_backed(PIECE + 1, 6 * PIECE) and not backing.is_backed(PIECE - 1, PIECE + 1)
    assert backing.is_backed(PIECE, PIECE) and not backing.is_backed(0, 8 * PIECE)
    assert backing.release(0, 3 * PIECE) == 2 * PIECE
    assert backing.backed_bytes == backing.held_bytes() == 3 * PIECE
    assert backing.release(0, 3 * PIECE) == 0


def test_the_margin_is_refused_before_anything_changes() -> None:
    device = Device(10 * PIECE)
    backing = device.range("pool", 8 * PIECE, margin_bytes=4 * PIECE)
    assert backing.back(0, 6 * PIECE) == 6 * PIECE, "exactly the margin stays free"
    with pytest.raises(
        MissingMemoryError, match=rf"{PIECE} bytes .* {4 * PIECE} to stay free, {4 * PIECE} are"
    ) as error:
        backing.back(0, 7 * PIECE)
    assert (error.value.needed_bytes, error.value.free_bytes) == (PIECE, 4 * PIECE)
    assert backing.held_bytes() == backing.backed_bytes == 6 * PIECE
    device.others_bytes = 4 * PIECE
    assert backing.back(0, 6 * PIECE) == 0, "nothing new is asked for, so nothing can be missing"


@pytest.mark.parametrize("step_bytes", [PIECE, host_pages.PROVIDE_STEP_BYTES])
def test_a_full_system_changes_nothing(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> None:
    """Free memory was counted wrongly: the system itself refuses, in the middle of the second run."""
    monkeypatch.setattr(host_pages, "PROVIDE_STEP_BYTES", step_bytes)
    fd = os.open(tiny_disk / "pool", os.O_RDWR | os.O_CREAT, 0o600)
    backing = Backing("pool", HostPages("pool", 2 * MIB, fd, PIECE), plenty, 0)
    os.close(fd)
    backing.back(4 * PIECE, 5 * PIECE)
    backing.flat[4 * PIECE : 5 * PIECE].fill_(3)
    with pytest.raises(MissingMemoryError, match="No space left on device"):
        backing.back(0, 2 * MIB)
    assert backing.backed_bytes == backing.held_bytes() == PIECE
    assert backing.flat[4 * PIECE : 5 * PIECE].eq(3).all()
    assert backing.back(0, 12 * PIECE) == 11 * PIECE, "what was undone can be had again"


def test_a_hole_is_seen_through_another_mapping() -> None:
    fd = os.memfd_create("peer")
    pages = HostPages("pool", 2 * PIECE, fd, PIECE)
    backing = Backing("pool", pages, plenty, 0)
    backing.back(0, 2 * PIECE)
    backing.flat.fill_(5)
    with mmap.mmap(fd, 2 * PIECE, mmap.MAP_SHARED, mmap.PROT_READ) as peer:
        assert peer[:] == b"\5" * (2 * PIECE)
        backing.release(0, PIECE)
        assert backing.held_bytes() == PIECE
        assert peer[:PIECE] == bytes(PIECE) and peer[PIECE:] == b"\5" * PIECE
    os.close(fd)


def test_an_inherited_descriptor_begins_empty() -> None:
    fd = os.memfd_create("kept")
    os.write(fd, b"\7" * PIECE)
    backing = Backing("pool", HostPages("pool", PIECE, fd, PIECE), plenty, 0)
    assert backing.held_bytes() == 0
    backing.back(0, PIECE)
    assert backing.flat.count_nonzero() == 0
    os.close(fd)
    assert backing.held_bytes() == PIECE, "it has a descriptor of its own"


TOUCH = """
import torch
from services.worker.memory.pages.backing import Backing
from services.worker.memory.pages.host_pages import HostPages
backing = Backing("pool", HostPages("pool", 1 << 20, piece_bytes=1 << 16), lambda: 1 << 40, 0)
backing.back(0, 1 << 20)
view = backing.tensor(torch.uint8, (1 << 20,))
backing.release(1 << 16, 1 << 17)
assert view[0] == 0 and view[1 << 17] == 0
print("alive", flush=True)
int(view[1 << 16])
print("survived", flush=True)
"""


def test_released_memory_is_neither_read_nor_grown_in_silence() -> None:
    result = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, check=False)
    assert result.stdout == "alive\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


def test_ranges_that_make_no_sense_are_refused_with_numbers() -> None:
    backing = Backing("pool", HostPages("pool", 3 * PIECE - 5, piece_bytes=PIECE), plenty, 0)
    assert backing.num_bytes == 3 * PIECE, "whole pieces"
    with pytest.raises(BackingError, match=f"not whole pieces of {PIECE}"):
        backing.back(0, PIECE + 1)
    with pytest.raises(BackingError, match=f"not within its {3 * PIECE}"):
        backing.release(0, 4 * PIECE)
    with pytest.raises(BackingError, match="not within"):
        backing.tensor(torch.float32, (PIECE,))
    with pytest.raises(BackingError, match="cannot begin at byte 2"):
        backing.tensor(torch.float32, (1,), 2)
    with pytest.raises(BackingError, match="not whole pages"):
        HostPages("pool", PIECE, piece_bytes=1000)
    with pytest.raises(BackingError, match="addresses cannot be reserved"):
        HostPages("pool", 1 << 60)
    assert backing.backed_bytes == 0
    assert [whole_pieces(count, 10) for count in (0, 1, 10, 11)] == [10, 10, 10, 20]


def test_a_view_outlives_its_range() -> None:
    """The addresses stay reserved while a view lives, so a stale one can never see another's memory."""
    backing = Backing("pool", HostPages("pool", PIECE, piece_bytes=PIECE), plenty, 0)
    view, address = backing.tensor(torch.uint8, (PIECE,)), backing.address
    backing.close()
    backing.close()
    del backing
    other = Backing("pool", HostPages("pool", PIECE, piece_bytes=PIECE), plenty, 0)
    assert view.data_ptr() == address != other.address
