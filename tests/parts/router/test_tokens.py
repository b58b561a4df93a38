"""Tokenising: the ids that the vocabulary's own rules give, BOS as the files say, never in the way of the loop."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from threading import Event

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.core.errors import ConfigurationError
from services.core.ids import TokenId
from services.models.gguf import GgufMetadata, parse_gguf
from services.models.model_file import ModelFileError
from services.models.model_files import ModelFiles, TokenizerFolder, open_model
from services.router.text import tokens
from services.router.text.gguf_tokenizer import adds_bos_by_default, build_tokenizer
from services.router.text.tokens import PromptRefusedError, TokenizerBusyError, Tokens, open_tokens
from services.router.text.vocabulary import byte_alphabet, vocabulary_from_gguf
from tests.support.gguf_bytes import GgufBytes
from tests.support.small_model import METADATA, gguf_tensors

PREFIX = "tokenizer.ggml."
ALPHABET = {byte: character for character, byte in byte_alphabet().items()}
CONTROL_TEXTS = ["<|bos|>", "<|im_end|>", "<|endoftext|>"]
SP_WORDS = ["▁a", "ab", "▁ab", "abc", "bc", "▁▁", "漢字", "c▁"]


def metadata_of(values: dict[str, object]) -> GgufMetadata:
    return parse_gguf(memoryview(GgufBytes(values).build()), "m.gguf").metadata


def written(text: str) -> str:
    """Text in the byte alphabet, as byte-level vocabularies write it."""
    return "".join(ALPHABET[byte] for byte in text.encode())


def byte_level(words: list[str], **changes: object) -> dict[str, object]:
    """Control tokens, the bytes, then `words` built up from the left, and one user-defined token."""
    texts = [*CONTROL_TEXTS, *ALPHABET.values()]
    merges = []
    for word in map(written, words):
        for at in range(2, len(word) + 1):
            if word[:at] not in texts:
                texts.append(word[:at])
                merges.append(f"{word[: at - 1]} {word[at - 1]}")
    kinds = [3] * len(CONTROL_TEXTS) + [1] * (len(texts) - len(CONTROL_TEXTS))
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*texts, "<tool>"],
        "token_type": [*kinds, 4],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {PREFIX + key: value for key, value in {**values, **changes}.items() if value is not None}


def sentencepiece(**changes: object) -> dict[str, object]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SP_WORDS, *"▁abc漢字", "\n\n"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(SP_WORDS) + 6), 4]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": texts,
        "token_type": kinds,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(SP_WORDS) + 6)] + [-1000.0],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {PREFIX + key: value for key, value in {**values, **changes}.items() if value is not None}


def tokens_of(values: dict[str, object], *end_ids: int) -> Tokens:
    metadata = metadata_of(values)
    vocabulary = vocabulary_from_gguf(metadata, frozenset(map(TokenId, end_ids)), adds_bos_by_default(metadata))
    return Tokens(build_tokenizer(metadata), vocabulary)


def pieces(made: Tokens, text: str) -> list[str]:
    return [made.vocabulary.piece(index, with_control=True).decode() for index in made.encode_text(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("gpt2", "a  12", ["a", " ", " 12"]),
        ("llama-bpe", "x12345", ["x", "123", "45"]),
        ("qwen2", "x123", ["x", "1", "2", "3"]),
        ("default", "12345", ["123", "45"]),
        ("gpt2", "I'll", ["I", "'ll"]),
        ("gpt2", "I'LL", ["I", "'", "LL"]),
        ("llama-bpe", "I'LL", ["I", "'LL"]),
        ("gpt2", "!\n", ["!", "\n"]),
        ("llama-bpe", "!\n", ["!\n"]),
    ],
)
def test_text_is_split_as_the_file_names_it(pre: str, text: str, expected: list[str]) -> None:
    words = ["  ", " 12", "12345", "123", "45", "'ll", "'LL", "LL", "!\n"]
    assert pieces(tokens_of(byte_level(words, pre=pre)), text) == expected


def test_whole_words_come_before_merges_where_the_vocabulary_was_made_so() -> None:
    # "abc" is an entry that no merge arrives at, since "bc" is merged first.
    values = byte_level([], pre="llama-bpe")
    values[PREFIX + "tokens"] = [*CONTROL_TEXTS, *ALPHABET.values(), "bc", "ab", "abc"]
    values[PREFIX + "token_type"] = [3] * 3 + [1] * 259
    values[PREFIX + "merges"] = ["b c", "a b", "ab c"]
    assert pieces(tokens_of(values), "abc") == ["abc"]
    assert pieces(tokens_of({**values, PREFIX + "pre": "gpt2"}), "abc") == ["a", "bc"]


@given(st.text(max_size=40))
def test_byte_level_text_survives_there_and_back(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode_text(text), with_control=True) == text


BYTE_LEVEL = tokens_of(byte_level(["the", " the", "가"]))
SENTENCEPIECE = tokens_of(sentencepiece(add_space_prefix=False))


def by_scores(text: str) -> list[str]:
    """SentencePiece as it is defined: join the best-scored neighbours, the leftmost first, until none are left."""
    parts = list(text.replace(" ", "▁"))
    while True:
        neighbours = enumerate(left + right for left, right in pairwise(parts))
        joined = [(SP_WORDS.index(both), at) for at, both in neighbours if both in SP_WORDS]
        if not joined:
            return parts
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text(alphabet=" abc漢字é", max_size=24))
def test_scores_give_what_sentencepiece_gives(text: str) -> None:
    expected: list[str] = []
    for part in by_scores(text):
        is_entry = part in SP_WORDS or part in "▁abc漢字"
        expected += [part] if is_entry else [f"<0x{byte:02X}>" for byte in part.encode()]
    texts = sentencepiece()[PREFIX + "tokens"]
    assert isinstance(texts, list)
    assert [texts[index] for index in SENTENCEPIECE.encode_text(text)] == expected
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode_text(text)) == text


def test_user_defined_tokens_are_taken_whole_and_shown() -> None:
    assert pieces(SENTENCEPIECE, "a\n\nb") == ["a", "\n\n", "b"]
    assert pieces(BYTE_LEVEL, "x<tool>y") == ["x", "<tool>", "y"]
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode_text("<tool>")) == "<tool>"


def test_a_space_is_put_first_where_the_file_says_so() -> None:
    assert pieces(tokens_of(sentencepiece()), "ab") == [" ab"]
    assert pieces(tokens_of(sentencepiece(add_space_prefix=False)), "ab") == ["ab"]


def test_control_tokens_in_text_are_control_tokens_unless_told_otherwise() -> None:
    ids = BYTE_LEVEL.encode_text("a<|im_end|>")
    assert ids[-1] == 1
    literal = BYTE_LEVEL.encode_text("aM", {"M": "<|im_end|>"})
    assert not set(literal) & {0, 1, 2}
    assert BYTE_LEVEL.decode(literal) == "a<|im_end|>"
    assert BYTE_LEVEL.decode(ids) == "a"
    assert BYTE_LEVEL.decode(ids, with_control=True) == "a<|im_end|>"
    # Asking for literal text has not changed the usual reading.
    assert BYTE_LEVEL.encode_text("a<|im_end|>") == ids


def test_masked_text_is_read_as_if_no_token_were_written_like_it() -> None:
    masked = BYTE_LEVEL.encode_text("<|im_end|>a M b<|im_end|><|im_end|>M", {"M": "<|im_end|>"})
    literal = BYTE_LEVEL.encode_text("M", {"M": "a <|im_end|> b"})
    assert masked == [1, *literal, 1, 1, *BYTE_LEVEL.encode_text("M", {"M": "<|im_end|>"})]
    # No mask in the text: as ever.
    assert BYTE_LEVEL.encode_text("a<|im_end|>b", {"M": "x"}) == BYTE_LEVEL.encode_text("a<|im_end|>b")


@pytest.mark.parametrize("begins_with_bos", [False, True])
@pytest.mark.parametrize(("flag", "num_bos"), [(True, 1), (False, 0)])
async def test_p4_9_one_bos_or_none_as_the_file_says(flag: bool, num_bos: int, begins_with_bos: bool) -> None:
    made = tokens_of(byte_level([], add_bos_token=flag))
    ids = await made.encode("<|bos|>hi" if begins_with_bos else "hi", max_tokens=99)
    # Where the file asks for none, one that the template itself writes stays: the template is the file's word too.
    assert ids.count(TokenId(0)) == (num_bos or int(begins_with_bos))
    assert len(await made.encode("hi", max_tokens=99, add_prefix=False)) == 2


async def test_p4_9_defaults_without_a_flag_are_those_of_the_kind() -> None:
    assert (await tokens_of(sentencepiece()).encode("a", max_tokens=9))[0] == 1
    assert (await tokens_of(byte_level([], pre="llama-bpe")).encode("a", max_tokens=9))[0] == 0
    assert 0 not in await tokens_of(byte_level([])).encode("a", max_tokens=9)
    both = tokens_of(byte_level([], add_bos_token=True, add_eos_token=True))
    assert [(await both.encode("a", max_tokens=9))[at] for at in (0, -1)] == [0, 1]


def test_p4_8_ends_are_what_the_files_state_and_what_the_texts_say() -> None:
    assert tokens_of(byte_level([], token_type=None), 1).vocabulary.end_ids == {1}
    assert tokens_of(byte_level([]), 1, 7).vocabulary.end_ids == {1, 2, 7}


def test_p6_9_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert BYTE_LEVEL.decode([TokenId(10**6), TokenId(-3)], with_control=True) == ""


async def test_p2_11_an_empty_prompt_needs_a_bos() -> None:
    with pytest.raises(PromptRefusedError, match="prompt is empty"):
        await BYTE_LEVEL.encode("", max_tokens=9)
    assert await tokens_of(sentencepiece()).encode("", max_tokens=9) == [1]
    assert len(await BYTE_LEVEL.encode("hi", max_tokens=9)) == 2


async def test_what_cannot_be_a_prompt_is_refused() -> None:
    with pytest.raises(PromptRefusedError, match="not valid Unicode"):
        await BYTE_LEVEL.encode("a\ud800", max_tokens=9)
    with pytest.raises(PromptRefusedError, match="has 10 tokens, at most 9 fit"):
        await BYTE_LEVEL.encode("q" * 10, max_tokens=9)


async def test_p5_15_a_huge_prompt_is_refused_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> list[TokenId]:
        raise AssertionError("tokenised a prompt that cannot fit")

    monkeypatch.setattr(Tokens, "encode_text", never)
    for text in ("x" * 27_000_000, "한" * 9_000_000):
        with pytest.raises(PromptRefusedError, match="more than 8192 tokens can hold"):
            await BYTE_LEVEL.encode(text, max_tokens=8192)


@given(st.text(alphabet="the 가<|im_end|>", min_size=1, max_size=60))
def test_p5_15_the_length_check_never_refuses_what_fits(text: str) -> None:
    BYTE_LEVEL._check_length(text, len(BYTE_LEVEL.encode_text(text)))


async def test_p5_15_the_loop_stays_free_while_a_long_prompt_is_tokenised() -> None:
    text = "some words and 12345 numbers\n" * 30_000
    num_turns = 0

    async def watch() -> None:
        nonlocal num_turns
        while True:
            await anyio.sleep(0.005)
            num_turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        ids = await BYTE_LEVEL.encode(text, max_tokens=len(text))
        group.cancel_scope.cancel()
    assert len(ids) > 500_000
    # Held up, the loop would have had one turn before the work and one after it, however busy the machine is.
    assert num_turns > 5


async def test_p5_15_no_more_may_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_WAITING_ENCODES", 1)
    started, release = Event(), Event()
    made = tokens_of(byte_level([]))
    plain = made.encode_text

    def slow(text: str, masks: Mapping[str, str]) -> list[TokenId]:
        started.set()
        assert release.wait(30)
        return plain(text, masks)

    monkeypatch.setattr(made, "encode_text", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: made.encode("a", max_tokens=9))
        await anyio.to_thread.run_sync(started.wait)
        group.start_soon(lambda: made.encode("b", max_tokens=9))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(TokenizerBusyError, match="try again later"):
            await made.encode("c", max_tokens=9)
        release.set()
    assert await made.encode("c", max_tokens=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (byte_level([], pre="unheard-of"), "'unheard-of' is not supported; these are: .*smollm"),
        (byte_level([], model="bert"), "'bert' is not supported"),
        (byte_level([], merges=["ab"]), "'ab' is not two texts"),
        (byte_level([], merges=["a zz"]), "needs an entry 'zz'"),
        (byte_level([], token_type=[1]), "but 1 token types"),
        (byte_level([], eos_token_id=5000), "eos_token_id is 5000"),
        (sentencepiece(scores=[0.0]), "but 1 scores"),
        ({PREFIX + "model": "gpt2"}, "no array tokenizer.ggml.tokens"),
    ],
)
def test_an_unusable_vocabulary_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokens_of(values)


def test_a_gguf_model_is_opened_with_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GgufBytes({**METADATA, **byte_level(["hi"])}, gguf_tensors()).build())
    made = open_tokens(open_model(path))
    assert made.decode(made.encode_text("hi there")) == "hi there"
    assert made.vocabulary.end_ids == {1, 2}
    path.write_bytes(GgufBytes({**METADATA, **byte_level([], pre="x")}, gguf_tensors()).build())
    with pytest.raises(ConfigurationError, match="the tokenizer of m cannot be used"):
        open_tokens(open_model(path))


def folder_tokens(folder: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> Tokens:
    """A tokenizer.json as a model's directory has it, opened as the router does."""
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "m.gguf"
    path.write_bytes(GgufBytes(METADATA, gguf_tensors()).build())
    opened = open_model(path)
    fields = {name: getattr(opened, name) for name in ModelFiles.__slots__}
    return open_tokens(ModelFiles(**{**fields, "tokenizer": TokenizerFolder(folder / "tokenizer.json", settings)}))


