"""The memory corridor: a floor of free memory that must hold at every moment, boot included.

Sampled ten times a second at boot and while any rank moves, once a second when all have been quiet for a second: an
idle mesh takes nothing, what a first step after a pause takes stays taken, and a neighbour is seen a second late.
A sample costs 0.05 ms with warm caches and 0.5 ms on a machine that is busy with other things: about 0.05 % of a core
while idle, where the whole mesh has 2 %. What binds is the largest prefill chunk, not decode.

Never frees anything: it says when, in which layout and in which step the floor was broken. A breach stands until free
memory is back above the floor by a margin, so that one that flickers is one verdict.
"""

import time
from collections.abc import Iterable, Sequence

import anyio

from services.core.ids import LayoutKind
from services.core.ring import RingRecord
from services.mesh.host_memory import HostMemoryReader
from services.sentinel.diagnose import Verdict, VerdictKind
from services.sentinel.memory_ring import MemoryRing, MemorySample
from services.sentinel.rings import RingReader

SAMPLE_EVERY_S = 0.1
IDLE_EVERY_S = 1.0
QUIET_SAMPLES = 10
"""Samples in a row that find no rank further: a second; then the mesh is idle."""
RECOVERY_MARGIN = 1.1
"""Of the floor: above it a breach is over."""
MIB = 2**20


class Corridor:
    """The decision alone: samples in, at most one standing verdict."""

    def __init__(self, floor_bytes: int, first_layout: LayoutKind) -> None:
        """`first_layout`: of every generation's first epoch; 0 bytes: no floor."""
        self._floor, self._first = floor_bytes, first_layout
        self.standing: Verdict | None = None
        self._untold: Verdict | None = None
        self.lowest: MemorySample | None = None
        """Since the start."""

    def on_sample(self, sample: MemorySample) -> None:
        """Opens, keeps or ends a breach."""
        if self.lowest is None or sample.left_bytes < self.lowest.left_bytes:
            self.lowest = sample
        if self.standing is None and sample.left_bytes < self._floor:
            self.standing = self._untold = self._breach(sample)
        elif self.standing is not None and sample.left_bytes >= self._floor * RECOVERY_MARGIN:
            self.standing = None

    def tell(self) -> Verdict | None:
        """The breach that stands; or one that came and went since the last call: none goes unsaid."""
        told, self._untold = self.standing or self._untold, None
        return told

    def _breach(self, sample: MemorySample) -> Verdict:
        operation = "boot" if sample.kind is None else sample.kind.name.lower().replace("_", " ")
        where = (
            "before any rank had begun"
            if sample.kind is None
            else f"in layout {self._layout(sample.epoch).value} (epoch {sample.epoch}), step {sample.sequence}, "
            f"rank {sample.rank} in {operation}"
        )
        return Verdict(
            kind=VerdictKind.CORRIDOR,
            rank=None,
            epoch=sample.epoch,
            sequence=sample.sequence,
            last_operation=operation,
            statement=(
                f"{sample.left_bytes // MIB} MiB of memory are free, the floor is {self._floor // MIB} MiB "
                f"(group.free_floor_bytes), {where}: lower scheduler.chunk_tokens and max_batch_rows or the pool, or "
                "end what else takes memory here; `flipmesh budget` lists the terms"
            ),
            age_ns=0,
        )

    def _layout(self, epoch: int) -> LayoutKind:
        """Every flip goes to the other layout and adds one to the epoch, which begins at 1."""
        return self._first if epoch % 2 else self._first.other


class Pace:
    """How long until the next sample."""

    def __init__(self) -> None:
        self._last: tuple[int, int, object] | None = None
        self._num_quiet = 0

    def after(self, sample: MemorySample) -> float:
        """Seconds; short while ranks move and while there is none, which is boot."""
        where = (sample.epoch, sample.sequence, sample.kind)
        is_quiet = sample.kind is not None and where == self._last
        self._last, self._num_quiet = where, self._num_quiet + 1 if is_quiet else 0
        return IDLE_EVERY_S if self._num_quiet >= QUIET_SAMPLES else SAMPLE_EVERY_S


class CorridorWatch:
    """The corridor over this host: reads, records, decides."""

    def __init__(
        self, corridor: Corridor, ring: MemoryRing, readers: Sequence[RingReader], memory: HostMemoryReader
    ) -> None:
        self.corridor = corridor
        self._ring, self._readers, self._memory = ring, readers, memory

    async def watch(self) -> None:
        """Samples until cancelled."""
        pace = Pace()
        while True:
            delay_s = pace.after(self.sample(time.monotonic_ns()))
            await anyio.sleep(delay_s)

    def sample(self, now_ns: int) -> MemorySample:
        """One sample, recorded before it is judged."""
        newest = ((reader.rank, record) for reader in self._readers if (record := reader.newest()) is not None)
        sample = sample_of(now_ns, self._memory.read().left_bytes, newest)
        self._ring.write(sample)
        self.corridor.on_sample(sample)
        return sample


def sample_of(now_ns: int, left_bytes: int, newest: Iterable[tuple[int, RingRecord]]) -> MemorySample:
    """With the step of the rank that entered something last."""
    last = max(newest, key=lambda pair: pair[1].time_ns, default=None)
    if last is None:
        return MemorySample(now_ns, left_bytes)
    rank, record = last
    return MemorySample(now_ns, left_bytes, record.sequence, record.epoch, record.kind, rank)
