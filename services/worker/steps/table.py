"""The request table: what a rank knows of each running request, by request index, where the device is.

Tokens, block tables and sampling parameters are words of the device; a step's deltas are checked on the host, against
the few counts that checking needs, and go there in one scatter, never row by row. Nothing here decides: the table holds
what the log said. Invariants: every index, position and id is checked against the limits of RESET before it is used, so
a broken log is a `ProtocolError` and never a write out of range; a token sampled by a step from before a row was taken
again is dropped (`admitted_at`).

Shapes: R max_resident_requests, C max_context_tokens, B blocks of C tokens, P sampling parameters, S rows of a step, T
tokens of a step.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.core.ids import BLOCK_SLOTS, LogIndex, blocks_for
from services.core.log import ProtocolError
from services.core.step import AdmittedRequest, StepPlan
from services.worker.steps.sampling_words import Param, is_penalised, param_words
from services.worker.steps.words import NO_CHANGES, DeviceWords, Int32s, Int64s, WordChanges, joined

_FREE = np.iinfo(np.int64).max
"""`admitted_at` of a row that nobody has: later than any step, so that late tokens fall through one comparison."""

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
    """The rows of one step, checked; [S] unless said. On the host."""

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

    def tokens(self) -> tuple[Int64s, Int64s]:
        """[T] each: the request index and the position of every token."""
        if self.num_tokens == len(self.request):
            return self.request, self.start
        offset = self.start - self.query_start[:-1]
        positions = np.arange(self.num_tokens) + np.repeat(offset, self.row_tokens)
        return np.repeat(self.request, self.row_tokens), positions


class RequestTable:
    """Tokens, blocks and sampling parameters of every running request."""

    def __init__(self, limits: TableLimits, device: torch.device | None = None) -> None:
        num_rows, num_tokens = limits.max_resident_requests, limits.max_context_tokens
        if num_rows < 1 or num_tokens < 1 or 4 * num_rows * num_tokens > MAX_TOKEN_TABLE_BYTES:
            raise ProtocolError(
                f"RESET asks for {num_rows} requests of {num_tokens} tokens; both above 0 and a token table of at "
                f"most {MAX_TOKEN_TABLE_BYTES} bytes expected: lower max_resident_requests or context_tokens"
            )
        self.limits, self._table_blocks = limits, blocks_for(num_tokens)
        self._tokens_begin = len(Param) * num_rows
        self._blocks_begin = self._tokens_begin + num_rows * num_tokens
        end = self._blocks_begin + num_rows * self._table_blocks
        self.state = DeviceWords(end, device or torch.device("cpu"))
        words = self.state.words
        self.params_PR = words[: self._tokens_begin].view(len(Param), num_rows)
        self.tokens_RC = words[self._tokens_begin : self._blocks_begin].view(num_rows, num_tokens)
        self.blocks_RB = words[self._blocks_begin : end].view(num_rows, self._table_blocks)
        # What is checked, on the host.
        self.num_tokens = np.zeros(num_rows, np.int64)
        """Tokens known: given at admission, or applied since."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.admitted_at = np.full(num_rows, _FREE, np.int64)
        self._last_block = np.zeros(num_rows, np.int64)
        """The highest block of each row's table."""
        self.num_logprobs = np.zeros(num_rows, np.int32)
        self.wants_logprobs = np.zeros(num_rows, np.bool_)
        self.penalised = np.zeros(num_rows, np.bool_)
        self.num_bias = np.zeros(num_rows, np.int32)
        self.bias: dict[int, tuple[Int32s, NDArray[np.float32]]] = {}
        """(ids, added values) of the rows whose requests carry a logit bias."""

    def running(self) -> list[int]:
        """Indexes of the requests that are in the batch."""
        return np.flatnonzero(self.admitted_at != _FREE).tolist()

    @property
    def blocks_end(self) -> int:
        """One above the highest block of any running request's table."""
        has_blocks = (self.admitted_at != _FREE) & (self.num_blocks > 0)
        return int(self._last_block.max(initial=-1, where=has_blocks)) + 1

    def apply_deltas(self, plan: StepPlan, sequence: LogIndex) -> WordChanges:
        """Applies a step's released, admitted and appended blocks, in this order; which words became what.

        Raises:
            ProtocolError: a row is freed that is free, taken that is not, or a value is out of range.
        """
        if plan.released:
            self._release(np.asarray(plan.released, np.int64))
        changes = [self._admit(request, sequence) for request in plan.admitted]
        if plan.block_id or plan.block_request_index or plan.block_position:
            changes.append(self._append_blocks(plan))
        if not changes:
            return NO_CHANGES
        every = joined(changes)
        self.state.change(every)
        return every

    def _release(self, index: Int64s) -> None:
        _check("released request index", index, self.limits.max_resident_requests)
        self._check_running(index, "is released")
        if len(np.unique(index)) != len(index):
            raise ProtocolError(f"a request index is released twice in one step: {sorted(index.tolist())}")
        self.admitted_at[index] = _FREE

    def _admit(self, request: AdmittedRequest, sequence: LogIndex) -> WordChanges:
        index, num_tokens, num_blocks = int(request.request_index), len(request.token_ids), len(request.block_ids)
        self._check_admission(request)
        tokens, blocks = np.array(request.token_ids, np.int64), np.array(request.block_ids, np.int64)
        _check("token id", tokens, self.limits.vocab_size)
        _check("block id", blocks, self.limits.num_blocks)
        self._put_bias(request)
        self.num_tokens[index], self.num_blocks[index] = num_tokens, num_blocks
        self.num_prompt_tokens[index] = request.num_prompt_tokens
        self._last_block[index] = blocks.max(initial=-1)
        self.wants_logprobs[index] = request.num_logprobs is not None
        self.num_logprobs[index] = min(request.num_logprobs or 0, self.limits.vocab_size)
        self.penalised[index] = is_penalised(request.sampling)
        self.admitted_at[index] = sequence
        return self._admitted_words(request, tokens, blocks)

    def _check_admission(self, request: AdmittedRequest) -> None:
        index, num_tokens, num_blocks = request.request_index, len(request.token_ids), len(request.block_ids)
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
        if num_blocks > self._table_blocks:
            raise ProtocolError(f"{request.request_id} has {num_blocks} blocks, at most {self._table_blocks} fit")

    def _put_bias(self, request: AdmittedRequest) -> None:
        index, bias = request.request_index, request.sampling.logit_bias
        self.bias.pop(index, None)
        self.num_bias[index] = len(bias)
        if bias:
            ids = np.array([token for token, _ in bias], np.int64)
            _check("biased token id", ids, self.limits.vocab_size)
            self.bias[index] = (ids.astype(np.int32), np.array([value for _, value in bias], np.float32))

    def _admitted_words(self, request: AdmittedRequest, tokens: Int64s, blocks: Int64s) -> WordChanges:
        index, num_rows = request.request_index, self.limits.max_resident_requests
        addresses = (
            index + num_rows * np.arange(len(Param)),
            self.token_addresses(index, np.arange(len(tokens))),
            self.block_addresses(index, np.arange(len(blocks))),
        )
        params = param_words(request.sampling, request.num_prompt_tokens)
        values = (params, tokens.astype(np.int32), blocks.astype(np.int32))
        return WordChanges(np.concatenate(addresses), np.concatenate(values))

    def _append_blocks(self, plan: StepPlan) -> WordChanges:
        index, position, block = _parallel(
            "appended blocks", plan.block_request_index, plan.block_position, plan.block_id
        )
        _check("block's request index", index, self.limits.max_resident_requests)
        _check("block position", position, self._table_blocks)
        _check("block id", block, self.limits.num_blocks)
        self._check_running(index, "is given a block")
        before = self.num_blocks.copy()
        np.maximum.at(self.num_blocks, index, position + 1)
        appended = np.bincount(index, minlength=len(before))
        wrong = (self.num_blocks - before != appended)[index] | (position < before[index])
        if wrong.any():
            first = index[wrong][0]
            raise ProtocolError(
                f"blocks of request index {first} must follow its {before[first]} without a gap, got positions "
                f"{sorted(position[index == first].tolist())}"
            )
        np.maximum.at(self._last_block, index, block)
        return WordChanges(self.block_addresses(index, position), block.astype(np.int32))

    def rows(self, plan: StepPlan) -> Rows:
        """The step's rows, after its deltas and after the tokens it reads.

        Raises:
            ProtocolError: a row of nobody, twice, outside its blocks or the batch, or of tokens not known here.
        """
        index, start, count = _parallel("rows", plan.row_request_index, plan.row_start, plan.row_num_tokens)
        if not len(index):
            raise ProtocolError("a step without rows: write none instead")
        _check("row's request index", index, self.limits.max_resident_requests)
        self._check_running(index, "has a row")
        if len(set(plan.row_request_index)) < len(index):
            raise ProtocolError(f"a request has two rows in one step: indexes {index.tolist()}")
        if _least(start) < 0 or _least(count) < 1:
            raise ProtocolError(f"rows start at 0 or above and have tokens, got starts {start} of {count} tokens")
        end = start + count
        self._check_reach(index, end)
        query_start = np.zeros(len(index) + 1, np.int32)
        np.add.accumulate(count, out=query_start[1:])
        if query_start[-1] > self.limits.max_batch_tokens:
            raise ProtocolError(
                f"a step of {query_start[-1]} tokens, at most {self.limits.max_batch_tokens} fit the activations: "
                "lower scheduler.max_batch_rows"
            )
        return Rows(index, start, count, query_start, end.astype(np.int32), _sampled_rows(plan, len(index)))

    def _check_reach(self, index: Int64s, end: Int64s) -> None:
        limits, slots = self.limits, self.num_blocks[index] * BLOCK_SLOTS
        # Tokens known are within the context.
        room = np.minimum(slots, self.num_tokens[index])
        if np.logical_or.reduce(end > room):
            row = int(np.flatnonzero(end > room)[0])
            raise ProtocolError(
                f"row {row} reads tokens up to {end[row]} of request index {index[row]}, which has "
                f"{self.num_tokens[index[row]]} tokens known here, {slots[row]} slots and a context of "
                f"{limits.max_context_tokens}: give it blocks, and name the step it reads from in tokens_through"
            )

    def _check_running(self, index: Int64s, what: str) -> None:
        free = self.admitted_at[index] == _FREE
        if np.logical_or.reduce(free):
            raise ProtocolError(f"request index {index[free][0]} {what}, but nobody has it: admit it first")

    def token_addresses(self, index: Int64s | int, position: Int64s) -> Int64s:
        """Where the tokens at these positions are among the words."""
        return self._tokens_begin + index * self.limits.max_context_tokens + position

    def block_addresses(self, index: Int64s | int, position: Int64s) -> Int64s:
        """Where these places of block tables are among the words."""
        return self._blocks_begin + index * self._table_blocks + position

    def apply_tokens(self, sequence: LogIndex, index: Int64s, position: Int64s, ids: Tensor) -> None:
        """Writes the ids (int32, on the device) that step `sequence` sampled for `index` at `position`, all [N].

        Ids for a row that was freed or taken again since are dropped, and so is an id at the end of the context: no
        later step can read it.
        """
        live = (self.admitted_at[index] <= sequence) & (position < self.limits.max_context_tokens)
        if not np.logical_and.reduce(live):
            index, position, ids = index[live], position[live], ids[torch.from_numpy(live).to(ids.device)]
        self.state.put(self.token_addresses(index, position), ids)
        self.num_tokens[index] = np.maximum(self.num_tokens[index], position + 1)


