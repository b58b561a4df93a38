"""A request as the scheduler sees it: what was asked, what has been computed, why it ended. Values only."""

from dataclasses import dataclass
from enum import Enum

from services.core.ids import RequestId, TokenId


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RejectReason(Enum):
    """Why a request was not taken."""

    OVERLOADED = "overloaded"
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; every field has its effective value: the router fills defaults and draws seeds."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all ids."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64 bits, unsigned; randomness is a function of (seed, output position)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as submitted, new or again after a lost generation."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    """Prompt, then the tokens already emitted."""
    num_prompt_tokens: int
    max_output_tokens: int
    """In total, emitted ones included."""
    sampling: SamplingParams
    stop_token_ids: frozenset[TokenId] = frozenset()
    num_logprobs: int | None = None
    """Top log-probabilities per output token; None: none at all, 0: the sampled one only."""
    priority: int = 0
    """Lower goes first."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one emitted position, of the model's own distribution."""

    sampled: float
    top: tuple[tuple[TokenId, float], ...]
    """(id, log-probability) in falling order."""


# What the scheduler tells a router about a request, in the order it happened.


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in the batch for the first time."""

    request_id: RequestId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """New output tokens."""

    request_id: RequestId
    first_output_index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per id where asked for, else empty."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended; nothing follows."""

    request_id: RequestId
    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was not taken; nothing follows."""

    request_id: RequestId
    reason: RejectReason
    field: str
    message: str


RequestEvent = Admitted | Emitted | Finished | Rejected
