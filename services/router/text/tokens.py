"""Text to token ids and back, for one model.

Encoding runs in a bounded number of threads that leave the event loop free, and a text that cannot fit is refused by
its length before it is tokenised. Control tokens that are written in a text are taken as control tokens, as other
servers of this API do: in a chat it is the template that writes them. What a client wrote comes masked
(`control_texts.py`) and is read letter by letter.

Invariant: a prompt has the model's prefix (BOS) exactly once where the files ask for one, whether or not the text or a
template has written it already; where they ask for none, only what the text itself writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType

import anyio
import anyio.to_thread
from tokenizers import Tokenizer

from services.core.errors import ConfigurationError
from services.core.ids import TokenId
from services.models.gguf import GgufMetadata
from services.models.model_file import ModelFileError
from services.models.model_files import ModelFiles, TokenizerFolder
from services.router.text.detokenize import Detokenizer
from services.router.text.gguf_tokenizer import adds_bos_by_default, build_tokenizer
from services.router.text.vocabulary import Vocabulary, vocabulary_from_gguf, vocabulary_from_tokenizer

MAX_WAITING_ENCODES = 256
"""Texts that may wait for a thread; above it the router is overloaded and says so."""
MAX_NORMALIZER_SHRINK = 3
"""Composing characters (NFC) makes UTF-8 at most three times shorter."""


class PromptRefusedError(ValueError):
    """The text cannot be a prompt of this model; the message is for the client."""


class TokenizerBusyError(RuntimeError):
    """Too many texts wait to be tokenised; the client may try again."""


class Tokens:
    """The tokenizer of one model. `encode` is for the event loop, the rest is plain calls."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._literal: Tokenizer | None = None
        self._literal_lock = Lock()
        self._threads = anyio.CapacityLimiter(num_threads)
        shrink = MAX_NORMALIZER_SHRINK if tokenizer.normalizer is not None else 1
        self._max_bytes_per_token = vocabulary.longest_piece_bytes * shrink

    async def encode(
        self,
        text: str,
        *,
        max_tokens: int,
        add_prefix: bool = True,
        masks: Mapping[str, str] = MappingProxyType({}),
    ) -> list[TokenId]:
        """The ids of a prompt of at most `max_tokens`, computed beside the event loop.

        A character that `masks` has stands for a text that is no control token, whatever it looks like.

        Raises `PromptRefusedError` for a text that is too long, empty (with no prefix either) or no valid Unicode, and
        `TokenizerBusyError` when too many wait.
        """
        self._check_length(text, max_tokens)
        if self._threads.statistics().tasks_waiting >= MAX_WAITING_ENCODES:
            raise TokenizerBusyError(f"{MAX_WAITING_ENCODES} prompts wait to be tokenised already: try again later")
        ids = await anyio.to_thread.run_sync(self._encode_prompt, text, add_prefix, masks, limiter=self._threads)
        if not ids:
            raise PromptRefusedError("the prompt is empty, and this model begins prompts with no token of its own")
        if len(ids) > max_tokens:
            raise PromptRefusedError(f"the prompt has {len(ids)} tokens, at most {max_tokens} fit")
        return ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuses by length what no tokenisation could make fit; exact in that it never refuses what would."""
        most = max_tokens * self._max_bytes_per_token
        # Characters first: counting the bytes of a huge text is itself not free.
        if len(text) > most:
            raise PromptRefusedError(f"the prompt has {len(text)} characters, more than {max_tokens} tokens can hold")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise PromptRefusedError(f"the prompt is not valid Unicode: {error.reason} at {error.start}") from error
        if num_bytes > most:
            raise PromptRefusedError(f"the prompt has {num_bytes} bytes, more than {max_tokens} tokens can hold")

    def _encode_prompt(self, text: str, add_prefix: bool, masks: Mapping[str, str]) -> list[TokenId]:
        ids = self.encode_text(text, masks)
        return self.framed(ids) if add_prefix else ids

    def encode_text(self, text: str, masks: Mapping[str, str] = MappingProxyType({})) -> list[TokenId]:
        """The ids of a piece of text, with nothing added. Takes as long as the text is: not for the event loop."""
        if masks:
            return self._encode_masked(text, masks)
        # The batch call is the one that gives the interpreter free while it works.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [TokenId(index) for index in encoding.ids]

    def _encode_masked(self, text: str, masks: Mapping[str, str]) -> list[TokenId]:
        """As `encode_text`: the control tokens where they stand, and what is between them without any."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        table = str.maketrans(dict(masks))
        parts: list[str] = []
        control: list[TokenId] = []
        position = 0
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self.vocabulary.control_texts:
                parts.append(text[position:start].translate(table))
                control.append(TokenId(index))
                position = end
        parts.append(text[position:].translate(table))
        literal = self._literal_tokenizer().encode_batch_fast(parts, add_special_tokens=False)
        ids = [TokenId(index) for index in literal[0].ids]
        for token_id, encoded in zip(control, literal[1:], strict=True):
            ids += [token_id, *map(TokenId, encoded.ids)]
        return ids

    def framed(self, ids: Sequence[TokenId]) -> list[TokenId]:
        """`ids` with the model's prefix and suffix exactly once each."""
        prefix, suffix, body = list(self.vocabulary.prefix_ids), list(self.vocabulary.suffix_ids), list(ids)
        while prefix and body[: len(prefix)] == prefix:
            body = body[len(prefix) :]
        while suffix and body[-len(suffix) :] == suffix:
            body = body[: -len(suffix)]
        return prefix + body + suffix

    def decode(self, ids: Iterable[TokenId], *, with_control: bool = False) -> str:
        """The text of ids that stand for themselves (not the continuation of others)."""
        detokenizer = Detokenizer(self.vocabulary, with_control=with_control)
        return detokenizer.push(ids) + detokenizer.flush()

    def _literal_tokenizer(self) -> Tokenizer:
        """A second tokenizer that knows no control tokens; made when first asked for, since few ask."""
        with self._literal_lock:
            if self._literal is None:
                literal = Tokenizer.from_str(self._tokenizer.to_str())
                literal.encode_special_tokens = True
                self._literal = literal
            return self._literal


def open_tokens(model: ModelFiles, num_threads: int = 1) -> Tokens:
    """The tokenizer of an opened model. Raises `ConfigurationError` if its files describe none that is supported."""
    try:
        return _from_source(model.tokenizer, model.stated_end_ids, num_threads)
    except ModelFileError as error:
        raise ConfigurationError(f"the tokenizer of {model.name} cannot be used: {error}") from error


def _from_source(source: GgufMetadata | TokenizerFolder, end_ids: frozenset[TokenId], num_threads: int) -> Tokens:
    if isinstance(source, GgufMetadata):
        vocabulary = vocabulary_from_gguf(source, end_ids, adds_bos_by_default(source))
        return Tokens(build_tokenizer(source), vocabulary, num_threads)
    path = source.tokenizer_json
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises no narrower class, for an absent file as for a damaged one.
    except Exception as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    # Some files ask for it, for training; a prompt is never cut or filled up in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokens(tokenizer, vocabulary_from_tokenizer(tokenizer, source.settings, end_ids), num_threads)
