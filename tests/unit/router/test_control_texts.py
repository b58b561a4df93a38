"""Masks of control texts: none is left, everything comes back, and characters that a client uses stay its own."""

import re

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.control_texts import ControlTexts

TEXTS = ("<|a|>", "<|ab|>", "<|a", "[INST]", "")
MASKS = tuple(map(chr, range(0x100000, 0x100004)))
pieces = st.lists(st.sampled_from([*TEXTS, "<|", "|>", "a", "b", "<", *MASKS]) | st.text(max_size=2)).map("".join)
values = st.recursive(
    pieces | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(pieces, inner, max_size=3),
    max_leaves=8,
)


def restored(value: object, masks: dict[str, str]) -> object:
    if isinstance(value, str):
        return value.translate(str.maketrans(masks))
    if isinstance(value, list):
        return [restored(item, masks) for item in value]
    if isinstance(value, dict):
        return {restored(key, masks): restored(item, masks) for key, item in value.items()}
    return value


@given(values)
def test_nothing_is_left_and_everything_comes_back(value: object) -> None:
    masked, masks = ControlTexts(TEXTS).masked(value)
    assert restored(masked, masks) == value
    assert not any(text in str(masked) for text in TEXTS if text)
    assert set(masks.values()) <= set(TEXTS)


def test_the_longest_text_is_taken_as_tokenizers_do() -> None:
    masked, masks = ControlTexts(TEXTS).masked("<|ab|><|a|><|ax")
    assert isinstance(masked, str)
    assert [masks.get(character, character) for character in masked] == ["<|ab|>", "<|a|>", "<|a", "x"]


def test_characters_that_are_used_are_not_taken() -> None:
    value = {"k": MASKS[0] + "<|a|>" + MASKS[1]}
    masked, masks = ControlTexts(TEXTS).masked(value)
    assert set(masks) == {MASKS[2]}
    assert masked == {"k": MASKS[0] + MASKS[2] + MASKS[1]}


def test_no_texts_mask_nothing() -> None:
    assert ControlTexts(()).masked("<|a|>") == ("<|a|>", {})


def test_the_pattern_has_no_two_ways_to_go_on() -> None:
    """A text full of beginnings is read once, however many control tokens begin alike."""
    texts = [f"<|reserved_{number}|>" for number in range(4000)]
    pattern = ControlTexts(texts)._pattern
    assert pattern is not None
    for branches in re.findall(r"\(\?:((?:[^()])*)\)", pattern.pattern):
        firsts = [branch.removeprefix("\\")[:1] for branch in branches.split("|")]
        assert len(set(firsts)) == len(firsts)
