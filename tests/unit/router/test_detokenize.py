"""Text while it arrives: right characters for any grouping of ids, and stops cut where a naive search would cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ids import TokenId
from services.router.text.detokenize import Detokenizer, StopMatcher, StopStrings
from services.router.text.vocabulary import Vocabulary

BYTES = tuple(bytes([value]) for value in range(256))
WORDS = ("가나다".encode(), "😀".encode(), b" the", "é".encode()[:1])
CONTROL = TokenId(len(BYTES) + len(WORDS))
VOCABULARY = Vocabulary(
    pieces=(*BYTES, *WORDS, b""),
    control_texts={CONTROL: "<|end|>"},
    prefix_ids=(),
    suffix_ids=(),
    bos_id=None,
    eos_id=CONTROL,
    end_ids=frozenset({CONTROL}),
)


def cut(ids: list[TokenId], borders: list[int]) -> list[list[TokenId]]:
    edges = [0, *sorted(min(border, len(ids)) for border in borders), len(ids)]
    return [ids[low:high] for low, high in pairwise(edges)]


def streamed(groups: list[list[TokenId]]) -> str:
    machine = Detokenizer(VOCABULARY)
    return "".join(machine.push(group) for group in groups) + machine.flush()


ids_of_bytes = st.lists(st.integers(0, len(VOCABULARY.pieces) - 1).map(TokenId), max_size=40)
ids_of_text = st.text(max_size=30).map(lambda text: [TokenId(value) for value in text.encode()])


@given(ids_of_text, st.lists(st.integers(0, 120), max_size=12))
def test_p2_6_any_grouping_gives_the_whole_text(ids: list[TokenId], borders: list[int]) -> None:
    assert streamed(cut(ids, borders)) == bytes(ids).decode()


@given(ids_of_bytes, st.lists(st.integers(0, 40), max_size=12))
def test_p2_4_invalid_bytes_alone_become_replacement_characters(ids: list[TokenId], borders: list[int]) -> None:
    whole = b"".join(VOCABULARY.pieces[index] for index in ids)
    assert streamed(cut(ids, borders)) == whole.decode("utf-8", "replace")


@pytest.mark.parametrize("num_together", [1, 2, 7])
def test_p2_6_korean_loses_no_syllable(num_together: int) -> None:
    text = "한국어 텍스트는 여러 토큰으로 나뉜다. " * 20
    ids = [TokenId(value) for value in text.encode()]
    assert streamed([ids[at : at + num_together] for at in range(0, len(ids), num_together)]) == text


def test_p2_4_a_character_is_given_out_once_it_is_whole() -> None:
    machine = Detokenizer(VOCABULARY)
    assert [machine.push([TokenId(value)]) for value in "😀!".encode()] == ["", "", "", "😀", "!"]
    assert machine.flush() == ""


def test_p2_4_pending_bytes_are_flushed_at_the_end() -> None:
    machine = Detokenizer(VOCABULARY)
    assert machine.push([TokenId(0x61), TokenId(0xE2), TokenId(0x82)]) == "a"
    assert machine.flush() == "\ufffd"


def test_p6_9_unknown_and_control_ids_have_no_text() -> None:
    assert Detokenizer(VOCABULARY).push([TokenId(10_000), TokenId(-1), CONTROL, TokenId(0x61)]) == "a"
    assert Detokenizer(VOCABULARY, with_control=True).push([CONTROL, TokenId(0x61)]) == "<|end|>a"


def naive(pieces: list[str], stops: list[str], include_stop: bool) -> tuple[str, str | None, int | None]:
    """Looks at the whole text after each character: (text, stop, tokens) where the first stop string is complete."""
    text = ""
    for num_tokens, piece in enumerate(pieces, start=1):
        for character in piece:
            text += character
            complete = [stop for stop in stops if text.endswith(stop)]
            if complete:
                stop = max(complete, key=len)
                return text if include_stop else text[: -len(stop)], stop, num_tokens
    return text, None, None


few_letters = st.text(alphabet="ab한", max_size=6)


@given(
    st.lists(few_letters, max_size=12),
    st.lists(st.text(alphabet="ab한", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_stops_are_those_of_a_naive_search_and_no_more_is_held_than_may_be(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    given_out, seen = "", ""
    for piece in pieces:
        given_out += matcher.push(piece)
        seen += piece
        if matcher.hit is None:
            held = seen[len(given_out) :]
            assert seen == given_out + held
            # Held back is the longest end of the text that a stop string properly begins with, and nothing else.
            beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
            assert held == max((b for b in beginnings if seen.endswith(b)), key=len, default="")
    given_out += matcher.flush()
    text, stop, num_tokens = naive(pieces, stops, include_stop)
    assert given_out == text
    assert (matcher.hit.stop, matcher.hit.num_tokens) == (stop, num_tokens) if matcher.hit else stop is None


@given(st.text(alphabet="abc", max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_p2_1_the_cut_does_not_depend_on_the_grouping(text: str, borders: list[int]) -> None:
    def run(groups: list[str]) -> str:
        matcher = StopMatcher(StopStrings(["abca", "bb"]))
        return "".join(matcher.push(group) for group in groups) + matcher.flush()

    edges = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    assert run([text[low:high] for low, high in pairwise(edges)]) == run(list(text))


def test_p2_1_a_stop_over_several_tokens_leaks_nothing() -> None:
    matcher = StopMatcher(StopStrings(["DEFGHIJ"]))
    assert [matcher.push(piece) for piece in ("ABC", "DE", "FGH", "IJK", "L")] == ["ABC", "", "", "", ""]
    assert matcher.hit is not None
    assert (matcher.hit.stop, matcher.hit.num_tokens) == ("DEFGHIJ", 4)
    assert matcher.flush() == ""


def test_p2_2_a_long_stop_that_never_comes_delays_nothing() -> None:
    matcher = StopMatcher(StopStrings(["#" * 40]))
    assert [matcher.push(piece) for piece in ("Hello", " world", "!")] == ["Hello", " world", "!"]


def test_a_false_beginning_is_given_out_with_what_follows() -> None:
    matcher = StopMatcher(StopStrings(["\n\nUser:"]))
    assert [matcher.push(piece) for piece in ("a\n", "\nUs", "ual", "\n")] == ["a", "", "\n\nUsual", ""]
    assert matcher.flush() == "\n"


def test_the_stop_string_is_given_out_on_demand() -> None:
    matcher = StopMatcher(StopStrings(["END"]), include_stop=True)
    assert matcher.push("a E") + matcher.push("ND b") == "a END"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
