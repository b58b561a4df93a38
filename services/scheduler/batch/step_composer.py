"""Writes one step: decode rows first, then chunks of resident prompts, then new requests, within blocks and budgets.

Pure: it changes requests, the queue, the resident table and block tables, never the window, and reads no clock.

Invariants: decode rows are taken in order and only the youngest is preempted, so that the oldest always gets on and no
two preempt each other for ever; whoever enters leaves a block to spare for each that decodes; blocks written by a step
are published behind it, never shared within it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.ids import BLOCK_SLOTS, LogIndex
from services.core.request import Admitted
from services.core.step import AdmittedRequest, StepPlan
from services.scheduler.batch.admission import WaitingQueue
from services.scheduler.batch.block_tables import BlockTables
from services.scheduler.batch.chunking import ChunkBudget
from services.scheduler.batch.limits import BatchLimits
from services.scheduler.batch.microbatch import StepsInFlight
from services.scheduler.batch.running_request import Request
from services.scheduler.batch.running_requests import RunningRequests
from services.scheduler.batch.tally import Tally


class IssuedRow(NamedTuple):
    """A row of a step in flight, of one residence of its request."""

    request: Request
    num_admissions: int
    end: int

    @property
    def is_live(self) -> bool:
        """Whether its result still counts: the request is not over, nor back in the batch after preemption."""
        return not self.request.is_over and self.request.num_admissions == self.num_admissions


@dataclass(slots=True)
class StepDraft:
    """A step being written, and what its results will mean."""

    plan: StepPlan = field(default_factory=StepPlan)
    rows: list[IssuedRow] = field(default_factory=list)
    sampled: list[IssuedRow] = field(default_factory=list)
    """Beside the plan's `sampled_row`."""
    prefilled: list[Request] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    num_tokens: int = 0
    tokens_through: LogIndex | None = None
    owned_end: int = 0
    """One above the highest block that had an owner when it was written."""


@dataclass(slots=True)
class StepComposer:
    """Composes steps from the state of one generation."""

    limits: BatchLimits
    running: RunningRequests
    queue: WaitingQueue
    tables: BlockTables
    tally: Tally
    admits: bool = True
    """False: memory is short, and a request enters only an empty batch."""

    @property
    def num_admissible(self) -> int:
        """Queued requests that may enter, as far as indexes go."""
        return min(len(self.queue), self.running.num_free if self.admits else int(not len(self.running)))

    def compose(self, sequence: LogIndex, window: StepsInFlight) -> StepDraft | None:
        """The next step under `sequence`, or None where no request has anything to compute now.

        The plan's microbatch, releases and `tokens_through` are left to the caller.
        """
        draft = StepDraft()
        self._decode(draft, sequence, window)
        limits = self.limits
        prefilling = [request for request in self.running if request.is_prefilling]
        anyone_decodes = len(prefilling) < len(self.running)
        num_tokens = window.token_budget(limits.max_batch_tokens, anyone_decodes=anyone_decodes)
        # Never so little that prompts starve beside many rows.
        num_left = min(limits.max_batch_tokens - draft.num_tokens, max(BLOCK_SLOTS, num_tokens - draft.num_tokens))
        budget = ChunkBudget(num_left, limits.chunk_tokens, limits.attention_parity_tokens)
        num_admissible = self.num_admissible
        share = window.prefill_share(len(prefilling) + num_admissible)
        for request in prefilling[:share]:
            self._add_chunk(draft, request, budget, sequence)
        self._admit(draft, min(num_admissible, share - len(prefilling)), budget, sequence)
        for request in draft.prefilled:
            self.tables.publish(request)
        draft.owned_end = self.tables.pool.owned_end
        return draft if draft.rows else None

    def _decode(self, draft: StepDraft, sequence: LogIndex, window: StepsInFlight) -> None:
        max_in_flight = window.max_samples_in_flight
        decoding = [request for request in self.running if not request.is_prefilling]
        ready = [r for r in decoding if r.num_in_flight < max_in_flight and r.num_known < r.max_tokens]
        for request in ready[: window.decode_share(len(ready), len(decoding))]:
            if request.index is not None and self._has_slot(draft, request):
                self._add_row(draft, request, 1, sequence)

    def _has_slot(self, draft: StepDraft, request: Request) -> bool:
        """Makes sure of a slot for its next token, if need be by preemption; False: it was itself the youngest."""
        assert request.index is not None, "only residents decode"
        while request.num_issued >= len(request.blocks) * BLOCK_SLOTS:
            block = self.tables.extend(request)
            if block is not None:
                draft.plan.block_request_index.append(request.index)
                draft.plan.block_position.append(len(request.blocks) - 1)
                draft.plan.block_id.append(block)
                continue
            victim = self.running.youngest
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request) -> None:
        """Back to the queue at its place; results in flight still count until it is admitted again."""
        self.running.leave(victim)
        self.running.free(victim)
        self.tables.release(victim)
        self.queue.add(victim)
        self.tally.num_preemptions += 1

    def _add_chunk(self, draft: StepDraft, request: Request, budget: ChunkBudget, sequence: LogIndex) -> None:
        num_tokens = budget.take(request.num_issued, request.prefill_target - request.num_issued)
        if num_tokens:
            draft.prefilled.append(request)
            self._add_row(draft, request, num_tokens, sequence)

    def _add_row(self, draft: StepDraft, request: Request, num_tokens: int, sequence: LogIndex) -> None:
        assert request.index is not None, "only residents have rows"
        plan, end = draft.plan, request.num_issued + num_tokens
        if not request.is_prefilling:
            assert request.last_sampled_by is not None, "a prompt's last chunk samples before its request decodes"
            draft.tokens_through = max(draft.tokens_through or request.last_sampled_by, request.last_sampled_by)
        plan.row_request_index.append(request.index)
        plan.row_start.append(request.num_issued)
        plan.row_num_tokens.append(num_tokens)
        row = IssuedRow(request, request.num_admissions, end)
        if end == request.num_known:
            plan.sampled_row.append(len(draft.rows))
            draft.sampled.append(row)
            request.num_in_flight += 1
            request.last_sampled_by = sequence
        draft.rows.append(row)
        draft.num_tokens += num_tokens
        request.num_issued = end

    def _admit(self, draft: StepDraft, max_requests: int, budget: ChunkBudget, sequence: LogIndex) -> None:
        num_decoding = sum(1 for request in self.running if not request.is_prefilling)
        for _ in range(max_requests):
            request = self.queue.head
            # One block to spare for each request that decodes, or it would be preempted again at once.
            if request is None or not budget.num_left or not self.tables.attach(request, num_spare=num_decoding):
                return
            self.queue.remove(request)
            self._enter(draft, request)
            self._add_chunk(draft, request, budget, sequence)

    def _enter(self, draft: StepDraft, request: Request) -> None:
        submission, is_first = request.submission, request.num_admissions == 0
        request.num_admissions += 1
        request.prefill_target = len(request.tokens)
        request.num_in_flight = 0
        if is_first:
            request.num_cached_tokens = min(request.num_issued, submission.num_prompt_tokens)
            draft.admitted.append(Admitted(request.request_id, request.num_cached_tokens))
        self.tally.count_admission(request, is_first)
        draft.plan.admitted.append(
            AdmittedRequest(
                request_id=request.request_id,
                request_index=self.running.enter(request),
                token_ids=tuple(request.tokens),
                num_prompt_tokens=submission.num_prompt_tokens,
                block_ids=tuple(request.blocks),
                sampling=submission.sampling,
                num_logprobs=submission.num_logprobs,
            )
        )