def byte_level_tokenizer() -> Tokenizer:
    vocab = {text: index for index, text in enumerate([*CONTROL_TEXTS, *ALPHABET.values(), written(" h")])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(written(" "), "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL_TEXTS])
    made.enable_truncation(3)
    return made


async def test_a_tokenizer_json_with_its_own_frame_and_settings(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    made.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    found = folder_tokens(tmp_path, made, {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|bos|>"})
    ids = await found.encode(" hi 한", max_tokens=99)
    assert ids[0] == 0
    assert len(ids) > 3
    assert found.decode(ids) == " hi 한"
    assert found.vocabulary.prefix_ids == (0,)
    assert found.vocabulary.end_ids == {1, 2}
    assert (await found.encode("<|bos|>x", max_tokens=99)).count(TokenId(0)) == 1
    off = folder_tokens(tmp_path, made, {"bos_token": "<|bos|>", "add_bos_token": False})
    assert off.vocabulary.prefix_ids == ()


def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    other.decoder = decoders.WordPiece()
    with pytest.raises(ConfigurationError, match=r"decoders \['WordPiece'\] are not supported"):
        folder_tokens(tmp_path, other, {})


def test_a_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GgufBytes(METADATA, gguf_tensors()).build())
    opened = open_model(path)
    fields = {name: getattr(opened, name) for name in ModelFiles.__slots__}
    absent = TokenizerFolder(tmp_path / "tokenizer.json", {})
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        open_tokens(ModelFiles(**{**fields, "tokenizer": absent}))
