"""Rings written and read back, and each verdict shown to fire and to stay quiet."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from services.core.ids import Rank
from services.core.ring import CAPACITY, PARTNERED, RING_BYTES, RecordKind, RingRecord, read_tail, unpack_header
from services.mesh.settings.paths import write_atomically
from services.sentinel.diagnose import NS, ProcessState, RankView, VerdictKind, diagnose, peer_statement
from services.sentinel.memory_ring import FILE_BYTES, MemoryRing
from services.sentinel.rings import RingReader
from services.worker.ring import RingWriter

K = RecordKind
STALL = 5 * NS
NOW = 100 * NS


def record(kind: RecordKind, sequence: int, *, at_s: float = 99.9, chain: int = 1, key: int = 0) -> RingRecord:
    return RingRecord(sequence, int(at_s * NS), kind, key, sequence, 1, 0, chain)


def view(rank: int, *tail: RingRecord, process: ProcessState = ProcessState.RUNNING) -> RankView:
    return RankView(rank, process, tail)


def kinds(*ranks: RankView) -> list[tuple[VerdictKind, int | None]]:
    return [(verdict.kind, verdict.rank) for verdict in diagnose(list(ranks), NOW, STALL)]


def test_a_ring_is_read_as_written_and_outlives_its_writer(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", Rank(3))
    for sequence in range(1, 6):
        writer.write(K.STEP_BEGAN, sequence, 1, digest=sequence)
        writer.write(K.LAYERS_ENTERED, sequence, 1, payload=7)
    writer.close()
    buffer = (tmp_path / "ring").read_bytes()
    header = unpack_header(buffer)
    assert (header.rank, header.pid) == (3, os.getpid())
    tail = read_tail(buffer, 4)
    assert [(entry.kind, entry.sequence) for entry in tail] == [
        (K.STEP_BEGAN, 4),
        (K.LAYERS_ENTERED, 4),
        (K.STEP_BEGAN, 5),
        (K.LAYERS_ENTERED, 5),
    ]
    assert tail[0].chain == tail[1].chain != tail[2].chain


def test_a_ring_owns_its_bytes_before_it_is_mapped(tmp_path: Path) -> None:
    """A hole in it would be SIGBUS for the rank, at its next operation on a full disk."""
    RingWriter(tmp_path / "worker.ring", Rank(0)).close()
    MemoryRing(tmp_path / "memory.ring", "boot").close()
    for name, num_bytes in (("worker.ring", RING_BYTES), ("memory.ring", FILE_BYTES)):
        assert (tmp_path / name).stat().st_blocks * 512 >= num_bytes


def test_a_ring_without_room_is_an_error_at_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            RingWriter(tmp_path / "worker.ring", Rank(0))
        with pytest.raises(OSError, match="File too large"):
            write_atomically(tmp_path / "record.json", "x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_ring_wraps_and_keeps_the_newest(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", Rank(0))
    for sequence in range(CAPACITY + 10):
        writer.write(K.STEP_ENDED, sequence, 1)
    tail = read_tail((tmp_path / "ring").read_bytes(), 10**6)
    assert [entry.sequence for entry in tail] == list(range(11, CAPACITY + 10))


def test_equal_logs_give_equal_chains_and_sizes_do_not_matter(tmp_path: Path) -> None:
    chains = []
    for rank in range(2):
        writer = RingWriter(tmp_path / f"ring{rank}", Rank(rank))
        writer.write(K.STEP_BEGAN, 1, 1, digest=42, payload=rank)
        writer.write(K.HIDDEN_SENT, 1, 1, key=rank)
        chains.append(read_tail((tmp_path / f"ring{rank}").read_bytes(), 1)[0].chain)
    assert chains[0] == chains[1]


def test_a_reader_follows_a_rank_into_its_next_life(tmp_path: Path) -> None:
    reader = RingReader(tmp_path / "ring", 0)
    assert reader.view() is None
    RingWriter(tmp_path / "ring", Rank(0)).write(K.STEP_BEGAN, 8, 1)
    first = reader.view()
    RingWriter(tmp_path / "ring", Rank(0)).write(K.STEP_BEGAN, 1, 1)
    second = reader.view()
    assert first is not None
    assert second is not None
    assert first.last is not None
    assert second.last is not None
    assert (first.last.sequence, second.last.sequence) == (8, 1)
    assert second.process is ProcessState.RUNNING


@pytest.mark.parametrize("size", [0, RING_BYTES - 1])
def test_a_short_file_is_no_ring(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        unpack_header(bytes(size))


def test_a_foreign_file_is_no_ring() -> None:
    with pytest.raises(ValueError, match="version"):
        unpack_header(bytes(RING_BYTES))


def test_an_idle_group_and_a_busy_group_are_well() -> None:
    old = record(K.STEP_ENDED, 9, at_s=1.0)
    assert kinds(view(0, old), view(1, old)) == []
    parked = record(K.PARKED, 9, at_s=1.0)
    assert kinds(view(0, parked), view(1, parked)) == []
    assert kinds(view(0, record(K.LAYERS_ENTERED, 9)), view(1, record(K.HIDDEN_AWAITED, 9))) == []


def test_one_rank_behind_is_a_stall_and_is_named() -> None:
    waiting = record(K.LAYERS_ENTERED, 10, at_s=90.0)
    behind = record(K.SAMPLING, 9, at_s=89.0)
    found = diagnose([view(0, waiting), view(1, behind), view(2, record(K.STEP_ENDED, 10))], NOW, STALL)
    assert [(verdict.kind, verdict.rank, verdict.sequence) for verdict in found] == [(VerdictKind.STALL, 1, 9)]
    assert "in sampling for 11.0 s" in found[0].statement


def test_all_inside_work_is_a_freeze_without_a_culprit() -> None:
    stuck = record(K.HIDDEN_AWAITED, 9, at_s=80.0, key=1)
    assert kinds(view(0, stuck), view(1, replace(stuck, key=0))) == [(VerdictKind.FREEZE, None)]
    just_inside = record(K.HIDDEN_AWAITED, 9, at_s=96.0)
    assert kinds(view(0, just_inside), view(1, just_inside)) == []


def test_a_dead_and_a_stopped_process_are_told_apart() -> None:
    waiting = record(K.LAYERS_ENTERED, 9, at_s=80.0)
    assert kinds(view(0, waiting), view(1, waiting, process=ProcessState.LOST)) == [(VerdictKind.LOST, 1)]
    assert kinds(view(0, waiting), view(1, waiting, process=ProcessState.STOPPED)) == [(VerdictKind.STOPPED, 1)]


def test_the_first_divergence_is_found_and_the_minority_named() -> None:
    good = [record(K.STEP_BEGAN, sequence, chain=sequence) for sequence in range(1, 6)]
    bad = [replace(entry, chain=entry.chain + 100) if entry.sequence >= 4 else entry for entry in good]
    found = diagnose([view(0, *good), view(1, *bad), view(2, *good)], NOW, STALL)
    assert [(verdict.kind, verdict.rank, verdict.sequence) for verdict in found] == [(VerdictKind.DIVERGENCE, 1, 4)]
    assert kinds(view(0, *good), view(1, *bad)) == [(VerdictKind.DIVERGENCE, None)]
    assert kinds(view(0, *good), view(1, *good[:3])) == []


def test_chains_of_different_epochs_are_not_compared() -> None:
    one = record(K.STEP_BEGAN, 4, chain=1)
    other = replace(record(K.STEP_BEGAN, 4, chain=2), epoch=2)
    assert kinds(view(0, one), view(1, other)) == []


@pytest.mark.parametrize("kind", RecordKind, ids=lambda kind: kind.name)
def test_every_kind_of_record_is_said_with_its_peer(kind: RecordKind) -> None:
    """As a rank writes it: HIDDEN_AWAITED with the rank before, HIDDEN_SENT with the one after."""
    said = peer_statement([view(1, record(kind, 9, key=2))], NOW)
    assert kind.name.lower().replace("_", " ") in said
    assert ("(rank 2)" in said) is (kind in PARTNERED)
