"""A request's sampling parameters as words of the request table: one column for each, in the order of `Param`.

Floats keep their bits. Penalties that change nothing and biases are told apart on the host, where a step is prepared.
"""

from enum import IntEnum

import numpy as np

from services.core.request import SamplingParams
from services.worker.steps.words import Int32s


class Param(IntEnum):
    """Columns of the table, 32 bits each; `FLOATS` says which are float32."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5
    TOP_K = 6
    NUM_PROMPT_TOKENS = 7
    SEED_LOW = 8
    SEED_HIGH = 9


NUM_FLOATS = Param.REPETITION + 1
"""The columns before it are float32, those from here on int32; the two of the seed are its halves."""


def param_words(params: SamplingParams, num_prompt_tokens: int) -> Int32s:
    """[len(Param)] of one request."""
    words = np.empty(len(Param), np.int32)
    words[:NUM_FLOATS].view(np.float32)[:] = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    words[NUM_FLOATS : Param.SEED_LOW] = (params.top_k, num_prompt_tokens)
    words[Param.SEED_LOW :] = np.array([params.seed], np.uint64).view(np.int32)
    return words


def is_penalised(params: SamplingParams) -> bool:
    """Whether any of the three penalties changes a logit."""
    neutral = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    return not neutral
