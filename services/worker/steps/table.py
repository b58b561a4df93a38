"""The resident table: what a rank knows of every admitted request, as arrays indexed by request index.

A step's deltas and rows are applied as whole arrays, never row by row. Nothing here decides: the table holds what the
log said. Invariants: every index, position and id is checked against the limits of RESET before it is used, so a
broken log is a `ProtocolError` and never a write out of range; a token sampled by a step from before a place was taken
again is dropped (`admitted_at`).

Shapes: R max_resident_requests, C max_context_tokens, B blocks of C tokens, S rows of a step, T tokens of a step.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.ids import BLOCK_SLOTS, LogIndex, blocks_for
from services.core.log import ProtocolError
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, StepPlan

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_FREE = np.iinfo(np.int64).max
"""`admitted_at` of a place that nobody holds: later than any step, so that late tokens fall through one comparison."""

MAX_TOKEN_TABLE_BYTES = 1 << 36
"""Refuses limits that multiply to nonsense; the table is backed lazily, so its size is address space, not memory."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What RESET and the model bound; exclusive upper ends."""

    max_resident_requests: int
    max_context_tokens: int
    num_blocks: int
    vocab_size: int
    max_batch_tokens: int
    """Tokens of one step: the size of the preallocated activations."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, checked; [S] unless said."""

    request: Int64s
    start: Int64s
    row_tokens: Int64s
    query_start: Int32s
    """Rows' places in the batch: row s has tokens [query_start[s], query_start[s + 1])."""
    context_tokens: Int32s
    """Tokens visible to the row's last token: start + num_tokens."""
    sampled: Int64s
    """Which rows sample, rising."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.query_start[-1])

    def token_rows(self) -> Int64s:
        """[T] the row of every token."""
        return np.repeat(np.arange(len(self.request)), self.row_tokens)

    def positions(self) -> Int64s:
        """[T] every token's position in its request."""
        offset = self.start - self.query_start[:-1]
        return np.arange(self.num_tokens) + np.repeat(offset, self.row_tokens)


class SamplingTable:
    """[R] arrays of sampling parameters; a row is meaningful while its place is held."""

    def __init__(self, num_places: int) -> None:
        self.temperature = np.zeros(num_places, np.float32)
        self.top_k = np.zeros(num_places, np.int32)
        self.top_p = np.ones(num_places, np.float32)
        self.min_p = np.zeros(num_places, np.float32)
        self.seed = np.zeros(num_places, np.uint64)
        self.presence = np.zeros(num_places, np.float32)
        self.frequency = np.zeros(num_places, np.float32)
        self.repetition = np.ones(num_places, np.float32)
        self.penalised = np.zeros(num_places, np.bool_)
        """Whether any of the three penalties changes a logit."""
        self.num_bias = np.zeros(num_places, np.int32)
        self.bias: dict[int, tuple[Int32s, NDArray[np.float32]]] = {}
        """(ids, added values) of the places whose requests carry a logit bias."""

    def put(self, index: int, params: SamplingParams, vocab_size: int) -> None:
        """Takes one request's parameters; raises ProtocolError on a bias outside the vocabulary."""
        self.temperature[index] = params.temperature
        self.top_k[index] = params.top_k
        self.top_p[index] = params.top_p
        self.min_p[index] = params.min_p
        self.seed[index] = params.seed
        self.presence[index] = params.presence_penalty
        self.frequency[index] = params.frequency_penalty
        self.repetition[index] = params.repetition_penalty
        neutral = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
        self.penalised[index] = not neutral
        self.bias.pop(index, None)
        self.num_bias[index] = len(params.logit_bias)
        if params.logit_bias:
            ids = np.array([token for token, _ in params.logit_bias], np.int64)
            _check("biased token id", ids, vocab_size)
            values = np.array([value for _, value in params.logit_bias], np.float32)
            self.bias[index] = (ids.astype(np.int32), values)


