"""A group of real runners in one process: one thread a rank over a real shared-memory region, driven entry by entry."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from kernels.cpu.collective_status import AbortReason
from kernels.cpu.shm_region import RegionShape, ShmRegion
from services.core.ids import LayoutKind, Rank
from services.core.step import LogEntry
from services.models.model_files import ModelFiles
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.worker.dataplane.shm import ShmCarrier
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.owned_memory import OwnedMemorySpec, OwnedMode, owned_memory, shared_memory
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.weights.mapped import WeightStore
from services.worker.memory.wire import MoveBounds
from services.worker.model_thread import Answer
from services.worker.ring import RingWriter
from services.worker.steps.execute import Runner
from services.worker.steps.pipeline import MAX_UNREAD_STEPS
from services.worker.steps.stages import RunnerLimits
from tools.bench.log_driver import LogDriver

DEADLINE_S = 20.0
MAX_RANKS = 4
CHUNK_BYTES = 20_000
"""Of a flip's messages: few blocks of the tiny model, so that every leg is several."""
LIMITS = RunnerLimits(max_resident_requests=8, max_batch_tokens=256, num_valid_ids=131)


class LogitsTap:
    """Stands before the draws of a runner's sampler and keeps what it is given."""

    def __init__(self, runner: Runner) -> None:
        self._sample = runner.parts.sampler.sample
        self.logits: list[Tensor] = []
        runner.parts.sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: Tensor, *rest: Any) -> Any:
        self.logits.append(logits.clone())
        return self._sample(logits, *rest)


class RankThread:
    """One rank's runner in a thread of its own."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[Answer | None]] = deque()

    def submit(self, entry: LogEntry) -> None:
        self._pending.append(self.thread.submit(self.runner.execute, entry))

    def answer(self) -> Answer | None:
        return self._pending.popleft().result(timeout=DEADLINE_S)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks, their log, and what was sampled from."""

    ranks: list[RankThread]
    log: LogDriver
    tap: LogitsTap
    region: ShmRegion


@contextmanager
def group_of(
    files: ModelFiles,
    num_ranks: int,
    *,
    pp_layers: Sequence[int] | None = None,
    tp_weights: Sequence[float] | None = None,
    kv_tokens: Sequence[int] | None = None,
    limits: RunnerLimits = LIMITS,
    deadline_s: float = DEADLINE_S,
    mode: Literal["shared"] | OwnedMode = "shared",
    device: RankDevice = HOST,
    keeps: Mapping[str, Any] = MappingProxyType({}),
    rings: Sequence[RingWriter | None] = (None,) * MAX_RANKS,
) -> Iterator[Group]:
    """Runners of one group, ready for RESET; all threads have ended on the way out.

    `keeps`: fields of OwnedMemorySpec that are not as tests have them by default.
    """
    units = shard_units(files.geometry, files.tensors)
    layouts = both_layouts(units, num_ranks, pp_layers, tp_weights, kv_tokens)
    cut = cut_within_blocks(files.geometry, files.tensors, layouts.values())
    shape = RegionShape(
        num_ranks=num_ranks,
        max_message_bytes=limits.max_batch_tokens * files.geometry.hidden_size * 4,
        max_rows=limits.max_resident_requests,
        num_board_steps=2 * MAX_UNREAD_STEPS,
    )
    region, weights_fd, pool_fd = ShmRegion.create(shape), os.memfd_create("weights"), os.memfd_create("pool")
    ranks, carriers, owned = [], [], []
    for rank in range(num_ranks):
        carriers.append(ShmCarrier(region, rank, deadline_s))
        memory: RankMemory
        if mode != "shared":
            bounds = MoveBounds(CHUNK_BYTES)
            spec = OwnedMemorySpec(mode, LayoutKind.PP, bounds, lambda: 1 << 40, 4096, device=device)
            memory = owned_memory(files, layouts, carriers[-1], replace(spec, **keeps))
            owned.append(memory)
        else:
            store = WeightStore(files, weights_fd, cut)
            store.expand(rank, num_ranks)
            memory = shared_memory(Rank(rank), store, pool_fd, files.geometry, layouts)
        runner = Runner(Rank(rank), files.geometry, memory, layouts, carriers[-1], limits, rings[rank], device)
        ranks.append(RankThread(runner))
    try:
        yield Group(ranks, LogDriver(ranks), LogitsTap(ranks[-1].runner), region)
    finally:
        region.abort(AbortReason.SHUTDOWN)
        for rank_thread in ranks:
            rank_thread.thread.shutdown()
        for carrier in carriers:
            carrier.close()
        region.close()
        for memory in owned:
            memory.close()
        os.close(weights_fd)
        os.close(pool_fd)
