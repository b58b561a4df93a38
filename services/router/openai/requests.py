"""OpenAI's request bodies, chat and completions, to `InferenceRequest`. Pure.

Never echoes input, never knows a socket. Rules that OpenAI leaves open:

- `max_tokens` absent or null: the rest of the window for a chat, 16 for a completion. Zero and below: 400. More than
  the window leaves: cut there, and the answer ends with `finish_reason` "length"; no room at all is a 400.
- unknown fields are ignored (and reported to the caller once); known ones that would change the answer are refused.
- `developer` messages are `system` messages; parts of type text are joined.
"""

from collections.abc import Collection

from services.core.ids import TokenId
from services.router.openai.fields import Fields, integer, number, sequence, shown
from services.router.openai.messages import read_messages
from services.router.openai.refusal import Kind, RefusalError, invalid, unsupported
from services.router.openai.unsupported import refuse_unsupported
from services.router.openai.wanted import Endpoint, InferenceRequest, Prompt, RequestBounds, SamplingOptions

COMPLETIONS_DEFAULT_TOKENS = 16
MAX_PROMPTS = 256
"""Prompts of one completions request."""
MAX_STOP_CHARS = 1024
"""Longest stop string: what a stream may hold back."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MIN_TOP_P = 2.0**-100
"""A smaller `top_p` asks for the same, the most probable token alone, and would be 0 as the float32 it travels as."""
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: much less makes them infinite, and the request would fail in the model."""
MAX_ASKED_TOKENS = 10**15
"""Above any window; only keeps the number an ordinary one."""
_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")


def parse_chat(body: object, bounds: RequestBounds) -> tuple[InferenceRequest, Collection[str]]:
    """The request and the names of the fields that were ignored.

    Raises:
        RefusalError: naming the first field at fault.
    """
    fields = _top_level(body)
    refuse_unsupported(fields, Endpoint.CHAT)
    stream = fields.flag("stream")
    asked = InferenceRequest(
        endpoint=Endpoint.CHAT,
        model=fields.string("model"),
        messages=read_messages(fields),
        max_output_tokens=_chat_max_tokens(fields),
        num_choices=_num_choices(fields, bounds),
        sampling=_sampling(fields, bounds),
        stop=_stop(fields, bounds),
        stop_token_ids=_stop_token_ids(fields, bounds),
        ignore_eos=fields.flag("ignore_eos"),
        num_logprobs=_chat_logprobs(fields, bounds),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
    )
    return asked, fields.unread()


def parse_completion(body: object, bounds: RequestBounds) -> tuple[InferenceRequest, Collection[str]]:
    """The request and the names of the fields that were ignored.

    Raises:
        RefusalError: naming the first field at fault.
    """
    fields = _top_level(body)
    refuse_unsupported(fields, Endpoint.COMPLETIONS)
    stream = fields.flag("stream")
    echo = fields.flag("echo")
    num_logprobs = fields.integer("logprobs", 0, bounds.max_top_logprobs)
    if echo and num_logprobs is not None:
        raise unsupported("echo", "with logprobs is not supported yet: leave one of them out")
    asked = InferenceRequest(
        endpoint=Endpoint.COMPLETIONS,
        model=fields.string("model"),
        prompts=read_prompts(fields.value("prompt"), bounds),
        max_output_tokens=fields.integer("max_tokens", 1, MAX_ASKED_TOKENS) or COMPLETIONS_DEFAULT_TOKENS,
        num_choices=_num_choices(fields, bounds),
        sampling=_sampling(fields, bounds),
        stop=_stop(fields, bounds),
        stop_token_ids=_stop_token_ids(fields, bounds),
        ignore_eos=fields.flag("ignore_eos"),
        num_logprobs=num_logprobs,
        echo=echo,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
    )
    return asked, fields.unread()


def read_prompts(value: object, bounds: RequestBounds) -> tuple[Prompt, ...]:
    """One prompt or a batch of them: strings, or lists of ids.

    Raises:
        RefusalError: nothing there, a wrong type, or an id outside the vocabulary.
    """
    if value is None:
        raise invalid("prompt", "is required: a string, a list of strings, or token ids")
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list):
        raise invalid("prompt", f"must be a string or a list, got {shown(value)}")
    if not value:
        raise invalid("prompt", "must not be empty")
    if not isinstance(value[0], str | list):
        return (read_token_ids(value, "prompt", bounds),)
    entries = sequence(value, "prompt", MAX_PROMPTS)
    return tuple(_prompt(entry, f"prompt[{place}]", bounds) for place, entry in enumerate(entries))


