"""Writes one step log to a group of ranks without a scheduler: for the worker's bench and for tests of its numbers.

Plays the smallest scheduler there is: requests are admitted with fresh blocks, never released, and grow by what was
sampled. Never checks a number; it refuses only ranks that disagree on their digest.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.core import ids
from services.core.ids import BLOCK_SLOTS, BlockId, LayoutKind, RequestIndex, TokenId, blocks_for
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, Entry, LogEntry, ResetEntry, StepPlan, StepReport
from services.worker.model_thread import Answer

GENERATION = ids.Generation(3)


class RankHandle(Protocol):
    """One rank that takes entries and answers each in order."""

    def submit(self, entry: LogEntry) -> None:
        """Hands over the next entry and returns."""

    def answer(self) -> Answer | None:
        """Waits for the answer to the oldest entry not answered yet; raises what the rank raised."""


class RanksDisagreeError(Exception):
    """Two ranks report different digests for one step: they did not compute the same."""


@dataclass(slots=True)
class LogDriver:
    """One log and its requests; `requests[index]` are the ids known of each, prompt and output."""

    ranks: Sequence[RankHandle]
    epoch: int = 1
    sequence: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    requests: dict[int, list[int]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    """Blocks of each request."""
    in_flight: deque[tuple[int, ...]] = field(default_factory=deque)
    """For every step not settled, the request indexes that it samples."""

    def write(self, entry: Entry) -> None:
        """Hands one entry to every rank."""
        self.sequence += 1
        log_entry = LogEntry(GENERATION, ids.Epoch(self.epoch), ids.LogIndex(self.sequence), entry)
        for rank in self.ranks:
            rank.submit(log_entry)

    def answers(self) -> list[Answer | None]:
        """Every rank's answer to the oldest entry."""
        return [rank.answer() for rank in self.ranks]

    def reset(self, layout: LayoutKind, num_blocks: int, max_resident_requests: int, max_context_tokens: int) -> None:
        """Opens the log."""
        self.num_blocks = num_blocks
        self.write(ResetEntry(layout, num_blocks, max_resident_requests, max_context_tokens))
        self.answers()

    def admit(self, index: int, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> AdmittedRequest:
        """An admission with the blocks of its prompt."""
        self.requests[index] = list(token_ids)
        self.held[index] = blocks_for(len(token_ids))
        return AdmittedRequest(
            request_id=ids.RequestId(f"request-{index}"),
            request_index=RequestIndex(index),
            token_ids=tuple(map(TokenId, token_ids)),
            num_prompt_tokens=len(token_ids),
            block_ids=tuple(self._new_blocks(self.held[index])),
            sampling=sampling or SamplingParams(),
        )

    def _new_blocks(self, count: int) -> list[BlockId]:
        """From the end of the pool: a table that is no identity shows a block taken for its position."""
        first = self.num_blocks - self.num_blocks_used
        self.num_blocks_used += count
        return [BlockId(first - 1 - offset) for offset in range(count)]

    def step(
        self,
        rows: Sequence[tuple[int, int, int]],
        *,
        admitted: Iterable[AdmittedRequest] = (),
        sampled: Iterable[int] = (),
        tokens_through: int | None = None,
    ) -> None:
        """Writes a step of (index, start, count) rows, with the blocks that its tokens need besides."""
        plan = StepPlan(
            admitted=list(admitted),
            row_request_index=[RequestIndex(index) for index, _, _ in rows],
            row_start=[start for _, start, _ in rows],
            row_num_tokens=[count for _, _, count in rows],
            sampled_row=list(sampled),
            tokens_through=None if tokens_through is None else ids.LogIndex(tokens_through),
        )
        for index, start, count in rows:
            while self.held[index] * BLOCK_SLOTS < start + count:
                plan.block_request_index.append(RequestIndex(index))
                plan.block_position.append(self.held[index])
                plan.block_id.extend(self._new_blocks(1))
                self.held[index] += 1
        self.in_flight.append(tuple(rows[row][0] for row in plan.sampled_row))
        self.write(plan)

    def settle(self) -> list[StepReport]:
        """Waits for the oldest step; what it sampled is appended to its requests. Reports by rank."""
        reports = [answer for answer in self.answers() if isinstance(answer, StepReport)]
        digests = [f"{report.digest:016x}" for report in reports]
        if len(set(digests)) != 1:
            raise RanksDisagreeError(f"step {reports[0].sequence}: digests by rank {digests}: equal ones expected")
        tokens = reports[-1].tokens
        for index, token in zip(self.in_flight.popleft(), tokens.token_ids if tokens else (), strict=True):
            self.requests[index].append(token)
        return reports

    def prefill(
        self, prompts: dict[int, Sequence[int]], chunk_tokens: int, *, ahead: int = 4
    ) -> list[list[StepReport]]:
        """Computes prompts in chunks, one row a step, at most `ahead` steps in flight; each samples its first token."""
        reports = []
        for index, prompt in prompts.items():
            admitted = [self.admit(index, prompt)]
            for start in range(0, len(prompt), chunk_tokens):
                count = min(chunk_tokens, len(prompt) - start)
                is_last = start + count == len(prompt)
                self.step([(index, start, count)], admitted=admitted, sampled=[0] if is_last else [])
                admitted = []
                if len(self.in_flight) > ahead:
                    reports.append(self.settle())
        while self.in_flight:
            reports.append(self.settle())
        return reports

    def decode(self, indexes: Sequence[int], num_steps: int, *, ahead: int = 2) -> list[list[StepReport]]:
        """`num_steps` tokens for each request, `ahead` steps in flight: each reads what the one before will sample."""
        reports = []
        starts = [len(self.requests[index]) - 1 for index in indexes]
        for offset in range(num_steps):
            rows = [(index, start + offset, 1) for index, start in zip(indexes, starts, strict=True)]
            self.step(rows, sampled=range(len(rows)), tokens_through=self.sequence)
            if len(self.in_flight) >= ahead:
                reports.append(self.settle())
        while self.in_flight:
            reports.append(self.settle())
        return reports
