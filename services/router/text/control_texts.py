"""Keeps what clients write from being read as control tokens: their texts are masked before a template sees them. Pure.

A template writes control tokens and content into one text, so afterwards nobody can tell a turn that the template
opened from one that a user wrote. So each control token's text in a message becomes one character that no message has,
and the tokenizer, which alone knows both, reads that character as the text, letter by letter (`tokens.py`).

Not covered: a template that makes a control token's text out of pieces of content by joining them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_PRIVATE = range(0x100000, 0x10FFFE)
"""Characters without a meaning of their own; those that the messages do use are not taken."""
_PRIVATE_USED = re.compile("[\U00100000-\U0010fffd]")
_END = ""


class ControlTexts:
    """The texts of a vocabulary's control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        """An empty text is none; with no texts nothing is ever masked."""
        trie: dict[str, Any] = {}
        for text in filter(None, texts):
            node = trie
            for character in text:
                node = node.setdefault(character, {})
            node[_END] = {}
        self._pattern = re.compile(_pattern_of(trie)) if trie else None

    def masked(self, value: object) -> tuple[object, dict[str, str]]:
        """A JSON value with control texts masked in all of its strings, and what each mask stands for."""
        pattern = self._pattern
        if pattern is None:
            return value, {}
        found = {text for string in _strings(value) for text in pattern.findall(string)}
        if not found:
            return value, {}
        used = {character for string in _strings(value) for character in _PRIVATE_USED.findall(string)}
        free = (character for character in map(chr, _PRIVATE) if character not in used)
        mask_of = dict(zip(sorted(found), free, strict=False))
        masked = _mapped(value, lambda string: pattern.sub(lambda match: mask_of[match[0]], string))
        return masked, {mask: text for text, mask in mask_of.items()}


def _pattern_of(node: Mapping[str, Any]) -> str:
    """A pattern without alternatives that begin alike: no text takes longer than its length, the longest match wins."""
    branches = [re.escape(character) + _pattern_of(below) for character, below in node.items() if character != _END]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if _END in node else "")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)


def _mapped(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return value
