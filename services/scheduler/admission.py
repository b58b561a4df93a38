"""Who may enter: what a submission must satisfy, and who waits in which order. Pure."""

from bisect import insort
from collections.abc import Iterator

from services.core.request import Rejected, RejectReason, Submission
from services.scheduler.limits import BatchLimits
from services.scheduler.resident import Request


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
    return None


def _invalid(submission: Submission, field: str, message: str) -> Rejected:
    return Rejected(submission.request_id, RejectReason.INVALID, field, message)
