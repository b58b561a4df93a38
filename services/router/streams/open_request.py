"""One request under way, as its front sees it: the choices, what becomes final, what it has used.

Never waits for anything but news of its own choices; a front that is slow finds several steps in one delta.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from services.router.openai.refusal import RefusalError
from services.router.openai.replies import Usage
from services.router.openai.wanted import Endpoint, InferenceRequest
from services.router.streams.sessions import Choice, Delta

Updates = list[tuple[Choice, Delta]]


class OpenRequest:
    """One request under way: `num_choices` choices for each prompt, in that order."""

    def __init__(
        self,
        asked: InferenceRequest,
        reply_id: str,
        choices: list[Choice],
        echoes: list[str],
        *,
        began_s: float,
        created_s: int,
        observe_gap: Callable[[float], object],
        clock: Callable[[], float],
    ) -> None:
        self.asked, self.reply_id, self.choices = asked, reply_id, choices
        self.began_s, self.created_s = began_s, created_s
        self.echoes = echoes
        """What the text of each prompt's choices begins with, where `echo` was asked."""
        self._observe_gap, self._clock = observe_gap, clock
        self._last_output_s: dict[int, float] = {}
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """Says that a choice may have something."""
        self._has_news.set()

    async def news(self) -> None:
        """Returns once anything was heard of a choice, a place in the batch included."""
        await self._has_news.wait()

    async def updates(self) -> AsyncIterator[Updates]:
        """Yields what became final, all choices together, until each has ended.

        Raises:
            RefusalError: a choice ended with a failure.
        """
        num_running = len(self.choices)
        while num_running:
            await self._has_news.wait()
            self._has_news.clear()
            updates = [(choice, delta) for choice in self.choices if (delta := choice.take()) is not None]
            if (failure := self.failure) is not None:
                raise failure
            self._measure(updates)
            if updates:
                yield updates
            num_running -= sum(delta.ending is not None for _, delta in updates)

    @property
    def is_chat(self) -> bool:
        """True if the answer is a chat's."""
        return self.asked.endpoint is Endpoint.CHAT

    @property
    def failure(self) -> RefusalError | None:
        """Why the first choice that failed did; one failure ends the whole request."""
        endings = (choice.ending for choice in self.choices)
        return next((ending.failure for ending in endings if ending is not None and ending.failure is not None), None)

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any choice came, on the router's clock."""
        return min((at_s for choice in self.choices if (at_s := choice.first_token_s) is not None), default=None)

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, however many choices it has."""
        first_of_each = self.choices[:: self.asked.num_choices]
        return Usage(
            num_prompt_tokens=sum(choice.num_prompt_tokens for choice in first_of_each),
            num_output_tokens=sum(choice.num_output_tokens for choice in self.choices),
            num_cached_tokens=sum(choice.num_cached_tokens or 0 for choice in first_of_each),
        )

    def _measure(self, updates: Updates) -> None:
        now_s = self._clock()
        for choice, delta in updates:
            if delta.token_ids:
                if (last_s := self._last_output_s.get(choice.index)) is not None:
                    self._observe_gap(now_s - last_s)
                self._last_output_s[choice.index] = now_s
