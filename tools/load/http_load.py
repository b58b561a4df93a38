"""Load on a running mesh as clients make it: streams over HTTP, in patterns, with what came back when.

Continuous decoders ask again as soon as an answer ends; bursts of long prompts come at a fixed pace; arrivals of a
trace come when it says. Prompts are token ids drawn from a seed, so that lengths are exact and no prompt is another's
prefix. Bounded in time, in streams at once and in requests; what could not be sent is counted. Never judges.
"""

import asyncio
import itertools
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio

from tools.load.arrivals import Arrival
from tools.load.http_client import Event, Loopback, StreamError, stream_events

MAX_STREAMS = 256
MAX_REQUESTS = 200_000
REQUEST_S = 300.0
"""Of one request, from its sending to its end; above, it counts as failed."""
PROMPT_IDS = (256, 20_000)
"""From which prompts are drawn: no control ids, and in the vocabulary of any model."""


@dataclass(slots=True)
class Streamed:
    """One request as its client saw it. Times are monotonic nanoseconds."""

    kind: str
    """decoder, burst or arrival."""
    prompt_tokens: int
    max_tokens: int
    asked_ns: int
    arrived_ns: list[int] = field(default_factory=list)
    """One for each piece of the answer; a piece is a token, but for halves of a character."""
    num_tokens: int = 0
    """By the server's usage; 0 until the end."""
    text: str = ""
    finish: str = ""
    error: str = ""
    """Why it failed; empty where it did not."""
    ended_ns: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it ended as asked."""
        return not self.error and self.finish == "length" and self.num_tokens == self.max_tokens

    @property
    def ttft_ns(self) -> int | None:
        """From sending to the first streamed token."""
        return self.arrived_ns[0] - self.asked_ns if self.arrived_ns else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """After the first token; None with fewer than two."""
        if self.num_tokens < 2 or self.arrived_ns[-1] == self.arrived_ns[0]:
            return None
        return (self.num_tokens - 1) * 1e9 / (self.arrived_ns[-1] - self.arrived_ns[0])


@dataclass(frozen=True, slots=True)
class Shape:
    """What the load is made of; parts with a count of 0 are left out."""

    num_decoders: int = 12
    decoder_prompt_tokens: int = 32
    decoder_tokens: int = 192
    burst_prompts: int = 2
    burst_prompt_tokens: int = 1000
    burst_tokens: int = 16
    burst_every_s: float = 15.0
    arrivals: tuple[Arrival, ...] = ()


def prompt_ids(seed: int, num_tokens: int) -> list[int]:
    """Ids that differ between seeds."""
    draw = random.Random(seed)
    return [draw.randrange(*PROMPT_IDS) for _ in range(num_tokens)]


class HttpLoad:
    """One run of a shape; `streamed` grows as requests are sent."""

    def __init__(
        self, address: Loopback, model: str, shape: Shape, api_key: str | None = None, seed: int | None = None
    ) -> None:
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        """Of the prompts. Drawn where none is given: else a second run would find the first one's prompts cached."""
        self.streamed: list[Streamed] = []
        self.num_skipped = 0
        """Arrivals for which there was no place."""
        self._address, self._model, self._shape, self._api_key = address, model, shape, api_key
        self._places = asyncio.Semaphore(MAX_STREAMS)
        self._numbers = itertools.count(1)
        self._stops_s = 0.0

    async def run(self, seconds: float) -> None:
        """Sends requests for so long and then waits for the end of each one that is open, at most `REQUEST_S`."""
        began_s = time.monotonic()
        self._stops_s = began_s + seconds
        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._shape.num_decoders, MAX_STREAMS)):
                tasks.start_soon(self._decode)
            if self._shape.burst_prompts:
                tasks.start_soon(self._bursts, began_s)
            if self._shape.arrivals:
                tasks.start_soon(self._arrivals, began_s)

    def stop(self) -> None:
        """Sends nothing more, where `run` still would; what is open goes on to its end."""
        self._stops_s = time.monotonic()

    async def ask(self, kind: str, prompt_tokens: int, max_tokens: int) -> Streamed:
        """One request, to its end; a failure is in the record, not raised."""
        number = next(self._numbers)
        streamed = Streamed(kind, prompt_tokens, max_tokens, time.monotonic_ns())
        if number > MAX_REQUESTS:
            self.num_skipped += 1
            return streamed
        self.streamed.append(streamed)
        body = {
            "model": self._model,
            "prompt": prompt_ids(self.seed * MAX_REQUESTS + number, prompt_tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(REQUEST_S):
                answer = stream_events(self._address, "/v1/completions", body, self._api_key)
                async with aclosing(answer) as events:
                    async for arrived_ns, event in events:
                        take(streamed, arrived_ns, event)
        except TimeoutError:
            streamed.error = f"no end within {REQUEST_S:g} s"
        except (StreamError, OSError) as error:
            streamed.error = str(error)
        streamed.ended_ns = time.monotonic_ns()
        return streamed

    async def _decode(self) -> None:
        while time.monotonic() < self._stops_s:
            async with self._places:
                streamed = await self.ask("decoder", self._shape.decoder_prompt_tokens, self._shape.decoder_tokens)
            if streamed.error or streamed.ended_ns is None:
                # A server that refuses would else be asked as fast as it can say no.
                await anyio.sleep(1.0)

    async def _bursts(self, began_s: float) -> None:
        every_s = self._shape.burst_every_s
        burst = Arrival(0.0, self._shape.burst_prompt_tokens, self._shape.burst_tokens)
        async with anyio.create_task_group() as tasks:
            for place in itertools.count():
                at_s = began_s + every_s / 3 + place * every_s
                if at_s >= self._stops_s:
                    return
                await anyio.sleep(max(0.0, at_s - time.monotonic()))
                for _ in range(self._shape.burst_prompts):
                    tasks.start_soon(self._arrive, "burst", burst)

    async def _arrivals(self, began_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            for arrival in self._shape.arrivals:
                at_s = began_s + arrival.at_s
                if at_s >= self._stops_s:
                    return
                await anyio.sleep(max(0.0, at_s - time.monotonic()))
                tasks.start_soon(self._arrive, "arrival", arrival)

    async def _arrive(self, kind: str, arrival: Arrival) -> None:
        if self._places.locked():
            self.num_skipped += 1
            return
        async with self._places:
            await self.ask(kind, arrival.prompt_tokens, arrival.output_tokens)


def take(streamed: Streamed, arrived_ns: int, event: Event) -> None:
    """Adds one event of a completion's stream."""
    for choice in event["choices"]:
        # The last piece may be the ending alone: no token came with it.
        if choice["text"] or choice["finish_reason"] is None:
            streamed.arrived_ns.append(arrived_ns)
        streamed.text += choice["text"]
        streamed.finish = choice["finish_reason"] or streamed.finish
    if event.get("usage"):
        streamed.num_tokens = event["usage"]["completion_tokens"]
