"""Token ids to text while they arrive: what is final is given out, what may still change is kept.

Pure: no clock, no IO. Two machines, one after the other: `Detokenizer` keeps the bytes of an unfinished character,
`StopMatcher` keeps text that may be the beginning of a stop string.

Invariants: the text put out in all is the same however the ids are grouped; U+FFFD appears only where the model's bytes
are no UTF-8; text is held back only while it is a proper beginning of a stop string.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.core.ids import TokenId
from services.router.text.vocabulary import Vocabulary


class Detokenizer:
    """One request's text, id by id."""

    def __init__(self, vocabulary: Vocabulary, *, with_control: bool = False) -> None:
        self._vocabulary, self._with_control = vocabulary, with_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[TokenId]) -> str:
        """The text that these ids make final, together with the bytes kept before."""
        piece, with_control = self._vocabulary.piece, self._with_control
        return self._decoder.decode(b"".join(piece(index, with_control=with_control) for index in token_ids))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character was never finished, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


@dataclass(frozen=True, slots=True)
class StopHit:
    """Where an answer ended by a stop string."""

    stop: str
    num_tokens: int
    """How many of the answer's tokens count: up to and with the one that completed the stop string."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A beginning of some stop string."""

    depth: int
    """Characters in it."""
    longest_stop: int
    """Length of the longest stop string that it ends with; 0 if none."""


class StopStrings:
    """The stop strings of one request as an automaton: how much of the text's end is a beginning of one of them.

    Construction is Aho and Corasick's (1975); reading a character costs amortised constant time, however many strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `ValueError` on an empty stop string, which would end every answer before it began."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        ends = self._insert_all(stops)
        depths = self._link()
        self._nodes = [_Node(depth, self._longest_stop(index, ends)) for index, depth in enumerate(depths)]

    def _insert_all(self, stops: Sequence[str]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._children[node]:
                    self._children[node][character] = len(self._children)
                    self._children.append({})
                    self._fallbacks.append(0)
                node = self._children[node][character]
            ends[node] = len(stop)
        return ends

    def _link(self) -> list[int]:
        """Gives each node its fallback, breadth first: the longest proper suffix that is a beginning too."""
        depths, waiting = [0] * len(self._children), deque([0])
        while waiting:
            node = waiting.popleft()
            for character, child in self._children[node].items():
                depths[child] = depths[node] + 1
                self._fallbacks[child] = self.step(self._fallbacks[node], character) if node else 0
                waiting.append(child)
        return depths

    def _longest_stop(self, node: int, ends: dict[int, int]) -> int:
        while node:
            if node in ends:
                return ends[node]
            node = self._fallbacks[node]
        return 0

    def step(self, node: int, character: str) -> int:
        """The node after one more character."""
        while node and character not in self._children[node]:
            node = self._fallbacks[node]
        return self._children[node].get(character, 0)

    def node(self, index: int) -> _Node:
        """What is known at a node."""
        return self._nodes[index]


class StopMatcher:
    """Finds the first stop string of one answer and cuts the text there.

    The stop string that is complete first wins; of several complete at the same character, the longest.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops, self._include_stop = stops, include_stop
        self._node = 0
        self._held = ""
        self._num_tokens = 0
        self.hit: StopHit | None = None

    def push(self, text: str, num_tokens: int = 1) -> str:
        """The text that is now final, of all pushed so far. `num_tokens` is how many tokens `text` came from.

        After a hit nothing more is final: later text is dropped.
        """
        if self.hit is not None:
            return ""
        self._num_tokens += num_tokens
        pending = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._stops.step(self._node, character)
            stop_length = self._stops.node(self._node).longest_stop
            if stop_length:
                self.hit = StopHit(pending[at - stop_length : at], self._num_tokens)
                self._held = ""
                return pending[: at if self._include_stop else at - stop_length]
        num_held = self._stops.node(self._node).depth
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """The text held back, when the answer ends otherwise."""
        held, self._held, self._node = self._held, "", 0
        return held
