"""A model's vocabulary: the bytes that each id stands for, which ids are control, which end an answer.

Built once at start from the model's files, never changed. Text is bytes here, because one character may be spread over
several ids; putting bytes together to characters is `detokenize`'s part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Tokenizer

from services.core.ids import TokenId
from services.models.gguf import GgufMetadata
from services.models.model_file import ModelFileError

END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<|end|>",
        "<|eot|>",
        "<|end_of_turn|>",
        "<eos>",
        "</s>",
    }
)
"""Control tokens that end an answer whatever the files say of them: files are often wrong about which one does."""

SPACE_MARK = "\u2581"
"""How SentencePiece vocabularies write a space."""


class TokenKind(IntEnum):
    """What a GGUF file says of an entry; the numbers are the file's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known of each id."""

    pieces: tuple[bytes, ...]
    """What each id adds to the visible text: nothing for control, unknown and unused ones."""
    control_texts: Mapping[TokenId, str]
    """How each control token is written in a prompt."""
    prefix_ids: tuple[TokenId, ...]
    """What every prompt begins with: the BOS token, or nothing, as the files say."""
    suffix_ids: tuple[TokenId, ...]
    """What every prompt ends with; rarely anything."""
    bos_id: TokenId | None
    eos_id: TokenId | None
    end_ids: frozenset[TokenId]
    """Each of these ends an answer and is not shown."""

    def piece(self, token_id: TokenId, *, with_control: bool = False) -> bytes:
        """The bytes of one id; an id outside the vocabulary (a padded row of the head) has none."""
        if with_control and token_id in self.control_texts:
            return self.control_texts[token_id].encode()
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def control_text(self, token_id: TokenId | None) -> str | None:
        """How the id is written in a template, if it is a control token."""
        return None if token_id is None else self.control_texts.get(token_id)

    @property
    def longest_piece_bytes(self) -> int:
        """No id stands for more bytes of a prompt than this."""
        written = (len(text.encode()) for text in self.control_texts.values())
        return max((1, *map(len, self.pieces), *written))


def byte_alphabet() -> dict[str, int]:
    """The character with which byte-level vocabularies write each byte, to that byte.

    Printable Latin-1 characters stand for themselves, the others are counted up from U+0100 (as GPT-2 did it first).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def byte_level_piece(text: str, alphabet: Mapping[str, int]) -> bytes:
    """The bytes of an entry of a byte-level vocabulary; one that is not written in the alphabet means itself."""
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:
        return text.encode()


def sentencepiece_piece(text: str) -> bytes:
    """The bytes of an entry of a SentencePiece vocabulary: `<0xNN>` is one byte, the mark is a space."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE_MARK, " ").encode()


def vocabulary_from_gguf(metadata: GgufMetadata, stated_end_ids: frozenset[TokenId], adds_bos: bool) -> Vocabulary:
    """The vocabulary of a GGUF file; `adds_bos` is what holds where the file has no flag of its own."""
    texts = metadata.array("tokenizer.ggml.tokens").texts()
    kinds = token_kinds(metadata, len(texts))
    is_byte_level = metadata.text("tokenizer.ggml.model") == "gpt2"
    alphabet = byte_alphabet()
    pieces = []
    for text, kind in zip(texts, kinds, strict=True):
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED):
            pieces.append(b"")
        elif kind is TokenKind.USER_DEFINED:
            pieces.append(text.encode() if is_byte_level else sentencepiece_piece(text))
        else:
            pieces.append(byte_level_piece(text, alphabet) if is_byte_level else sentencepiece_piece(text))
    control = {TokenId(index): texts[index] for index, kind in enumerate(kinds) if kind is TokenKind.CONTROL}
    bos, eos = _stated_id(metadata, "bos", len(texts)), _stated_id(metadata, "eos", len(texts))
    flag = metadata.flag_or_none("tokenizer.ggml.add_bos_token")
    has_suffix = bool(metadata.flag_or_none("tokenizer.ggml.add_eos_token"))
    return Vocabulary(
        pieces=tuple(pieces),
        control_texts=control,
        prefix_ids=(bos,) if bos is not None and (adds_bos if flag is None else flag) else (),
        suffix_ids=(eos,) if eos is not None and has_suffix else (),
        bos_id=bos,
        eos_id=eos,
        end_ids=_end_ids(control, stated_end_ids),
    )


