"""OpenRequest, as both fronts (HTTP and gRPC) use it: a validated request in, deltas out.

Tokenises, checks the window, opens one choice for each draw of each prompt, and closes them whatever happens: leaving
`generate` before the end is what aborts. Never renders an answer, never knows a socket.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from services.core.ids import RequestId, TokenId
from services.core.request import SamplingParams, Submission
from services.router.admission import Admission
from services.router.openai.refusal import Kind, RefusalError, invalid
from services.router.openai.wanted import Endpoint, InferenceRequest, Prompt
from services.router.request_metrics import RequestMetrics
from services.router.request_span import describe
from services.router.streams.open_request import OpenRequest
from services.router.streams.scheduler_client import OpenGroup, SchedulerClient
from services.router.streams.sessions import Choice
from services.router.text.detokenize import StopStrings
from services.router.text.served_model import ServedModel

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of one request's choices: odd, so that no two of them meet in 64 bits."""
_ID_PREFIX = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}


class Inference:
    """The core that both fronts share."""

    def __init__(
        self,
        model: ServedModel,
        client: SchedulerClient,
        admission: Admission,
        metrics: RequestMetrics,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.client, self.admission = model, client, admission
        self._metrics, self._tracer, self._clock = metrics, tracer, clock

    def check_model(self, name: str | None) -> None:
        """Returns if `name` is the model served, or nothing.

        Raises:
            RefusalError: another one.
        """
        if name and name != self.model.name:
            raise RefusalError(
                Kind.NOT_FOUND,
                f"model is not served here: there is {self.model.name}",
                field="model",
                code="model_not_found",
            )

    @asynccontextmanager
    async def generate(self, asked: InferenceRequest, context: Context | None = None) -> AsyncIterator[OpenRequest]:
        """Opens the request; leaving the block aborts what has not ended.

        Raises:
            RefusalError: it cannot be served, on entry; or a choice failed, from `updates`.
        """
        began_s, outcome = self._clock(), "aborted"
        generation: OpenRequest | None = None
        # Not made current: what runs in between belongs to many requests.
        span = self._tracer.start_span(f"{asked.endpoint.value} {self.model.name}", context, SpanKind.SERVER)
        try:
            with self.admission.request(stream=asked.stream), self._metrics.open_requests.track_inprogress():
                generation = await self._open(asked, began_s)
                try:
                    yield generation
                finally:
                    self._close(generation)
                outcome = "ok" if all(choice.ending is not None for choice in generation.choices) else "aborted"
        except RefusalError as error:
            outcome = error.kind.name.lower()
            span.set_status(Status(StatusCode.ERROR, error.message))
            raise
        finally:
            self._account(asked, generation, began_s, outcome)
            describe(span, asked, self.model.name, generation)
            span.end()

    async def _open(self, asked: InferenceRequest, began_s: float) -> OpenRequest:
        self.check_model(asked.model)
        group = self._group()
        prompts = [await self._encode(prompt, group) for prompt in asked.prompts]
        if asked.endpoint is Endpoint.CHAT:
            prompts = [await self._encode_chat(asked, group)]
        reply_id = f"{_ID_PREFIX[asked.endpoint]}-{secrets.token_hex(12)}"
        echoes = [self._echo(asked, place, ids) for place, ids in enumerate(prompts)]
        choices = self._choices(asked, prompts, echoes, reply_id, group)
        generation = OpenRequest(
            asked,
            reply_id,
            choices,
            echoes,
            began_s=began_s,
            created_s=int(time.time()),
            observe_gap=self._metrics.token_gap_s.observe,
            clock=self._clock,
        )
        for choice in choices:
            self.client.open(choice, generation.wake)
        return generation

    def _group(self) -> OpenGroup:
        if self.client.group is None:
            raise RefusalError(
                Kind.UNAVAILABLE,
                f"the model is not ready: waiting for {self.client.waiting_for}",
                code="model_not_ready",
                retry_after_s=2,
            )
        return self.client.group

    async def _encode(self, prompt: Prompt, group: OpenGroup) -> tuple[TokenId, ...]:
        if not isinstance(prompt, str):
            return prompt
        with self.admission.tokenising(len(prompt)):
            return await self.model.encode(prompt, field="prompt", max_tokens=group.max_context_tokens - 1)

    async def _encode_chat(self, asked: InferenceRequest, group: OpenGroup) -> tuple[TokenId, ...]:
        num_chars = sum(len(str(message["content"])) for message in asked.messages)
        with self.admission.tokenising(num_chars):
            return await self.model.encode_chat(asked.messages, max_tokens=group.max_context_tokens - 1)

    def _echo(self, asked: InferenceRequest, place: int, ids: tuple[TokenId, ...]) -> str:
        if not asked.echo:
            return ""
        prompt = asked.prompts[place]
        return prompt if isinstance(prompt, str) else self.model.tokens.decode(ids, with_control=True)

    def _choices(
        self,
        asked: InferenceRequest,
        prompts: list[tuple[TokenId, ...]],
        echoes: list[str],
        reply_id: str,
        group: OpenGroup,
    ) -> list[Choice]:
        seed = secrets.randbits(64) if asked.sampling.seed is None else asked.sampling.seed
        field = "messages" if asked.endpoint is Endpoint.CHAT else "prompt"
        stops = StopStrings(asked.stop) if asked.stop else None
        choices: list[Choice] = []
        for prompt, echo in zip(prompts, echoes, strict=True):
            max_output_tokens = _fitted(asked, field, len(prompt), group.max_context_tokens)
            for _ in range(asked.num_choices):
                index = len(choices)
                submission = Submission(
                    request_id=RequestId(f"{reply_id}.{index}"),
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                    max_output_tokens=max_output_tokens,
                    sampling=_sampling(asked, (seed + index * SEED_STRIDE) % 2**64),
                    stop_token_ids=asked.stop_token_ids | (frozenset() if asked.ignore_eos else self.model.end_ids),
                    num_logprobs=asked.num_logprobs,
                    priority=asked.priority,
                )
                choices.append(Choice(index, submission, self.model.choice_text(stops), echo))
        return choices

    def _close(self, generation: OpenRequest) -> None:
        for choice in generation.choices:
            self.client.release(choice)

    def _account(self, asked: InferenceRequest, generation: OpenRequest | None, began_s: float, outcome: str) -> None:
        endpoint, metrics = asked.endpoint.value, self._metrics
        metrics.requests.labels(endpoint, outcome).inc()
        if generation is None:
            return
        usage = generation.usage
        metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        metrics.output_tokens.inc(usage.num_output_tokens)
        metrics.cached_tokens.inc(usage.num_cached_tokens)
        metrics.resubmitted.inc(sum(choice.num_resubmissions for choice in generation.choices))
        metrics.duration_s.labels(endpoint).observe(self._clock() - began_s)
        if (first_s := generation.first_token_s) is not None:
            metrics.first_token_s.labels(endpoint).observe(first_s - began_s)


def _fitted(asked: InferenceRequest, field: str, num_prompt_tokens: int, max_context_tokens: int) -> int:
    """Output tokens that the window leaves, at most what was asked."""
    room = max_context_tokens - num_prompt_tokens
    if room < 1:
        raise _too_long(field, str(num_prompt_tokens), max_context_tokens)
    return room if asked.max_output_tokens is None else min(asked.max_output_tokens, room)


def _too_long(field: str, num_tokens: str, max_context_tokens: int) -> RefusalError:
    return invalid(
        field,
        f"has {num_tokens} tokens and the window is {max_context_tokens}, of which at least one is for the answer: "
        "shorten it",
        "context_length_exceeded",
    )


def _sampling(asked: InferenceRequest, seed: int) -> SamplingParams:
    wanted = asked.sampling
    return SamplingParams(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seed,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty,
        logit_bias=wanted.logit_bias,
    )
