"""A group of real runners in one process: one thread a rank over a real shared-memory region, driven entry by entry."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kernels.collective_status import AbortReason
from kernels.shm_region import RegionShape, ShmRegion
from services.core.ids import (
    BLOCK_SLOTS,
    BlockId,
    Epoch,
    Generation,
    LayoutKind,
    Rank,
    RequestId,
    RequestIndex,
    TokenId,
    blocks_for,
)
from services.core.ids import Sequence as StepSequence
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, Entry, LogEntry, ResetEntry, StepPlan, StepReport
from services.mesh.model_files import ModelFiles
from services.worker.collectives import ShmCarrier
from services.worker.layouts import both_layouts, cut_within_blocks, shard_units
from services.worker.runner import MAX_UNREAD_STEPS, Opened, Runner, RunnerLimits
from services.worker.weights import WeightStore

DEADLINE_S = 20.0
LIMITS = RunnerLimits(max_resident_requests=8, max_batch_tokens=256, deadline_s=DEADLINE_S)


class LogitsTap:
    """Stands before a runner's own sampler and keeps what it is given."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, *rest: Any) -> Any:
        self.logits.append(logits.clone())
        return self._sampler.sample(logits, *rest)


@dataclass(slots=True)
class Group:
    """Writes one log to all ranks, as a scheduler would, and keeps what comes back."""

    runners: list[Runner]
    threads: list[ThreadPoolExecutor]
    tap: LogitsTap
    epoch: int = 1
    sequence: int = 0
    blocks_used: int = 0
    requests: dict[int, list[int]] = field(default_factory=dict)
    reports: list[list[StepReport]] = field(default_factory=list)

    def write(self, entry: Entry) -> list[Future[Opened | StepReport | None]]:
        """Hands one entry to every rank and returns at once."""
        self.sequence += 1
        log_entry = LogEntry(Generation(3), Epoch(self.epoch), StepSequence(self.sequence), entry)
        return [
            thread.submit(runner.execute, log_entry) for thread, runner in zip(self.threads, self.runners, strict=True)
        ]

    def settle(self, futures: Sequence[Future[Opened | StepReport | None]]) -> list[Opened | StepReport | None]:
        """Waits for every rank's answer to one entry; step reports agree on the digest."""
        answers = [future.result(timeout=DEADLINE_S) for future in futures]
        reports = [answer for answer in answers if isinstance(answer, StepReport)]
        if reports:
            assert len(reports) == len(self.runners) and len({report.digest for report in reports}) == 1
            assert [report.tokens for report in reports[:-1]] == [None] * (len(reports) - 1)
            self.reports.append(reports)
        return answers

    def reset(self, layout: LayoutKind, *, num_blocks: int = 64, max_context_tokens: int = 256) -> None:
        """Opens the log."""
        answers = self.settle(
            self.write(ResetEntry(layout, num_blocks, LIMITS.max_resident_requests, max_context_tokens))
        )
        assert answers == [Opened(num_blocks)] * len(self.runners)

    def admit(self, index: int, ids: Sequence[int], **fields: Any) -> AdmittedRequest:
        """An admission with fresh blocks for the whole context that the test will use."""
        num_blocks = blocks_for(len(ids))
        # Descending ids: a table that is not the identity shows a mix-up of block and position.
        blocks = [BlockId(63 - self.blocks_used - offset) for offset in range(num_blocks)]
        self.blocks_used += num_blocks
        self.requests[index] = list(ids)
        return AdmittedRequest(
            request_id=RequestId(f"r{index}"),
            request_index=RequestIndex(index),
            token_ids=tuple(TokenId(token) for token in ids),
            num_prompt_tokens=len(ids),
            block_ids=tuple(blocks),
            **{"sampling": SamplingParams(), **fields},
        )

    def step(
        self,
        rows: Sequence[tuple[int, int, int]],
        *,
        admitted: Sequence[AdmittedRequest] = (),
        sampled: Sequence[int] = (),
        tokens_through: int | None = None,
        **fields: Any,
    ) -> list[Future[Opened | StepReport | None]]:
        """Writes a step of (index, start, count) rows; blocks that its tokens need are appended."""
        grown = [
            (index, start // BLOCK_SLOTS)
            for index, start, count in rows
            if count == 1 and start % BLOCK_SLOTS == 0 < start
        ]
        blocks = [BlockId(63 - self.blocks_used - offset) for offset in range(len(grown))]
        self.blocks_used += len(grown)
        plan = StepPlan(
            admitted=list(admitted),
            block_request_index=[RequestIndex(index) for index, _ in grown],
            block_position=[position for _, position in grown],
            block_id=blocks,
            row_request_index=[RequestIndex(index) for index, _, _ in rows],
            row_start=[start for _, start, _ in rows],
            row_num_tokens=[count for _, _, count in rows],
            sampled_row=list(sampled),
            tokens_through=None if tokens_through is None else StepSequence(tokens_through),
            **fields,
        )
        return self.write(plan)

    def decode(self, indexes: Sequence[int], num_steps: int) -> None:
        """Greedy steps of one token for each request, each reading what the one before sampled."""
        for _ in range(num_steps):
            rows = [(index, len(self.requests[index]) - 1, 1) for index in indexes]
            tokens_through = self.sequence
            self.settle(self.step(rows, sampled=range(len(rows)), tokens_through=tokens_through))
            self.take(indexes)

    def take(self, indexes: Sequence[int]) -> None:
        """Notes what the last step sampled, for the requests in the order of its sampled rows."""
        tokens = self.reports[-1][-1].tokens
        assert tokens is not None
        for index, token in zip(indexes, tokens.token_ids, strict=True):
            self.requests[index].append(token)


@contextmanager
def group_of(
    files: ModelFiles,
    num_ranks: int,
    *,
    pp_layers: Sequence[int] | None = None,
    tp_weights: Sequence[float] | None = None,
    limits: RunnerLimits = LIMITS,
) -> Iterator[Group]:
    """Runners of one group, ready for RESET; all threads have ended on the way out."""
    units = shard_units(files.geometry, files.tensors)
    layouts = both_layouts(units, num_ranks, pp_layers, tp_weights)
    cut = cut_within_blocks(files.geometry, files.tensors, layouts.values())
    shape = RegionShape(
        num_ranks=num_ranks,
        max_message_bytes=limits.max_batch_tokens * files.geometry.hidden_size * 4,
        max_rows=limits.max_resident_requests,
        num_board_steps=2 * MAX_UNREAD_STEPS,
    )
    region, weights_fd, pool_fd = ShmRegion.create(shape), os.memfd_create("weights"), os.memfd_create("pool")
    runners, threads, carriers = [], [], []
    for rank in range(num_ranks):
        store = WeightStore(files, weights_fd, cut)
        store.expand(rank, num_ranks)
        carriers.append(ShmCarrier(region, rank))
        runners.append(Runner(Rank(rank), files.geometry, store, layouts, carriers[-1], pool_fd, limits))
        threads.append(ThreadPoolExecutor(1))
    tap = LogitsTap(runners[-1]._sampler)
    runners[-1]._sampler = tap  # type: ignore[assignment]
    try:
        yield Group(runners, threads, tap)
    finally:
        region.abort(AbortReason.SHUTDOWN)
        for thread in threads:
            thread.shutdown()
        for carrier in carriers:
            carrier.close()
        region.close()
        os.close(weights_fd)
        os.close(pool_fd)