def check_sampled(ids: Tensor, vocab_size: int) -> None:
    """Raises ProtocolError for an id from another rank that is outside the vocabulary."""
    _check("sampled token id", ids.numpy(), vocab_size)


def _least(values: NDArray[np.signedinteger]) -> int:
    """Of some; without the layers of `min`, which take longer than a few rows do."""
    return int(np.minimum.reduce(values))


def _sampled_rows(plan: StepPlan, num_rows: int) -> Int64s:
    sampled = np.asarray(plan.sampled_row, np.int64)
    _check("sampled row", sampled, num_rows)
    if len(sampled) > 1 and np.logical_or.reduce(sampled[1:] <= sampled[:-1]):
        raise ProtocolError(f"sampled rows must rise, got {sampled.tolist()}")
    return sampled


def _parallel(what: str, *lists: Collection[int]) -> tuple[Int64s, ...]:
    if len({len(values) for values in lists}) != 1:
        raise ProtocolError(f"{what}: parallel lists of one length expected, got {[len(values) for values in lists]}")
    return tuple(np.asarray(values, np.int64) for values in lists)


def _check(what: str, values: NDArray[np.signedinteger], limit: int) -> None:
    """Raises ProtocolError unless all values are in [0, limit)."""
    if len(values) and not (_least(values) >= 0 and np.maximum.reduce(values) < limit):
        wrong = values[(values < 0) | (values >= limit)][0]
        raise ProtocolError(f"{what} {wrong} is outside [0, {limit})")
