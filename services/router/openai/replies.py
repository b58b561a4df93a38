"""OpenAI's response bodies, whole and in chunks, for both endpoints. Pure.

A log-probability of minus infinity has no JSON; it is written as `LOGPROB_FLOOR`. Chunks carry no empty content. A
token's `bytes` are exact; its text is a rendering, with U+FFFD for half a character.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.core.ids import TokenId
from services.core.request import FinishReason, TokenLogprobs
from services.router.openai.wanted import Endpoint
from services.router.streams.sessions import Delta

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, as in other servers."""
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
TokenBytes = Callable[[TokenId], bytes]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: each prompt once, the outputs of all choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def body(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class Collected:
    """All of one choice, for an answer in one piece."""

    text: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Takes what became final."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.ending is not None:
            self.reason = delta.ending.reason


def finish_word(reason: FinishReason | None) -> str | None:
    """OpenAI's finish_reason; None while the choice goes on."""
    return None if reason is None else _FINISH[reason]


class Replies:
    """Builds the bodies of one request's answer. Holds what all of them repeat, and how far each text has come."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        reply_id: str,
        created_s: int,
        model: str,
        fingerprint: str,
        token_bytes: TokenBytes,
        wants_logprobs: bool,
        includes_usage: bool,
        echo_lengths: Sequence[int] = (),
    ) -> None:
        self._is_chat = endpoint is Endpoint.CHAT
        self._head: dict[str, object] = {
            "id": reply_id,
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._token_bytes = token_bytes
        self._wants_logprobs, self._includes_usage = wants_logprobs, includes_usage
        self._offsets = dict(enumerate(echo_lengths))

    def role_chunk(self, index: int) -> dict[str, object]:
        """The first chunk of a chat's choice."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, **_OPEN})

    def chunks(self, index: int, delta: Delta) -> list[dict[str, object]]:
        """What a delta is to a streaming client: its text, then its end."""
        bodies: list[dict[str, object]] = []
        reason = None if delta.ending is None else delta.ending.reason
        if self._is_chat:
            if delta.text or delta.logprobs:
                bodies.append(self._chunk({**self._chat_choice(index, delta), "finish_reason": None}))
            if reason is not None:
                bodies.append(self._chunk({"index": index, "delta": {}, "logprobs": None, **_finish(reason)}))
        else:
            choice = {"index": index, "text": delta.text, "logprobs": self._completion_logprobs(index, delta)}
            bodies.append(self._chunk({**choice, "finish_reason": finish_word(reason)}))
        return bodies

    def usage_chunk(self, usage: Usage) -> dict[str, object]:
        """The last chunk of a stream that asked for usage."""
        return {**self._head, "object": self._chunk_object, "choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Collected], usage: Usage) -> dict[str, object]:
        """The answer in one piece."""
        build = self._whole_chat if self._is_chat else self._whole_completion
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [build(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.body(),
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        body = {**self._head, "object": self._chunk_object, "choices": [choice]}
        if self._includes_usage:
            body["usage"] = None
        return body

    def _chat_choice(self, index: int, delta: Delta) -> dict[str, object]:
        return {"index": index, "delta": {"content": delta.text}, "logprobs": self._chat_logprobs(delta)}

    def _whole_chat(self, index: int, choice: Collected) -> dict[str, object]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        logprobs = self._chat_logprobs(choice)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_word(choice.reason)}

    def _whole_completion(self, index: int, choice: Collected) -> dict[str, object]:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": self._completion_logprobs(index, choice),
            "finish_reason": finish_word(choice.reason),
        }

    def _chat_logprobs(self, part: Delta | Collected) -> dict[str, object] | None:
        if not self._wants_logprobs:
            return None
        pairs = zip(part.token_ids, part.logprobs, strict=True)
        return {"content": [self._chat_logprob(token_id, values) for token_id, values in pairs], "refusal": None}

    def _chat_logprob(self, token_id: TokenId, values: TokenLogprobs) -> dict[str, object]:
        top = [self._token(other, value) for other, value in values.top]
        return {**self._token(token_id, values.sampled), "top_logprobs": top}

    def _token(self, token_id: TokenId, value: float) -> dict[str, object]:
        raw = self._token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": floored(value), "bytes": list(raw)}

    def _completion_logprobs(self, index: int, part: Delta | Collected) -> dict[str, object] | None:
        if not self._wants_logprobs:
            return None
        texts = [token_name(self._token_bytes(token_id)) for token_id in part.token_ids]
        return {
            "tokens": texts,
            "token_logprobs": [floored(values.sampled) for values in part.logprobs],
            "top_logprobs": [
                self._top_by_name(text, values) for text, values in zip(texts, part.logprobs, strict=True)
            ],
            "text_offset": self._advance(index, part.token_ids),
        }

    def _top_by_name(self, sampled: str, values: TokenLogprobs) -> dict[str, float]:
        top = {token_name(self._token_bytes(other)): floored(value) for other, value in values.top}
        top.setdefault(sampled, floored(values.sampled))
        return top

    def _advance(self, index: int, token_ids: Sequence[TokenId]) -> list[int]:
        offset = self._offsets.get(index, 0)
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(self._token_bytes(token_id).decode("utf-8", "ignore"))
        self._offsets[index] = offset
        return offsets


_OPEN: dict[str, object] = {"logprobs": None, "finish_reason": None}


def _finish(reason: FinishReason) -> dict[str, object]:
    return {"finish_reason": finish_word(reason)}


def floored(value: float) -> float:
    """A log-probability that JSON can write; anything that is not a number counts as impossible."""
    return value if value > LOGPROB_FLOOR else LOGPROB_FLOOR


def token_name(raw: bytes) -> str:
    """A token as the completions endpoint names it: its text, or its bytes where they are not text by themselves."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
