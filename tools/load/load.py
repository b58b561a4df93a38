"""Streams of requests to a running mesh, and what came back when: ids, margins, arrivals.

Greedy, so that answers can be held against each other. Bounded by the number of streams at once. Never judges.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import grpc.aio
from flipmesh.router.v1 import inference_service_pb2 as pb
from flipmesh.router.v1.inference_service_pb2_grpc import InferenceServiceStub

MAX_STREAMS = 256
"""At once, whatever is asked for: half of what a router takes by default."""
REQUEST_S = 600.0
"""Of one request, from its submission to its end."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy request; generation goes on past the model's end of text, so that every answer is as long as asked."""

    prompt: str
    max_tokens: int


@dataclass(slots=True)
class Heard:
    """What came back so far; one entry for each token in the lists."""

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """By how much the model preferred its best token to its second, in logits (log-probabilities differ alike)."""
    arrived_ns: list[int] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int = 0
    error: str = ""
    """Why the stream broke; empty where it did not."""

    def longest_gap_ns(self) -> int:
        """The longest time between two arrivals; 0 with fewer than two."""
        return max(
            (after - before for before, after in zip(self.arrived_ns, self.arrived_ns[1:], strict=False)), default=0
        )


class Load:
    """Requests under way: `heard[i]` grows as the answer to `asks[i]` comes in."""

    def __init__(self, channel: grpc.aio.Channel, asks: Sequence[Ask], max_streams: int = MAX_STREAMS) -> None:
        self.asks = tuple(asks)
        self.heard = [Heard() for _ in asks]
        self._stub = InferenceServiceStub(channel)
        self._limiter = anyio.CapacityLimiter(min(max_streams, MAX_STREAMS))
        self._news = anyio.Event()
        self._num_ended = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that have come back."""
        return sum(len(heard.token_ids) for heard in self.heard)

    @property
    def has_ended(self) -> bool:
        """Whether every stream has."""
        return self._num_ended == len(self.asks)

    async def run(self) -> list[Heard]:
        """Asks everything and waits for the end of each; a stream that breaks says so in its `error`."""
        async with anyio.create_task_group() as tasks:
            for ask, heard in zip(self.asks, self.heard, strict=True):
                tasks.start_soon(self._stream, ask, heard)
        return self.heard

    async def until(self, num_tokens: int) -> None:
        """Waits until so many tokens have come back in all, or every stream has ended."""
        while self.num_tokens < num_tokens and not self.has_ended:
            await self._news.wait()

    async def _stream(self, ask: Ask, heard: Heard) -> None:
        request = pb.GenerateTextRequest(
            prompt=ask.prompt, max_output_tokens=ask.max_tokens, temperature=0, ignore_eos=True, num_logprobs=2
        )
        async with self._limiter:
            try:
                async for response in self._stub.GenerateText(request, timeout=REQUEST_S):
                    _take(heard, response)
                    self._tell()
            except grpc.aio.AioRpcError as error:
                heard.error = f"{error.code().name}: {error.details()}"
        self._num_ended += 1
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


def _take(heard: Heard, response: pb.GenerateTextResponse) -> None:
    now_ns = time.monotonic_ns()
    heard.token_ids += response.token_ids
    heard.arrived_ns += [now_ns] * len(response.token_ids)
    heard.margins += [item.top_logprobs[0] - item.top_logprobs[1] for item in response.logprobs]
    heard.text += response.text
    if response.HasField("usage"):
        heard.num_cached_tokens = response.usage.num_cached_tokens
