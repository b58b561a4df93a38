"""The batch: requests in, step plans out, results in, events out. The sole authority over requests and blocks.

Pure: no clock, no IO, no tensor; the same calls always give the same plans. The loop around it numbers the steps,
sends them and says what came back. A step may be issued before the last one's tokens are known: a row of a request that
ended meanwhile runs dead, and its result is dropped.

Invariants: a request is in the queue or in the resident table until it is over, and then in neither; free, cached and
referenced blocks make the pool at every moment; while frozen no block and no index changes hands.
"""

from dataclasses import dataclass

from services.core.blocks import PoolCensus
from services.core.ids import BLOCK_SLOTS, BlockId, LogIndex, RequestId, blocks_for
from services.core.layout import Layout
from services.core.request import (
    Emitted,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    RequestEvent,
    Submission,
    TokenLogprobs,
)
from services.core.step import SampledTokens, StepPlan
from services.scheduler.batch.admission import WaitingQueue, refusal
from services.scheduler.batch.block_tables import BlockTables
from services.scheduler.batch.limits import BatchLimits
from services.scheduler.batch.microbatch import StepsInFlight
from services.scheduler.batch.running_request import Request
from services.scheduler.batch.running_requests import RunningRequests
from services.scheduler.batch.step_composer import IssuedRow, StepComposer, StepDraft
from services.scheduler.batch.tally import Tally

__all__ = ["BatchLimits", "Batcher", "Load", "ResultError"]


class ResultError(ValueError):
    """A result that does not belong to the log: the rank that sent it is out of step, its generation must end."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be done, at one instant: the policy's signal."""

    uncomputed_prefill_tokens: int
    """Behind the fill boundary of every admitted request, plus what the queue will admit now."""
    decode_rows: int
    running_requests: int
    queued_requests: int
    free_blocks: int
    cached_blocks: int