def token_kinds(metadata: GgufMetadata, num_tokens: int) -> list[TokenKind]:
    """The kind of each entry; all are normal where the file does not say."""
    if "tokenizer.ggml.token_type" not in metadata:
        return [TokenKind.NORMAL] * num_tokens
    numbers = metadata.array("tokenizer.ggml.token_type").numbers()
    if len(numbers) != num_tokens:
        raise ModelFileError(f"{metadata.file_name}: {num_tokens} tokens, but {len(numbers)} token types")
    by_number = {int(kind): kind for kind in TokenKind}
    return [by_number.get(int(number), TokenKind.NORMAL) for number in numbers]


def _stated_id(metadata: GgufMetadata, name: str, num_tokens: int) -> TokenId | None:
    stated = metadata.whole_or_none(f"tokenizer.ggml.{name}_token_id")
    if stated is not None and stated >= num_tokens:
        raise ModelFileError(f"{metadata.file_name}: {name}_token_id is {stated}, the vocabulary has {num_tokens}")
    return None if stated is None else TokenId(stated)


def _end_ids(control: Mapping[TokenId, str], stated: frozenset[TokenId]) -> frozenset[TokenId]:
    return stated | {token_id for token_id, text in control.items() if text in END_TEXTS}


def vocabulary_from_tokenizer(
    tokenizer: Tokenizer, settings: Mapping[str, object], stated_end_ids: frozenset[TokenId]
) -> Vocabulary:
    """The vocabulary behind a `tokenizer.json`; `settings` is the `tokenizer_config.json` beside it.

    Raises `ModelFileError` if its entries are written neither byte-level nor as SentencePiece does.
    """
    added = tokenizer.get_added_tokens_decoder()
    by_text = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max((*by_text.values(), *added), default=-1) + 1)
    is_byte_level, alphabet = _is_byte_level(tokenizer), byte_alphabet()
    for text, index in by_text.items():
        pieces[index] = byte_level_piece(text, alphabet) if is_byte_level else sentencepiece_piece(text)
    for index, token in added.items():
        pieces[index] = b"" if token.special else token.content.encode()
    control = {TokenId(index): token.content for index, token in added.items() if token.special}
    bos, eos = (_setting_id(tokenizer, settings.get(name)) for name in ("bos_token", "eos_token"))
    prefix, suffix = _framing(tokenizer, settings, bos, eos)
    stated = stated_end_ids if eos is None else stated_end_ids | {eos}
    return Vocabulary(tuple(pieces), control, prefix, suffix, bos, eos, _end_ids(control, stated))


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": "none"}
    kinds = {str(part["type"]) for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return False
    raise ModelFileError(
        f"tokenizer.json: decoders {sorted(kinds)} are not supported, byte-level and SentencePiece are"
    )


def _setting_id(tokenizer: Tokenizer, stated: object) -> TokenId | None:
    """The id of a token that the settings write as its text, or as an object with it."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    found = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return None if found is None else TokenId(found)


def _framing(
    tokenizer: Tokenizer, settings: Mapping[str, object], bos: TokenId | None, eos: TokenId | None
) -> tuple[tuple[TokenId, ...], tuple[TokenId, ...]]:
    """What is put before and after a prompt: a flag of the settings where there is one, else the post-processor."""
    bare: Sequence[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: Sequence[int] = tokenizer.encode("a", add_special_tokens=True).ids
    starts = [at for at in range(len(framed) - len(bare) + 1) if framed[at : at + len(bare)] == bare]
    start = starts[0] if starts else 0
    prefix = tuple(TokenId(index) for index in framed[:start])
    suffix = tuple(TokenId(index) for index in framed[start + len(bare) :])
    flags = ((settings.get("add_bos_token"), bos, prefix), (settings.get("add_eos_token"), eos, suffix))
    chosen = [
        found if not isinstance(flag, bool) or token is None else (token,) if flag else ()
        for flag, token, found in flags
    ]
    return chosen[0], chosen[1]
