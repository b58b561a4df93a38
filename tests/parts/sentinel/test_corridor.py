"""The memory corridor: breaches found and named, quiet where there is none; samples that outlive their writer."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flipmesh.common.v1.introspection_pb2 import GetStatusResponse
from flipmesh.sentinel.v1.sentinel_service_pb2 import VERDICT_KIND_CORRIDOR

from services.core.ids import LayoutKind, Rank
from services.core.ring import RecordKind, RingRecord
from services.mesh.host_memory import HostMemoryReader
from services.mesh.logs.files import PatientOutput
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log
from services.mesh.telemetry.metrics import Metrics
from services.sentinel.corridor import (
    IDLE_EVERY_S,
    MIB,
    QUIET_SAMPLES,
    SAMPLE_EVERY_S,
    Corridor,
    CorridorWatch,
    Pace,
    sample_of,
)
from services.sentinel.diagnose import VerdictKind
from services.sentinel.memory_ring import CAPACITY, FILE_BYTES, MemoryRing, MemorySample, read_samples
from services.sentinel.rings import RingReader
from services.sentinel.server import Sentinel, verdict_to_proto
from services.worker.ring import RingWriter

FLOOR = 100 * MIB
BOOT = "0f0e0d0c-0000-4000-8000-000000000001"


def sample(left_mib: float, *, epoch: int = 1, kind: RecordKind | None = RecordKind.LAYERS_ENTERED) -> MemorySample:
    return MemorySample(5, int(left_mib * MIB), 42, epoch, kind, rank=1)


def test_free_memory_at_the_floor_is_well() -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    for left in (500, 100, 101, 100):
        corridor.on_sample(sample(left))
    assert corridor.standing is None
    assert corridor.lowest == sample(100)


@pytest.mark.parametrize(("epoch", "layout"), [(1, "tp"), (2, "pp"), (3, "tp")])
def test_a_breach_names_layout_step_and_remedy(epoch: int, layout: str) -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    corridor.on_sample(sample(99, epoch=epoch))
    found = corridor.standing
    assert found is not None and found.kind is VerdictKind.CORRIDOR
    assert (found.epoch, found.sequence, found.last_operation) == (epoch, 42, "layers entered")
    parts = ["99 MiB", "100 MiB", f"layout {layout} (epoch {epoch}), step 42", "rank 1", "chunk_tokens"]
    assert [part for part in parts if part not in found.statement] == []


def test_boot_counts_as_well() -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    corridor.on_sample(MemorySample(5, 1))
    assert corridor.standing is not None and "before any rank had begun" in corridor.standing.statement


def test_a_breach_that_flickers_is_one_and_ends_above_the_margin() -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    corridor.on_sample(sample(90))
    first = corridor.standing
    for left in (105, 95, 109, 80):
        corridor.on_sample(sample(left))
        assert corridor.standing is first
    corridor.on_sample(sample(111))
    assert corridor.standing is None
    corridor.on_sample(sample(90))
    assert corridor.standing is not None and corridor.standing is not first


def test_a_breach_between_two_looks_is_told_once() -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    assert corridor.tell() is None
    corridor.on_sample(sample(90))
    corridor.on_sample(sample(200))
    told = corridor.tell()
    assert told is not None and corridor.standing is None
    assert corridor.tell() is None
    corridor.on_sample(sample(90))
    assert corridor.tell() is corridor.tell() is corridor.standing


async def test_the_sentinel_says_it_once_and_lists_it_while_it_stands(tmp_path: Path) -> None:
    corridor = Corridor(FLOOR, LayoutKind.TP)
    with (tmp_path / "out").open("wb") as output:
        log = Log("sentinel", Level.INFO, None, PatientOutput(output.fileno()))
        sentinel = Sentinel([tmp_path / "absent.ring"], 5.0, log, Metrics(), corridor)
        assert sentinel.look(1) == []
        corridor.on_sample(sample(90))
        for now_ns in (2, 3):
            (verdict,) = sentinel.look(now_ns)
            assert verdict.kind is VerdictKind.CORRIDOR
        status = GetStatusResponse()
        sentinel.fill_status(status)
        assert status.sentinel.num_verdicts_total == 1 and "floor is 100 MiB" in status.sentinel.last_verdict
        assert verdict_to_proto(verdict).kind == VERDICT_KIND_CORRIDOR
        corridor.on_sample(sample(200))
        assert sentinel.look(4) == []
        log.close()
    assert (tmp_path / "out").read_text().count("verdict kind=corridor") == 1


def test_samples_are_rare_only_once_every_rank_is_quiet() -> None:
    pace = Pace()
    assert {pace.after(MemorySample(5, 1)) for _ in range(50)} == {SAMPLE_EVERY_S}, "boot: no rank has begun"
    assert [pace.after(sample(9)) for _ in range(QUIET_SAMPLES)] == [SAMPLE_EVERY_S] * QUIET_SAMPLES
    assert [pace.after(sample(left)) for left in (9, 1)] == [IDLE_EVERY_S] * 2
    assert pace.after(sample(9, epoch=2)) == SAMPLE_EVERY_S


def test_no_floor_is_never_broken() -> None:
    corridor = Corridor(0, LayoutKind.TP)
    corridor.on_sample(sample(0))
    assert corridor.standing is None


def test_a_sample_names_the_rank_that_moved_last() -> None:
    def record(time_ns: int, sequence: int) -> RingRecord:
        return RingRecord(0, time_ns, RecordKind.SAMPLING, 0, sequence, 3, 0, 0)

    found = sample_of(9, 77, [(0, record(5, 10)), (1, record(6, 9))])
    assert found == MemorySample(9, 77, 9, 3, RecordKind.SAMPLING, 1)
    assert sample_of(9, 77, []) == MemorySample(9, 77)


def test_samples_wrap_and_keep_the_newest(tmp_path: Path) -> None:
    ring = MemoryRing(tmp_path / "memory.ring", BOOT)
    for count in range(CAPACITY + 5):
        ring.write(MemorySample(count, count))
    ring.close()
    raw = (tmp_path / "memory.ring").read_bytes()
    assert len(raw) == FILE_BYTES
    found = read_samples(raw, 10**9)
    assert [found[0].time_ns, found[-1].time_ns, len(found)] == [6, CAPACITY + 4, CAPACITY - 1]


def test_a_killed_writer_loses_nothing_and_its_successor_goes_on(tmp_path: Path) -> None:
    """What an out-of-memory kill does: SIGKILL right after a sample."""
    path = tmp_path / "memory.ring"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from services.sentinel.memory_ring import MemoryRing, MemorySample\n"
        "ring = MemoryRing(Path(sys.argv[1]), sys.argv[2])\n"
        "[ring.write(MemorySample(n, n * 10)) for n in range(3)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path), BOOT], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [found.left_bytes for found in read_samples(path.read_bytes(), 10)] == [0, 10, 20]
    ring = MemoryRing(path, BOOT)
    ring.write(sample(7))
    assert [found.left_bytes for found in read_samples(path.read_bytes(), 2)] == [20, 7 * MIB]
    assert read_samples(path.read_bytes(), 1) == [sample(7)]


def test_another_boot_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "memory.ring"
    MemoryRing(path, BOOT).write(sample(7))
    MemoryRing(path, BOOT.replace("1", "2"))
    assert read_samples(path.read_bytes(), 10) == []


@pytest.mark.parametrize("raw", [b"", bytes(FILE_BYTES)])
def test_another_file_is_no_samples(raw: bytes) -> None:
    with pytest.raises(ValueError, match="expected; this is another file"):
        read_samples(raw, 1)


def test_the_watch_reads_this_host_and_a_living_ranks_ring(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "worker-0.ring", Rank(0))
    writer.write(RecordKind.LAYERS_ENTERED, 8, 2)
    readers = [RingReader(tmp_path / f"worker-{rank}.ring", rank) for rank in (0, 1)]
    # More than any host has: always broken.
    corridor = Corridor(2**60, LayoutKind.PP)
    watch = CorridorWatch(corridor, MemoryRing(tmp_path / "memory.ring", BOOT), readers, HostMemoryReader())
    taken = watch.sample(1234)
    assert (taken.sequence, taken.epoch, taken.kind, taken.rank) == (8, 2, RecordKind.LAYERS_ENTERED, 0)
    assert read_samples((tmp_path / "memory.ring").read_bytes(), 5) == [taken]
    assert corridor.standing is not None and "layout tp (epoch 2), step 8" in corridor.standing.statement


def test_a_dead_ranks_ring_names_no_step(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from services.core.ids import Rank\n"
        "from services.core.ring import RecordKind; from services.worker.ring import RingWriter\n"
        "RingWriter(Path(sys.argv[1]), Rank(0)).write(RecordKind.STEP_BEGAN, 3, 1)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "ring")], timeout=60, check=True)
    assert RingReader(tmp_path / "ring", 0).newest() is None
    RingWriter(tmp_path / "ring", Rank(0)).write(RecordKind.STEP_BEGAN, 4, 1)
    newest = RingReader(tmp_path / "ring", 0).newest()
    assert newest is not None and newest.sequence == 4
