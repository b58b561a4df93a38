"""Who may enter: what a submission must satisfy, and who waits in which order. Pure."""

import math
from bisect import insort
from collections.abc import Iterator

from services.core.request import Rejected, RejectReason, SamplingParams, Submission
from services.scheduler.batch.limits import BatchLimits
from services.scheduler.batch.running_request import Request

MAX_TOP_K = 2**31 - 1
"""What a rank's table holds."""


class WaitingQueue:
    """Requests outside the batch, lowest priority number first, then by arrival; preempted ones keep their place."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request | None:
        """Who is next: nobody overtakes it, so that a long prompt is not starved by short ones."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """Puts it where its order says."""
        insort(self._requests, request, key=lambda waiting: waiting.order)

    def remove(self, request: Request) -> None:
        """Takes it out, wherever it waits."""
        self._requests.remove(request)


def refusal(submission: Submission, limits: BatchLimits) -> Rejected | None:
    """Why this submission can never be served, with both numbers; None: it can.

    A prompt must leave room for one output token; `max_output_tokens` is not refused but cut at the context. A
    resubmission, whose prompt was accepted before, is never too long: it ends where it stands.
    """
    num_given, num_prompt = len(submission.token_ids), submission.num_prompt_tokens
    if not 1 <= num_prompt <= num_given:
        return _invalid(
            submission, "num_prompt_tokens", f"{num_prompt} of {num_given} given tokens; at least 1, at most all"
        )
    if submission.max_output_tokens < 1:
        return _invalid(submission, "max_output_tokens", f"{submission.max_output_tokens} output tokens; at least 1")
    if num_prompt > limits.pool_tokens:
        text = f"a prompt of {num_prompt} tokens is larger than the pool of {limits.pool_tokens} tokens: shorten it"
        return _invalid(submission, "token_ids", text)
    if num_prompt >= limits.context_tokens:
        text = (
            f"a prompt of {num_prompt} tokens leaves no room for an output in the context of "
            f"{limits.context_tokens} tokens: at most {limits.context_tokens - 1}"
        )
        return _invalid(submission, "token_ids", text)
    lowest, highest = min(submission.token_ids), max(submission.token_ids)
    if limits.num_vocab is not None and not 0 <= lowest <= highest < limits.num_vocab:
        text = f"token ids from {lowest} to {highest}; the vocabulary has [0, {limits.num_vocab})"
        return _invalid(submission, "token_ids", text)
    return _sampling_refusal(submission, limits)


def _sampling_refusal(submission: Submission, limits: BatchLimits) -> Rejected | None:
    """Parameters that the sampler would not take: in a step they would end the generation, with everybody's requests.

    NaN is in no range.
    """
    sampling = submission.sampling
    rules = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "in [0, inf)"),
        ("top_k", sampling.top_k, 0 <= sampling.top_k <= MAX_TOP_K, f"in [0, {MAX_TOP_K}]"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "finite"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty < math.inf, "in (0, inf)"),
    )
    for name, value, is_good, wanted in rules:
        if not is_good:
            return _invalid(submission, f"sampling.{name}", f"{name} {value:g}; {wanted} expected")
    return _bias_refusal(submission, sampling, limits.num_vocab)


def _bias_refusal(submission: Submission, sampling: SamplingParams, num_vocab: int | None) -> Rejected | None:
    for token_id, bias in sampling.logit_bias:
        if token_id < 0 or (num_vocab is not None and token_id >= num_vocab) or not math.isfinite(bias):
            text = f"token id {token_id} with bias {bias:g}; an id of the vocabulary [0, {num_vocab}), finite, expected"
            return _invalid(submission, "sampling.logit_bias", text)
    return None


def _invalid(submission: Submission, field: str, message: str) -> Rejected:
    return Rejected(submission.request_id, RejectReason.INVALID, field, message)
