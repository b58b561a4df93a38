"""What a mesh says and costs while it is under load: statuses, flips, memory and descriptors, sampled.

Asks passively and seldom, so that the instrument does not make the load. A process that does not answer is a sample
too. Bounded by the time it is let run; never judges.
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.errors import MeshError
from services.mesh.flip_record import layout_name, state_name
from services.mesh.rpc import unary
from tools.absence import Absence
from tools.mesh_client import CALL_S, MeshClient, NotRunningError
from tools.status import Answers, ask_all

STATUS_EVERY_S = 0.5
COSTS_EVERY_S = 4.0
"""Reading a process's memory map holds it up for a moment."""
MAX_FLIPS_ASKED = 64
"""At a time; asked for every `COSTS_EVERY_S`, so no more than the mover keeps can pass in between."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The scheduler at one instant."""

    unix_ns: int
    layout: str
    generation: int
    epoch: int
    resident: int
    queued: int
    uncomputed_prefill_tokens: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    unaccounted_blocks: int
    unsound_censuses: int


@dataclass(frozen=True, slots=True)
class CostSample:
    """One process at one instant; bytes."""

    unix_ns: int
    process: str
    pid: int
    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    """Anonymous memory, in proportion: what leaks."""
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class FlipSeen:
    """One attempt as the mover recorded it; wall-clock nanoseconds, None where it never came to that."""

    generation: int
    flip_id: int
    source: str
    target: str
    state: str
    reason: str
    armed_unix_ns: int
    pause_begin_unix_ns: int | None
    pause_end_unix_ns: int | None
    pause_ns: int | None
    longest_token_gap_ns: int | None
    num_carried: int
    num_partly_prefilled: int

    @property
    def is_committed(self) -> bool:
        """Whether it changed the layout."""
        return self.state == "committed"


@dataclass(frozen=True, slots=True)
class Span:
    """One layout from when, and why."""

    layout: str
    began_unix_ns: int
    reason: str


@dataclass(slots=True)
class Observer:
    """Everything seen so far."""

    client: MeshClient
    loads: list[LoadSample] = field(default_factory=list)
    costs: list[CostSample] = field(default_factory=list)
    free_bytes: list[tuple[int, int]] = field(default_factory=list)
    """(when, what the machine could still give)."""
    spans: dict[int, Span] = field(default_factory=dict)
    flips: dict[tuple[int, int], FlipSeen] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)
    """By process: how often it did not answer."""
    num_resubmitted: int = 0
    num_verdicts: int = 0
    """That the sentinel has given since it started."""
    last_verdict: str = ""
    num_restarts: int = 0
    """Processes that were another one than in the sample before."""
    _pids: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Samples until it is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._repeat, STATUS_EVERY_S, self.look)
            tasks.start_soon(self._repeat, COSTS_EVERY_S, self.weigh)

    async def _repeat(self, every_s: float, sample: Callable[[], Awaitable[None]]) -> None:
        while True:
            await sample()
            await anyio.sleep(every_s)

    async def look(self) -> None:
        """One sample of every process's status."""
        self.take(await ask_all(self.client), time.time_ns())

    async def weigh(self) -> None:
        """One sample of what processes cost, and the flips since the last one."""
        now_ns = time.time_ns()
        for process, pid in self._pids.items():
            with contextlib.suppress(OSError, ValueError):
                self.costs.append(cost_of(process, pid, now_ns))
        self.free_bytes.append((now_ns, free_bytes()))
        await self._ask_flips()

    def take(self, answers: Answers, now_ns: int) -> None:
        """Adds one round of answers."""
        for name, answer in answers.items():
            if isinstance(answer, Absence):
                self.unanswered[name] = self.unanswered.get(name, 0) + 1
                continue
            pid = answer.identity.pid
            self.num_restarts += self._pids.get(name, pid) != pid
            self._pids[name] = pid
            match answer.WhichOneof("service"):
                case "scheduler":
                    self._take_scheduler(answer.scheduler, now_ns)
                case "router":
                    self.num_resubmitted = answer.router.num_resubmitted_total
                case "sentinel":
                    self.num_verdicts = answer.sentinel.num_verdicts_total
                    self.last_verdict = answer.sentinel.last_verdict
                case _:
                    pass

    def _take_scheduler(self, status: introspection_pb2.SchedulerStatus, now_ns: int) -> None:
        for span in status.timeline:
            self.spans[span.began_unix_ns] = Span(layout_name(span.layout), span.began_unix_ns, span.reason)
        self.loads.append(
            LoadSample(
                now_ns,
                layout_name(status.layout),
                status.generation,
                status.epoch,
                status.num_resident_requests,
                status.num_queued_requests,
                status.uncomputed_prefill_tokens,
                status.num_free_blocks,
                status.num_cached_blocks,
                status.num_held_blocks,
                status.num_total_blocks,
                status.num_unaccounted_blocks,
                status.num_unsound_censuses,
            )
        )

    async def _ask_flips(self) -> None:
        request = mover_service_pb2.ListFlipsRequest(max_flips=MAX_FLIPS_ASKED)
        with contextlib.suppress(MeshError, NotRunningError, grpc.aio.AioRpcError):
            answer = await unary(MoverServiceStub(self.client.channel("mover")).ListFlips, request, timeout_s=CALL_S)
            for record in answer.flips:
                seen = flip_seen(record)
                self.flips[seen.generation, seen.flip_id] = seen


def flip_seen(record: mover_service_pb2.FlipRecord) -> FlipSeen:
    """The record of the mover, reduced to what is judged and shown."""
    ended = [steps.last_step_end_unix_ns for steps in record.ranks if steps.HasField("last_step_end_unix_ns")]
    begun = [steps.first_step_unix_ns for steps in record.ranks if steps.HasField("first_step_unix_ns")]
    return FlipSeen(
        generation=record.fence.generation,
        flip_id=record.flip_id,
        source=layout_name(record.source),
        target=layout_name(record.target),
        state=state_name(record.state),
        reason=record.reason,
        armed_unix_ns=record.armed_unix_ns,
        pause_begin_unix_ns=max(ended, default=None),
        pause_end_unix_ns=min(begun, default=None),
        pause_ns=record.pause_ns if record.HasField("pause_ns") else None,
        longest_token_gap_ns=record.longest_token_gap_ns if record.HasField("longest_token_gap_ns") else None,
        num_carried=record.num_carried_requests,
        num_partly_prefilled=record.num_partly_prefilled,
    )


def cost_of(process: str, pid: int, now_ns: int) -> CostSample:
    """Memory and descriptors of a living process.

    Raises:
        OSError: it is gone, or not ours to look at.
    """
    rollup = _sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return CostSample(now_ns, process, pid, rollup["Rss"], rollup["Pss"], rollup["Pss_Anon"], descriptors)


def free_bytes() -> int:
    """What the machine could still give without swapping."""
    return _sizes(Path("/proc/meminfo").read_text().splitlines())["MemAvailable"]


def cpu_s(pid: int) -> float:
    """Processor time that a process has used so far, in seconds.

    Raises:
        OSError: it is gone.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) * 1e-9


def _sizes(lines: Sequence[str]) -> dict[str, int]:
    parts = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts if len(words) == 3 and words[2] == "kB"}
