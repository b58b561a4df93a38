"""One choice of an open request: what was asked, what came, what the client was given. Pure.

It keeps the prompt and every token emitted, which is what makes every other process replaceable: after a lost
generation the choice says what to submit again, and what comes a second time is dropped by its output index. Never
waits, never sends; what must be done is returned as an effect.

Invariants: the text given out never changes afterwards; a choice has at most one ending, and `take` hands it out once;
nothing is taken after it.
"""

from dataclasses import dataclass, field, replace

from services.core.ids import RequestId, TokenId
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    RequestEvent,
    Submission,
    TokenLogprobs,
)
from services.router.openai.refusal import Kind, RefusalError
from services.router.streams.choice_text import ChoiceText

MAX_RESUBMISSIONS = 8
"""How often one request may be given to a new generation: one that kills each of them must not do so for ever."""

_REJECT_KIND = {
    RejectReason.OVERLOADED: Kind.OVERLOADED,
    RejectReason.INVALID: Kind.INVALID,
    RejectReason.UNAVAILABLE: Kind.UNAVAILABLE,
}
RETRY_AFTER_S = 1
"""What a client that meets a full queue is told to wait, in seconds."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended: a finish reason the client knows, or a failure."""

    reason: FinishReason
    failure: RefusalError | None = None
    """Set exactly where the reason is ABORT or ERROR."""


@dataclass(slots=True)
class Delta:
    """What became final since the last one, several steps together where the client is slow."""

    text: str = ""
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Beside `token_ids`, where they were asked for."""
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class FinishAt:
    """Effect: tell the scheduler that the output ends after this many tokens."""

    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Effect: the scheduler would not take a resubmission now; submit it again a little later."""

    why: str


Effect = FinishAt | TryAgain