class Batcher:
    """One generation's requests, blocks and unacknowledged steps."""

    def __init__(self, limits: BatchLimits, layout: Layout) -> None:
        self.limits = limits
        self.tally = Tally()
        self._window = StepsInFlight(layout, limits.steps_ahead)
        self._kind = layout.kind
        self._queue = WaitingQueue()
        self._running = RunningRequests(limits.max_resident_requests)
        self._tables = BlockTables(limits.num_blocks)
        self._composer = StepComposer(limits, self._running, self._queue, self._tables, self.tally)
        self._open: dict[RequestId, Request] = {}
        self._in_flight: dict[LogIndex, StepDraft] = {}
        self._last_committed: LogIndex | None = None
        self._events: list[RequestEvent] = []
        self._num_arrived = 0
        self._is_frozen = False
        self._backed_end = limits.num_blocks
        """One above the highest block that may have pages on a rank."""
        self._gives_back = False
        self._unfreed: list[Request] = []
        """Over while frozen: their blocks and indexes are theirs until the thaw."""

    # Requests

    def submit(self, submission: Submission, now_ns: int) -> list[RequestEvent]:
        """Queues a request, or says why not; `now_ns` is kept as its arrival and decides nothing.

        A resubmission that had already reached its end finishes at once.
        """
        rejected = self._rejection(submission)
        if rejected is not None:
            self.tally.num_rejected += 1
            return [rejected]
        request = self._new_request(submission, now_ns)
        if request.num_output_tokens and (reason := _ending(request)):
            request.is_over = True
            self.tally.num_finished[reason] += 1
            return [Finished(request.request_id, reason, request.num_output_tokens, 0)]
        self._open[request.request_id] = request
        self._queue.add(request)
        return []

    def abort(self, request_id: RequestId) -> list[RequestEvent]:
        """Ends a request wherever it is; nothing for one that is over already, as the two may cross."""
        request = self._open.get(request_id)
        return [] if request is None else [self._end(request, FinishReason.ABORT)]

    def finish(self, request_id: RequestId, num_output_tokens: int) -> list[RequestEvent]:
        """Ends a request after `num_output_tokens`, where the router matched a stop string."""
        request = self._open.get(request_id)
        if request is None:
            return []
        return [self._end(request, FinishReason.STOP, min(num_output_tokens, request.num_output_tokens))]

    # Steps

    def next_step(self, sequence: LogIndex) -> StepPlan | None:
        """The step to write to the log under `sequence`.

        None: the window is full, the batch is frozen, or there is nothing to compute; the sequence number is unused.
        """
        if self._is_frozen or not self._window.is_open:
            return None
        draft = self._composer.compose(sequence, self._window)
        if draft is None:
            return None
        self._in_flight[sequence] = draft
        self._events.extend(draft.admitted)
        self.tally.num_steps += 1
        plan = draft.plan
        return StepPlan(
            microbatch=self._window.issue(sequence),
            released=self._running.announce(),
            admitted=plan.admitted,
            block_request_index=plan.block_request_index,
            block_position=plan.block_position,
            block_id=plan.block_id,
            row_request_index=plan.row_request_index,
            row_start=plan.row_start,
            row_num_tokens=plan.row_num_tokens,
            sampled_row=plan.sampled_row,
            tokens_through=self._through(draft.tokens_through),
            dead_from=self._dead_from(),
        )

    def take_events(self) -> list[RequestEvent]:
        """What steps issued since the last call did to requests."""
        events, self._events = self._events, []
        return events

    def on_tokens(self, sequence: LogIndex, sampled: SampledTokens) -> list[RequestEvent]:
        """Commits what the sampling rank reported for one step.

        Raises:
            ResultError: no such step awaits tokens, or their number is not that of its sampled rows.
        """
        draft = self._in_flight.get(sequence)
        if draft is None or len(sampled.token_ids) != len(draft.sampled):
            awaited = "no tokens" if draft is None else f"{len(draft.sampled)} tokens"
            raise ResultError(
                f"step {sequence}: {awaited} awaited, {len(sampled.token_ids)} reported: end the generation"
            )
        rows, draft.sampled = draft.sampled, []
        if rows:
            self._last_committed = sequence
        logprobs = dict(sampled.logprobs)
        events: list[RequestEvent] = []
        for place, row in enumerate(rows):
            if not row.is_live:
                self.tally.num_dropped_tokens += 1
            elif place in sampled.non_finite:
                events.append(self._fail(row.request))
            else:
                self._commit(row, sampled, place, logprobs.get(place), events)
        return events

    def on_acknowledged(self, sequence: LogIndex) -> None:
        """Every rank has executed the step: its place in the window is free.

        Raises:
            ResultError: the step is not in flight, or its tokens never came.
        """
        draft = self._in_flight.get(sequence)
        if draft is None or draft.sampled:
            missing = "is not in flight" if draft is None else f"lacks the tokens of {len(draft.sampled)} rows"
            raise ResultError(f"step {sequence} is acknowledged by all ranks but {missing}: end the generation")
        del self._in_flight[sequence]
        self._window.acknowledge(sequence)
        self.tally.num_computed_tokens += draft.num_tokens
        for row in draft.rows:
            if row.is_live and row.request.index is not None:
                row.request.num_computed = row.end

    # Flips

    def freeze(self) -> None:
        """For a flip: no step, no block, no index changes hands until `thaw`; results in flight still commit."""
        assert not self._is_frozen, "a second flip while one is pending"
        self._is_frozen = True

    def thaw(self, layout: Layout) -> None:
        """Goes on under `layout`, the new one or, after an abandoned flip, the old one."""
        assert self._is_frozen, "nothing to thaw"
        if layout.kind is not self._kind:
            assert not self._in_flight, f"a flip to {layout.kind.value} with steps {sorted(self._in_flight)} in flight"
            self._kind = layout.kind
            self._window = StepsInFlight(layout, self.limits.steps_ahead)
        self._is_frozen = False
        # A flip may have put pages under the whole pool.
        self._backed_end = self.limits.num_blocks
        unfreed, self._unfreed = self._unfreed, []
        for request in unfreed:
            self._free(request)

    @property
    def is_parked(self) -> bool:
        """Frozen, and every step is acknowledged by all ranks."""
        return self._is_frozen and not self._in_flight

    def live_runs(self) -> tuple[tuple[BlockId, int], ...]:
        """Every block with an owner, as rising runs (begin, length): residents', cached ones, those of the undead."""
        return self._tables.pool.owned_runs()

    # Memory

    @property
    def num_dead_blocks(self) -> int:
        """Blocks above every owned one that may have pages: what a release gives."""
        return max(0, self._backed_end - self._tables.pool.owned_end)

    @property
    def is_frozen(self) -> bool:
        """Whether a flip is pending."""
        return self._is_frozen

    def evict_cached(self, num_dead: int) -> int:
        """Gives back cached blocks, the least recently used first, until so many are dead; returns their number."""
        assert not self._is_frozen, "blocks are the flip's"
        num_evicted = 0
        while self.num_dead_blocks < num_dead and self._tables.tree.evict():
            num_evicted += 1
        return num_evicted

    def release_dead(self) -> None:
        """Lets the next step, and those behind it as others come back, tell ranks which blocks are dead."""
        self._gives_back = True
        self._tables.pool.prefer_low()

    def retract_youngest(self) -> tuple[RequestId, int]:
        """Sends a request back to the queue, to be computed again once `resume`; returns it and its blocks' number."""
        assert not self._is_frozen, "blocks are the flip's"
        victim = self._running.youngest
        num_blocks = len(victim.blocks)
        self._composer.preempt(victim)
        self._composer.admits = False
        return victim.request_id, num_blocks

    def resume(self) -> None:
        """Admits again after a retraction."""
        self._composer.admits = True

    # Accounts

    @property
    def num_in_flight(self) -> int:
        """Steps not yet acknowledged by all ranks."""
        return len(self._in_flight)

    @property
    def open_request_ids(self) -> tuple[RequestId, ...]:
        """Requests that are not over, in order of arrival."""
        return tuple(self._open)

    @property
    def num_partly_prefilled(self) -> int:
        """RunningRequests whose prompt is not wholly in the log yet."""
        return sum(request.is_prefilling for request in self._running)

    def load(self) -> Load:
        """What is to be done now."""
        num_pending, num_decoding = self._admissible_tokens(), 0
        for request in self._running:
            num_pending += max(0, request.prefill_target - request.num_computed)
            num_decoding += not request.is_prefilling
        return Load(
            uncomputed_prefill_tokens=num_pending,
            decode_rows=num_decoding,
            running_requests=len(self._running),
            queued_requests=len(self._queue),
            free_blocks=self._tables.pool.num_free,
            cached_blocks=self._tables.tree.num_cached,
        )

    def census(self) -> PoolCensus:
        """Counts every block by its owners; walks everything, so not for every step."""
        return self._tables.census([*self._running, *self._unfreed])

    def flush_prefix_cache(self) -> int:
        """Gives back every cached block that no request holds and returns their number; none while frozen."""
        return 0 if self._is_frozen else self._tables.tree.flush()

    def _dead_from(self) -> BlockId | None:
        """Above every block with an owner now or when any step was written that some rank may still be at."""
        end = max(draft.owned_end for draft in self._in_flight.values())
        backed_end, gives_back = max(self._backed_end, end), self._gives_back
        self._backed_end = end if gives_back else backed_end
        self._gives_back = gives_back and end > self._tables.pool.owned_end
        return BlockId(end) if gives_back and end < backed_end else None

    def _through(self, needed: LogIndex | None) -> LogIndex | None:
        """At least the newest committed step, so that ranks keep no more unread ids than steps are in flight."""
        known = [sequence for sequence in (needed, self._last_committed) if sequence is not None]
        return max(known, default=None)

    def _rejection(self, submission: Submission) -> Rejected | None:
        if submission.request_id in self._open:
            text = f"request {submission.request_id} is already open: choose another id, or wait for its end"
            return Rejected(submission.request_id, RejectReason.INVALID, "request_id", text)
        # Those that free indexes could let in do not wait: a whole lost generation may come back at once.
        max_queued = self.limits.max_queued_requests + self._running.num_free
        if len(self._queue) >= max_queued:
            text = f"{len(self._queue)} requests are queued, {max_queued} may be: try again later"
            return Rejected(submission.request_id, RejectReason.OVERLOADED, "", text)
        return refusal(submission, self.limits)

    def _new_request(self, submission: Submission, now_ns: int) -> Request:
        self._num_arrived += 1
        max_tokens = submission.num_prompt_tokens + submission.max_output_tokens
        return Request(
            submission=submission,
            order=(submission.priority, self._num_arrived),
            arrived_ns=now_ns,
            max_tokens=min(max_tokens, self.limits.context_tokens),
            tokens=list(submission.token_ids),
        )

    def _commit(
        self,
        row: IssuedRow,
        sampled: SampledTokens,
        place: int,
        logprobs: TokenLogprobs | None,
        events: list[RequestEvent],
    ) -> None:
        request, token = row.request, sampled.token_ids[place]
        assert row.end == len(request.tokens), "results of one residence come in order"
        output_index = request.num_output_tokens
        request.tokens.append(token)
        request.num_in_flight -= 1
        self.tally.num_emitted_tokens += 1
        events.append(Emitted(request.request_id, output_index, (token,), () if logprobs is None else (logprobs,)))
        if request.index is not None and not self._is_frozen:
            # While frozen not even a second copy may become free; the next publication catches up.
            self._tables.publish(request)
        if reason := _ending(request):
            events.append(self._end(request, reason))

    def _fail(self, request: Request) -> RequestEvent:
        request.is_distrusted = True
        text = f"the model's output was not finite at position {len(request.tokens)}: only this request ends"
        return self._end(request, FinishReason.ERROR, error=text)

    def _end(
        self, request: Request, reason: FinishReason, num_output_tokens: int | None = None, error: str = ""
    ) -> RequestEvent:
        del self._open[request.request_id]
        request.is_over = True
        self.tally.num_finished[reason] += 1
        if request.index is None:
            self._queue.remove(request)
        else:
            self._running.leave(request)
            self._free(request)
        if num_output_tokens is None:
            num_output_tokens = request.num_output_tokens
        return Finished(request.request_id, reason, num_output_tokens, request.num_cached_tokens, error)

    def _free(self, request: Request) -> None:
        if self._is_frozen:
            self._unfreed.append(request)
            return
        self._running.free(request)
        self._tables.release(request)

    def _admissible_tokens(self) -> int:
        """Tokens to compute of those in the queue that blocks and indexes would let in now, in their order."""
        num_tokens, num_blocks = 0, self._tables.num_available
        for request, _ in zip(self._queue, range(self._composer.num_admissible), strict=False):
            num_shared = len(self._tables.shared_prefix(request))
            num_blocks -= blocks_for(len(request.tokens)) - num_shared
            if num_blocks < 0:
                break
            num_tokens += len(request.tokens) - num_shared * BLOCK_SLOTS
        return num_tokens


def _ending(request: Request) -> FinishReason | None:
    """Why the request is over with its last token, if it is."""
    if request.tokens[-1] in request.submission.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= request.max_tokens else None