class RequestTable:
    """Every admitted request's tokens, blocks and sampling parameters, by request index."""

    def __init__(self, limits: TableLimits) -> None:
        num_places, num_tokens = limits.max_resident_requests, limits.max_context_tokens
        if num_places < 1 or num_tokens < 1 or 4 * num_places * num_tokens > MAX_TOKEN_TABLE_BYTES:
            raise ProtocolError(
                f"RESET asks for {num_places} requests of {num_tokens} tokens; both above 0 and a token table of at "
                f"most {MAX_TOKEN_TABLE_BYTES} bytes expected: lower max_resident_requests or context_tokens"
            )
        self.limits = limits
        self.tokens = np.zeros((num_places, num_tokens), np.int32)
        """[R, C]"""
        self.blocks = np.zeros((num_places, blocks_for(num_tokens)), np.int32)
        """[R, B]"""
        self.num_tokens = np.zeros(num_places, np.int64)
        """Tokens known: given at admission, or applied since."""
        self.num_prompt_tokens = np.zeros(num_places, np.int64)
        self.num_blocks = np.zeros(num_places, np.int64)
        self.admitted_at = np.full(num_places, _FREE, np.int64)
        self.num_logprobs = np.zeros(num_places, np.int32)
        self.wants_logprobs = np.zeros(num_places, np.bool_)
        self.sampling = SamplingTable(num_places)

    @property
    def num_resident(self) -> int:
        """Places held."""
        return int(np.count_nonzero(self.admitted_at != _FREE))

    def running(self) -> list[int]:
        """Indexes of the requests that are in the batch."""
        return np.flatnonzero(self.admitted_at != _FREE).tolist()

    @property
    def blocks_end(self) -> int:
        """One above the highest block of any table of a place that is held."""
        in_table = np.arange(self.blocks.shape[1]) < self.num_blocks[:, None]
        is_held = (self.admitted_at != _FREE)[:, None]
        return int(self.blocks.max(initial=-1, where=in_table & is_held)) + 1

    def apply_deltas(self, plan: StepPlan, sequence: LogIndex) -> None:
        """Applies a step's released, admitted and appended blocks, in this order.

        Raises:
            ProtocolError: a place is freed that is free, taken that is held, or a value is out of range.
        """
        if plan.released:
            self._release(np.asarray(plan.released, np.int64))
        for request in plan.admitted:
            self._admit(request, sequence)
        if plan.block_id or plan.block_request_index or plan.block_position:
            self._append_blocks(plan)

    def _release(self, index: Int64s) -> None:
        _check("released request index", index, self.limits.max_resident_requests)
        self._check_held(index, "is released")
        if len(np.unique(index)) != len(index):
            raise ProtocolError(f"a request index is released twice in one step: {sorted(index.tolist())}")
        self.admitted_at[index] = _FREE

    def _admit(self, request: AdmittedRequest, sequence: LogIndex) -> None:
        index, num_tokens, num_blocks = int(request.request_index), len(request.token_ids), len(request.block_ids)
        limits = self.limits
        if not 0 <= index < limits.max_resident_requests or self.admitted_at[index] != _FREE:
            raise ProtocolError(
                f"{request.request_id} is admitted at index {index}: a free index below "
                f"{limits.max_resident_requests} expected; release it first"
            )
        if not 1 <= num_tokens <= limits.max_context_tokens or not 0 < request.num_prompt_tokens <= num_tokens:
            raise ProtocolError(
                f"{request.request_id} is admitted with {num_tokens} tokens, {request.num_prompt_tokens} of them its "
                f"prompt; 1 to {limits.max_context_tokens} expected"
            )
        if num_blocks > self.blocks.shape[1]:
            raise ProtocolError(f"{request.request_id} has {num_blocks} blocks, at most {self.blocks.shape[1]} fit")
        tokens, blocks = np.array(request.token_ids, np.int64), np.array(request.block_ids, np.int64)
        _check("token id", tokens, limits.vocab_size)
        _check("block id", blocks, limits.num_blocks)
        self.tokens[index, :num_tokens] = tokens
        self.blocks[index, :num_blocks] = blocks
        self.num_tokens[index], self.num_blocks[index] = num_tokens, num_blocks
        self.num_prompt_tokens[index] = request.num_prompt_tokens
        self.wants_logprobs[index] = request.num_logprobs is not None
        self.num_logprobs[index] = min(request.num_logprobs or 0, limits.vocab_size)
        self.sampling.put(index, request.sampling, limits.vocab_size)
        self.admitted_at[index] = sequence

    def _append_blocks(self, plan: StepPlan) -> None:
        index, position, block = _parallel(
            "appended blocks", plan.block_request_index, plan.block_position, plan.block_id
        )
        _check("block's request index", index, self.limits.max_resident_requests)
        _check("block position", position, self.blocks.shape[1])
        _check("block id", block, self.limits.num_blocks)
        self._check_held(index, "is given a block")
        before = self.num_blocks.copy()
        np.maximum.at(self.num_blocks, index, position + 1)
        appended = np.bincount(index, minlength=len(before))
        wrong = (self.num_blocks - before != appended)[index] | (position < before[index])
        if wrong.any():
            place = index[wrong][0]
            raise ProtocolError(
                f"blocks of request index {place} must follow its {before[place]} without a gap, got positions "
                f"{sorted(position[index == place].tolist())}"
            )
        self.blocks[index, position] = block

    def rows(self, plan: StepPlan) -> Rows:
        """The step's rows, after its deltas and after the tokens it reads.

        Raises:
            ProtocolError: a row of nobody, twice, outside its blocks or the batch, or of tokens not known here.
        """
        index, start, count = _parallel("rows", plan.row_request_index, plan.row_start, plan.row_num_tokens)
        if not len(index):
            raise ProtocolError("a step without rows: write none instead")
        _check("row's request index", index, self.limits.max_resident_requests)
        self._check_held(index, "has a row")
        if np.bincount(index).max() > 1:
            raise ProtocolError(f"a request has two rows in one step: indexes {index.tolist()}")
        if start.min() < 0 or count.min() < 1:
            raise ProtocolError(f"rows start at 0 or above and have tokens, got starts {start} of {count} tokens")
        end = start + count
        self._check_reach(index, end)
        total = int(count.sum())
        if total > self.limits.max_batch_tokens:
            raise ProtocolError(
                f"a step of {total} tokens, at most {self.limits.max_batch_tokens} fit the activations: "
                "lower scheduler.max_batch_rows"
            )
        query_start = np.zeros(len(index) + 1, np.int32)
        np.cumsum(count, out=query_start[1:])
        return Rows(index, start, count, query_start, end.astype(np.int32), self._sampled(plan, len(index)))

    def _sampled(self, plan: StepPlan, num_rows: int) -> Int64s:
        sampled = np.asarray(plan.sampled_row, np.int64)
        _check("sampled row", sampled, num_rows)
        if (np.diff(sampled) <= 0).any():
            raise ProtocolError(f"sampled rows must rise, got {sampled.tolist()}")
        return sampled

    def _check_reach(self, index: Int64s, end: Int64s) -> None:
        limits, held = self.limits, self.num_blocks[index] * BLOCK_SLOTS
        beyond = (end > held) | (end > self.num_tokens[index]) | (end > limits.max_context_tokens)
        if beyond.any():
            row = int(np.flatnonzero(beyond)[0])
            raise ProtocolError(
                f"row {row} reads tokens up to {end[row]} of request index {index[row]}, which has "
                f"{self.num_tokens[index[row]]} tokens known here, {held[row]} slots and a context of "
                f"{limits.max_context_tokens}: give it blocks, and name the step it reads from in tokens_through"
            )

    def _check_held(self, index: Int64s, what: str) -> None:
        free = self.admitted_at[index] == _FREE
        if free.any():
            raise ProtocolError(f"request index {index[free][0]} {what}, but nobody holds it: admit it first")

    def input_ids(self, rows: Rows) -> Int32s:
        """[T] ids that the step reads, row after row."""
        return self.tokens[np.repeat(rows.request, rows.row_tokens), rows.positions()]

    def apply_tokens(self, sequence: LogIndex, index: Int64s, position: Int64s, ids: Int32s) -> None:
        """Writes the ids that step `sequence` sampled for `index` at `position` (of the new token), all [N].

        Ids for a place that was freed or taken again since are dropped, and so is an id at the end of the context: no
        later step can read it.
        """
        _check("sampled token id", ids, self.limits.vocab_size)
        live = (self.admitted_at[index] <= sequence) & (position < self.limits.max_context_tokens)
        index, position = index[live], position[live]
        self.tokens[index, position] = ids[live]
        self.num_tokens[index] = np.maximum(self.num_tokens[index], position + 1)


def _parallel(what: str, *lists: Collection[int]) -> tuple[Int64s, ...]:
    if len({len(values) for values in lists}) != 1:
        raise ProtocolError(f"{what}: parallel lists of one length expected, got {[len(values) for values in lists]}")
    return tuple(np.asarray(values, np.int64) for values in lists)


def _check(what: str, values: NDArray[np.signedinteger], limit: int) -> None:
    """Raises ProtocolError unless all values are in [0, limit)."""
    if len(values) and not (values.min() >= 0 and values.max() < limit):
        wrong = values[(values < 0) | (values >= limit)][0]
        raise ProtocolError(f"{what} {wrong} is outside [0, {limit})")
