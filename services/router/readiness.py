"""Proves each generation of the group by using it: one short greedy generation through the whole path, in each layout.

An instance can boot, answer every question about itself and never generate; only a token says that it does. A layout
that is never entered needs no proof; a flip that does not come about is said and does not keep clients waiting.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import anyio

from services.core.ids import LayoutKind, RequestId, TokenId
from services.core.request import SamplingParams, Submission
from services.mesh.logs.log import Log
from services.router.health import Health
from services.router.streams.scheduler_client import OpenGroup, SchedulerClient
from services.router.streams.sessions import Choice
from services.router.text.served_model import ServedModel

FlipTo = Callable[[LayoutKind], Awaitable[str | None]]
"""Flips, and says why not where it did not."""

PROBE_TEXT = "Hello"
PROBE_TOKENS = 2
"""One from the prompt's own step, one from a step that continues it."""
AGAIN_MIN_S = 0.25
AGAIN_MAX_S = 5.0


class Readiness:
    """Runs the probe at boot and after each new generation, and again until it succeeds. `probe_s` bounds one try."""

    def __init__(
        self,
        model: ServedModel,
        client: SchedulerClient,
        health: Health,
        log: Log,
        flip_to: FlipTo | None,
        *,
        probe_s: float,
    ) -> None:
        """`flip_to` None: this deployment stays in one layout."""
        self._model, self._client, self._health, self._log = model, client, health, log
        self._flip_to = flip_to
        self._probe_s = probe_s

    async def run(self) -> None:
        """Probes until cancelled."""
        again_s = AGAIN_MIN_S
        while True:
            group = self._client.group
            if group is None or group.generation == self._health.served_generation:
                await self._client.wait_for_change()
                again_s = AGAIN_MIN_S
            elif (failure := await self._prove(group)) is None:
                self._serve(group)
            else:
                self._log.warning("probe-failed", generation=group.generation, reason=failure, again_in_s=again_s)
                await anyio.sleep(again_s)
                again_s = min(2 * again_s, AGAIN_MAX_S)

    def _serve(self, group: OpenGroup) -> None:
        # A generation lost and replaced while the probe ran is probed by itself.
        if self._client.group is not None and self._client.group.generation == group.generation:
            self._health.served_generation = group.generation
            self._log.info("ready", generation=group.generation, layout=group.layout.value)

    async def _prove(self, group: OpenGroup) -> str | None:
        """None if every layout generated, else what failed."""
        failure = await self._probe()
        if failure is not None or self._flip_to is None:
            return failure
        refused = await self._flip_to(group.layout.other)
        if refused is not None:
            self._log.warning("layout-not-proved", layout=group.layout.other.value, reason=refused)
            return None
        failure = await self._probe()
        if (refused := await self._flip_to(group.layout)) is not None:
            self._log.warning("layout-not-restored", layout=group.layout.value, reason=refused)
        return failure

    async def _probe(self) -> str | None:
        """None if tokens came, else why they did not."""
        has_news = asyncio.Event()
        ids = await self._model.tokens.encode(PROBE_TEXT, max_tokens=len(PROBE_TEXT) + 2)
        choice = Choice(0, self._submission(tuple(ids)), self._model.choice_text(None))
        try:
            with anyio.move_on_after(self._probe_s):
                self._client.open(choice, has_news.set)
                while choice.ending is None:
                    await has_news.wait()
                    has_news.clear()
        finally:
            self._client.release(choice)
        if choice.ending is None:
            return f"no answer within {self._probe_s:g} s"
        return None if choice.ending.failure is None else choice.ending.failure.message

    def _submission(self, ids: tuple[TokenId, ...]) -> Submission:
        return Submission(
            request_id=RequestId(f"probe-{secrets.token_hex(8)}"),
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_output_tokens=PROBE_TOKENS,
            sampling=SamplingParams(),
        )