def read_token_ids(value: list[object], path: str, bounds: RequestBounds) -> tuple[TokenId, ...]:
    """Ids that a client made itself.

    Raises:
        RefusalError: none, or one outside the vocabulary.
    """
    if not value:
        raise invalid(path, "must not be empty")
    size = bounds.vocabulary_size
    ids: list[TokenId] = []
    for place, item in enumerate(value):
        # The usual case is checked without a call: a prompt may hold a million ids.
        if type(item) is int and 0 <= item < size:
            ids.append(TokenId(item))
        else:
            ids.append(TokenId(integer(item, f"{path}[{place}]", 0, size - 1)))
    return tuple(ids)


def _top_level(body: object) -> Fields:
    if not isinstance(body, dict):
        raise RefusalError(Kind.INVALID, f"the body must be a JSON object, got {shown(body)}", code="invalid_body")
    fields = Fields(body)
    for name in _IGNORED:
        fields.value(name)
    return fields


def _prompt(entry: object, path: str, bounds: RequestBounds) -> Prompt:
    if isinstance(entry, str):
        return _text(entry, path)
    if isinstance(entry, list):
        return read_token_ids(entry, path, bounds)
    raise invalid(path, f"must be a string or a list of token ids, got {shown(entry)}")


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(path, "has half of a surrogate pair and is not valid Unicode") from None
    return value


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, MAX_ASKED_TOKENS)
    new = fields.integer("max_completion_tokens", 1, MAX_ASKED_TOKENS)
    return new if new is not None else old


def _num_choices(fields: Fields, bounds: RequestBounds) -> int:
    return fields.integer("n", 1, bounds.max_choices) or 1


def _sampling(fields: Fields, bounds: RequestBounds) -> SamplingOptions:
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return SamplingOptions(
        temperature=_default(fields.number("temperature", 0.0, 2.0), 1.0),
        top_p=max(_default(fields.number("top_p", 0.0, 1.0, above=True), 1.0), MIN_TOP_P),
        # -1 is how other servers spell "all".
        top_k=max(fields.integer("top_k", -1, bounds.vocabulary_size) or 0, 0),
        min_p=_default(fields.number("min_p", 0.0, 1.0), 0.0),
        seed=None if seed is None else seed % 2**64,
        presence_penalty=_default(fields.number("presence_penalty", -2.0, 2.0), 0.0),
        frequency_penalty=_default(fields.number("frequency_penalty", -2.0, 2.0), 0.0),
        repetition_penalty=_default(fields.number("repetition_penalty", MIN_REPETITION_PENALTY, 10.0), 1.0),
        logit_bias=_logit_bias(fields.value("logit_bias"), bounds),
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(value: object, bounds: RequestBounds) -> tuple[tuple[TokenId, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("logit_bias", f"must be an object from token id to bias, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise invalid("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries, got {len(value)}")
    biases = {_bias_id(key, bounds): number(bias, "logit_bias", -100.0, 100.0) for key, bias in value.items()}
    return tuple(sorted(biases.items()))


def _bias_id(key: str, bounds: RequestBounds) -> TokenId:
    if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 12):
        raise invalid("logit_bias", "must have token ids as keys, written as decimal integers")
    return TokenId(integer(int(key), "logit_bias", 0, bounds.vocabulary_size - 1))


def _stop(fields: Fields, bounds: RequestBounds) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else sequence(value, "stop", bounds.max_stop_strings)
    return tuple(_stop_string(entry) for entry in entries)


def _stop_string(entry: object) -> str:
    if not isinstance(entry, str):
        raise invalid("stop", f"must be a string or a list of strings, got {shown(entry)}")
    if not 1 <= len(entry) <= MAX_STOP_CHARS:
        raise invalid("stop", f"must have 1 to {MAX_STOP_CHARS} characters in each string, got {len(entry)}")
    return entry


def _stop_token_ids(fields: Fields, bounds: RequestBounds) -> frozenset[TokenId]:
    value = fields.value("stop_token_ids")
    if value is None:
        return frozenset()
    entries = sequence(value, "stop_token_ids", MAX_STOP_TOKEN_IDS)
    return frozenset(TokenId(integer(entry, "stop_token_ids", 0, bounds.vocabulary_size - 1)) for entry in entries)


def _chat_logprobs(fields: Fields, bounds: RequestBounds) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, bounds.max_top_logprobs)
    if top and not wanted:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    return options.flag("include_usage")
