"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF file names how text is split before merging (`tokenizer.ggml.pre`) instead of carrying the rule, so the rules of
the names are here. A name that is not known is refused: a wrong split gives other ids than the model was trained on,
which shows only as worse answers.
"""

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from services.models.gguf import GgufMetadata
from services.models.model_file import ModelFileError
from services.router.text.vocabulary import SPACE_MARK, TokenKind, token_kinds

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's rule: contractions, words and numbers with their leading space, the rest, runs of space."""


def _cased_words(numbers: str, contractions: str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)") -> str:
    """The rule of the newer vocabularies, which differ in how long a run of digits may be."""
    others = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{others}"


_DIGITS_THEN_WORDS = (r"\p{N}", _WORDS)
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion"), (_WORDS,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_WORDS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_cased_words(r"\p{N}{1,3}"),)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_cased_words(r"\p{N}"),)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""By the file's name for it, the rules that are applied one after the other."""
_ADD_BOS_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})
_WHOLE_WORDS_FIRST_NAMES = _ADD_BOS_NAMES
"""Vocabularies in which a word that is an entry is that entry, even where the merges would not arrive at it."""


def adds_bos_by_default(metadata: GgufMetadata) -> bool:
    """Whether prompts begin with BOS when the file has no flag for it."""
    if metadata.text("tokenizer.ggml.model") == "llama":
        return True
    return metadata.text_or_none("tokenizer.ggml.pre") in _ADD_BOS_NAMES


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """The tokenizer that the file describes; it adds no BOS or EOS of its own.

    Control and user-defined entries are found in text before anything else, the longest first. Raises `ModelFileError`
    on a kind of tokenizer or split that is not supported.
    """
    texts = metadata.array("tokenizer.ggml.tokens").texts()
    kinds = token_kinds(metadata, len(texts))
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, texts)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, texts, kinds)
    else:
        raise ModelFileError(f"{metadata.file_name}: the tokenizer {model!r} is not supported; gpt2 and llama are")
    _add_whole_tokens(tokenizer, texts, kinds)
    return tokenizer


def _add_whole_tokens(tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[TokenKind]) -> None:
    def added(kind: TokenKind) -> list[AddedToken]:
        chosen = (text for text, found in zip(texts, kinds, strict=True) if found is kind and text)
        return [AddedToken(text, normalized=False, special=kind is TokenKind.CONTROL) for text in chosen]

    tokenizer.add_special_tokens(added(TokenKind.CONTROL))
    tokenizer.add_tokens(added(TokenKind.USER_DEFINED))


def _byte_level(metadata: GgufMetadata, texts: Sequence[str]) -> Tokenizer:
    name = metadata.text_or_none("tokenizer.ggml.pre") or "default"
    patterns = _SPLITS.get(name)
    if patterns is None:
        raise ModelFileError(
            f"{metadata.file_name}: tokenizer.ggml.pre {name!r} is not supported; these are: "
            + ", ".join(sorted(_SPLITS))
        )
    vocab = _ids_by_text(texts)
    merges = [_pair(metadata, merge) for merge in metadata.array("tokenizer.ggml.merges").texts()]
    _check_merges(metadata, vocab, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS_FIRST_NAMES))
    splits: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _ids_by_text(texts: Sequence[str]) -> dict[str, int]:
    """The first id of each text; some files write an entry twice."""
    vocab: dict[str, int] = {}
    for index, text in enumerate(texts):
        vocab.setdefault(text, index)
    return vocab


def _pair(metadata: GgufMetadata, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or not left or not right or " " in right:
        raise ModelFileError(f"{metadata.file_name}: the merge {merge!r} is not two texts with a space between")
    return left, right


def _check_merges(metadata: GgufMetadata, vocab: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
    for left, right in merges:
        for text in (left, right, left + right):
            if text not in vocab:
                raise ModelFileError(
                    f"{metadata.file_name}: the merge of {left!r} and {right!r} needs an entry {text!r}"
                )


def _sentencepiece(metadata: GgufMetadata, texts: Sequence[str], kinds: Sequence[TokenKind]) -> Tokenizer:
    vocab = _ids_by_text(texts)
    unknown_id = metadata.whole_or_none("tokenizer.ggml.unknown_token_id")
    unknown = texts[unknown_id] if unknown_id is not None and unknown_id < len(texts) else None
    has_all_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(metadata, texts, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_all_bytes,
        )
    )
    has_prefix = metadata.flag_or_none("tokenizer.ggml.add_space_prefix")
    marks = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = (
        marks if has_prefix is False else normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
    )
    return tokenizer


def _merges_from_scores(
    metadata: GgufMetadata, texts: Sequence[str], kinds: Sequence[TokenKind]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for: any two entries that make up a third, best score first."""
    scores = metadata.array("tokenizer.ggml.scores").numbers()
    if len(scores) != len(texts):
        raise ModelFileError(f"{metadata.file_name}: {len(texts)} tokens, but {len(scores)} scores")
    rows = zip(texts, scores, kinds, strict=True)
    score_of = {text: score for text, score, kind in rows if kind is TokenKind.NORMAL}
    ranked = [(-score, -len(left), left, right) for score, left, right in _splits_into_entries(score_of)]
    # Of one score, the split with the longest left part first; the texts themselves only make the order definite.
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _splits_into_entries(score_of: dict[str, float]) -> Iterator[tuple[float, str, str]]:
    """Every way in which an entry is made of two others, with the entry's score."""
    for text, score in score_of.items():
        for at in range(1, len(text)):
            if text[:at] in score_of and text[at:] in score_of:
                yield score, text[:at], text[at:]