class Choice:
    """One choice of one prompt. `echo` is given out before the first token."""

    __slots__ = (
        "_attempt",
        "_pending",
        "_submission",
        "_text",
        "_token_ids",
        "ending",
        "first_token_s",
        "index",
        "num_cached_tokens",
        "num_output_tokens",
        "waiting_since_s",
    )

    def __init__(self, index: int, submission: Submission, text: ChoiceText, echo: str = "") -> None:
        assert len(submission.token_ids) == submission.num_prompt_tokens, "a new choice has emitted nothing"
        self.index = index
        self.ending: Ending | None = None
        self.num_cached_tokens: int | None = None
        self.num_output_tokens = 0
        self.first_token_s: float | None = None
        self.waiting_since_s: float | None = None
        """When the generation that had it was lost; None while one has it."""
        self._submission = submission
        self._token_ids: list[TokenId] = []
        self._text = text
        self._attempt = 0
        self._pending: Delta = Delta(text=echo)

    @property
    def request_id(self) -> RequestId:
        """The id under which the scheduler knows it now; another one after each resubmission."""
        base = self._submission.request_id
        return base if self._attempt == 0 else RequestId(f"{base}+{self._attempt}")

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._submission.num_prompt_tokens

    @property
    def num_resubmissions(self) -> int:
        """How often it was given to another generation."""
        return self._attempt

    @property
    def submission(self) -> Submission:
        """What to give to the scheduler now: the prompt, what was emitted, and the same seed."""
        return replace(
            self._submission,
            request_id=self.request_id,
            token_ids=self._submission.token_ids + tuple(self._token_ids),
        )

    def on_event(self, event: RequestEvent, now_s: float) -> Effect | None:
        """Takes what the scheduler says about `request_id`; `take` has what it brought."""
        if self.ending is not None:
            return None
        match event:
            case Admitted():
                self.waiting_since_s = None
                if self.num_cached_tokens is None:
                    self.num_cached_tokens = event.num_cached_tokens
                return None
            case Emitted():
                return self._emit(event, now_s)
            case Finished():
                self._finish(event)
                return None
            case Rejected():
                return self._reject(event, now_s)

    def on_lost(self, now_s: float) -> bool:
        """The generation that had it is gone: True if it is to be submitted again, False if it has ended.

        An output that may be complete is submitted as well: the scheduler alone says that it ends, and why.
        """
        if self.ending is not None:
            return False
        if self._attempt >= MAX_RESUBMISSIONS:
            self.fail(Kind.FAILED, f"the request was given to {MAX_RESUBMISSIONS + 1} generations and all were lost")
            return False
        self._attempt += 1
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return True

    def overdue(self, now_s: float, budget_s: float) -> bool:
        """True if it has waited for a new generation for longer than its budget."""
        return self.ending is None and self.waiting_since_s is not None and now_s - self.waiting_since_s > budget_s

    def fail(self, kind: Kind, message: str, *, field_name: str | None = None) -> None:
        """Ends it with an error, unless it has ended."""
        retry_after_s = RETRY_AFTER_S if kind in (Kind.OVERLOADED, Kind.UNAVAILABLE) else None
        self._end(FinishReason.ERROR, RefusalError(kind, message, field=field_name, retry_after_s=retry_after_s))

    def take(self) -> Delta | None:
        """What to give to the client now, or None: never an empty one before the ending."""
        pending = self._pending
        if pending.ending is None and not pending.text:
            return None
        self._pending = Delta()
        return pending

    def _emit(self, event: Emitted, now_s: float) -> Effect | None:
        skip = len(self._token_ids) - event.first_output_index
        if skip < 0:
            expected, came = len(self._token_ids), event.first_output_index
            self.fail(Kind.FAILED, f"output token {expected} was expected and {came} came: tokens were lost")
            return None
        self.waiting_since_s = None
        if self.first_token_s is None:
            self.first_token_s = now_s
        for place in range(skip, len(event.token_ids)):
            logprobs = event.logprobs[place] if event.logprobs else None
            if self._push(event.token_ids[place], logprobs):
                return FinishAt(len(self._token_ids))
        return None

    def _push(self, token_id: TokenId, logprobs: TokenLogprobs | None) -> bool:
        """Takes one token; True if a stop string ended the text with it."""
        self._token_ids.append(token_id)
        self.num_output_tokens = len(self._token_ids)
        if token_id in self._submission.stop_token_ids:
            # Ends the output and is no part of it; the scheduler says so next.
            return False
        pending = self._pending
        pending.token_ids.append(token_id)
        if logprobs is not None:
            pending.logprobs.append(logprobs)
        pending.text += self._text.push(token_id)
        if self._text.is_stopped:
            self._end(FinishReason.STOP, None)
        return self._text.is_stopped

    def _finish(self, event: Finished) -> None:
        if self.num_cached_tokens is None:
            self.num_cached_tokens = event.num_cached_tokens
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if event.num_output_tokens != len(self._token_ids):
                told, came = event.num_output_tokens, len(self._token_ids)
                self.fail(Kind.FAILED, f"the output ended with {told} tokens and {came} came: tokens were lost")
                return
            self._end_whole(event.reason)
        elif event.reason is FinishReason.ABORT:
            self.fail(Kind.UNAVAILABLE, "the request was aborted by the server")
        else:
            self.fail(Kind.FAILED, event.error or "the request failed in the model")

    def _reject(self, event: Rejected, now_s: float) -> Effect | None:
        if self._attempt > 0 and event.reason is not RejectReason.INVALID:
            if self.waiting_since_s is None:
                self.waiting_since_s = now_s
            return TryAgain(event.message)
        self.fail(_REJECT_KIND[event.reason], event.message, field_name=event.field or None)
        return None

    def _end_whole(self, reason: FinishReason) -> None:
        """Ends the output where it is; what was held back belongs to it, up to a stop string in it."""
        self._pending.text += self._text.finish()
        self._end(FinishReason.STOP if self._text.is_stopped else reason, None)

    def _end(self, reason: FinishReason, failure: RefusalError | None) -> None:
        if self.ending is None:
            self.ending = Ending(reason, failure)
            self._pending.ending = self.ending
