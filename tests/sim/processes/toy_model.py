"""A model that is arithmetic: the next token is a function of the whole history, and of nothing else.

A chain is a number for a prefix: two prefixes have one chain only if they are equal. So a chain in a slot says which
token stands there, at which position, behind which history; and the reference is the model run alone, without blocks,
batches, ranks or flips.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.core.ids import TokenId

VOCAB = 26
END_ID = TokenId(0)
"""Written as the letter a; ends an answer where the request says so."""
EMPTY = 1
_MASK = (1 << 61) - 1
_END_SHARE = 3
_SPREAD = 64


def chained(chain: int, token: int) -> int:
    """The chain of the prefix one token longer."""
    return (chain * 6364136223846793005 + token + 1442695040888963407) & _MASK


def chain_of(tokens: Iterable[int]) -> int:
    """The chain of a whole prefix."""
    chain = EMPTY
    for token in tokens:
        chain = chained(chain, token)
    return chain


def next_token(chain: int) -> TokenId:
    """What the model says after the prefix of this chain."""
    drawn = (chain >> 23) % _SPREAD
    return END_ID if drawn < _END_SHARE else TokenId(1 + drawn % (VOCAB - 1))


def letter(token: int) -> str:
    """How a token is written."""
    return chr(ord("a") + token)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a client must get: the ids shown, the text, and whether its end is a stop or the length."""

    token_ids: tuple[TokenId, ...]
    text: str
    is_stopped: bool
    is_failed: bool = False
    """The model could not say the token after these."""


def reference(
    prompt: tuple[TokenId, ...],
    max_tokens: int,
    end_ids: frozenset[TokenId],
    stop: str | None,
    poison: int | None = None,
) -> Reference:
    """Runs one request alone to a sequence of `max_tokens` tokens at most."""
    chain, output, text = chain_of(prompt), list[TokenId](), ""
    while len(prompt) + len(output) < max_tokens:
        if len(output) == poison:
            return Reference(tuple(output), text, False, is_failed=True)
        token = next_token(chain)
        if token in end_ids:
            return Reference(tuple(output), text, True)
        output.append(token)
        text += letter(token)
        if stop is not None and text.endswith(stop):
            return Reference(tuple(output), text[: -len(stop)], True)
        chain = chained(chain, token)
    return Reference(tuple(output), text, False)
