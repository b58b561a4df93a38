"""How long a prefill chunk is. Pure arithmetic."""

from math import sqrt


def chunk_length(start: int, chunk_tokens: int, parity_tokens: int | None = None) -> int:
    """Longest chunk that may begin at `start`, at least 1.

    With a parity length C a token at position p costs 1 + p/C, its attention included, and a chunk may cost what one of
    `chunk_tokens` does at position 0: later chunks are shorter, so that stages of a pipeline are equally busy. The
    answer is the root of length²/2C + length·(1 + start/C) = cost.
    """
    if parity_tokens is None:
        return chunk_tokens
    cost = chunk_tokens * (1 + chunk_tokens / (2 * parity_tokens))
    slope = parity_tokens + start
    # The small term keeps an exact root from being rounded down.
    return max(1, int(sqrt(slope * slope + 2 * parity_tokens * cost) - slope + 1e-6))


class ChunkBudget:
    """Prompt tokens of one step: what decode rows leave of its `max_tokens`, spent chunk by chunk."""

    __slots__ = ("_chunk_tokens", "_parity_tokens", "num_left")

    def __init__(self, max_tokens: int, chunk_tokens: int, parity_tokens: int | None = None) -> None:
        self.num_left = max_tokens
        self._chunk_tokens = chunk_tokens
        self._parity_tokens = parity_tokens

    def take(self, start: int, remaining: int) -> int:
        """Tokens of the chunk that begins at `start` with `remaining` ahead; 0 only where the budget is spent."""
        length = min(remaining, self.num_left, chunk_length(start, self._chunk_tokens, self._parity_tokens))
        self.num_left -= length
        return length
