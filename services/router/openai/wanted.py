"""What a client asked for, validated and typed: the one form that HTTP and gRPC requests take. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.core.ids import TokenId

Prompt = str | tuple[TokenId, ...]
"""Text to tokenise, or ids that the client made itself."""


class Endpoint(Enum):
    """Which shape the answer has."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a request may ask for; from the settings and the model."""

    vocabulary_size: int
    max_context_tokens: int
    max_choices: int = 16
    max_stop_strings: int = 16
    max_top_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are to be drawn; defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all ids."""
    min_p: float = 0.0
    seed: int | None = None
    """64 bits, unsigned; None: draw one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request: the prompts of a completion, or the messages of a chat, and what to do with them."""

    endpoint: Endpoint
    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Mapping[str, object], ...] = ()
    max_output_tokens: int | None = None
    """None: the rest of the window."""
    num_choices: int = 1
    """For each prompt."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[TokenId] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """Top log-probabilities per token; None: none at all, 0: the sampled one only."""
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
