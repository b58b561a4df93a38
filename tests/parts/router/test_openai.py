"""Validation of OpenAI's bodies: every refusal names its field, says nothing of the input, and is small."""

import gc
import json
import sys
import threading
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.http.body import INLINE_BYTES, MAX_INTEGER_DIGITS, bound_integers, decode, parse_body
from services.router.openai.refusal import Kind, RefusalError
from services.router.openai.replies import floored, token_name
from services.router.openai.requests import parse_chat, parse_completion
from services.router.openai.wanted import RequestBounds

BOUNDS = RequestBounds(vocabulary_size=100, max_context_tokens=50)
MESSAGES = [{"role": "user", "content": "hi"}]


def refused_chat(**body: Any) -> RefusalError:
    with pytest.raises(RefusalError) as refused:
        parse_chat({"messages": MESSAGES, **body}, BOUNDS)
    return refused.value


def refused_completion(**body: Any) -> RefusalError:
    with pytest.raises(RefusalError) as refused:
        parse_completion({"prompt": "x", **body}, BOUNDS)
    return refused.value


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-310),
    ("n", 0),
    ("n", 17),
    ("seed", 2**64),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", [1]),
    ("stop", "x" * 2000),
    ("stop", {}),
    ("stop_token_ids", [100]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"a": 5}),
    ("logit_bias", {"1" * 5000: 5}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 1),
    ("model", 5),
    ("priority", 2**40),
    ("response_format", {"type": "json_schema", "schema": {}}),
    ("response_format", {"type": "json_object"}),
    ("response_format", "text"),
    ("guided_json", {"type": "object"}),
    ("min_tokens", 3),
    ("prompt_logprobs", 1),
    ("best_of", 2),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_both_endpoints_refuse_by_name(field: str, value: Any) -> None:
    """P2.12, P2.13, P2.22"""
    for error in (refused_chat(**{field: value}), refused_completion(**{field: value})):
        assert error.kind is Kind.INVALID
        assert error.field == field
        assert error.message.startswith(field)
        assert len(error.message) < 200


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages[0]", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
        ("messages[1].content", {"messages": [*MESSAGES, {"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}),
        (
            "messages[0].content[1]",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        ),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 1}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("functions", {"functions": [{}]}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("continue_final_message", {"continue_final_message": True}),
    ],
)
def test_chats_are_refused_by_name(field: str, body: dict[str, Any]) -> None:
    assert refused_chat(**body).field == field


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", {}),
        ("prompt[0]", [[]]),
        ("prompt[0]", [1.5, 2]),
        ("prompt[1]", ["a", 5]),
        ("prompt[0][1]", [[1, 99999999]]),
        ("prompt[0][0]", [[-1]]),
        ("prompt[1]", [1, True]),
        ("prompt", ["a"] * 257),
    ],
)
def test_prompts_are_refused_by_name(field: str, prompt: Any) -> None:
    """P2.11, P2.12"""
    assert refused_completion(prompt=prompt).field == field


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("suffix", {"suffix": "x"}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("max_tokens", {"echo": True, "max_tokens": 0}),
        ("logprobs", {"logprobs": 21}),
    ],
)
def test_completions_are_refused_by_name(field: str, body: dict[str, Any]) -> None:
    """P2.8"""
    assert refused_completion(**body).field == field


def test_what_is_absent_has_openais_defaults() -> None:
    chat, ignored = parse_chat({"messages": MESSAGES}, BOUNDS)
    assert chat.max_output_tokens is None
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (1.0, 1.0, 0)
    assert (chat.num_choices, chat.num_logprobs, chat.sampling.seed, chat.stream) == (1, None, None, False)
    assert not ignored
    assert parse_completion({"prompt": "x"}, BOUNDS)[0].max_output_tokens == 16
    nulls = dict.fromkeys(("max_tokens", "temperature", "n", "stop", "logit_bias", "seed", "tools", "stream"))
    assert parse_chat({"messages": MESSAGES, **nulls}, BOUNDS)[0] == chat


@pytest.mark.parametrize("value", [1e-320, 5e-324, 1e-50])
def test_a_top_p_below_float32_keeps_the_top_token_alone(value: float) -> None:
    """As 0 on the wire it would be outside the sampler's range, and end the generation with everybody's requests."""
    asked, _ = parse_completion({"prompt": "x", "top_p": value}, BOUNDS)
    assert 0 < float(np.float32(asked.sampling.top_p)) < 1e-9


def test_what_is_given_is_taken() -> None:
    """P2.20"""
    asked, ignored = parse_chat(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ],
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "top_k": -1,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "logit_bias": {"7": -100, "3": 1},
            "logprobs": True,
            "tools": [{"type": "function"}],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {},
            "store": False,
            "parallel_tool_calls": True,
            "foo": 1,
        },
        BOUNDS,
    )
    assert asked.messages == ({"role": "system", "content": "ab"},)
    assert (asked.max_output_tokens, asked.sampling.top_k, asked.num_logprobs) == (7, 0, 0)
    assert asked.sampling.logit_bias == ((3, 1.0), (7, -100.0))
    assert (asked.stop, asked.stop_token_ids) == (("a", "b"), {3})
    assert asked.include_usage
    assert list(ignored) == ["foo"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3))), ("", ("",))],
)
def test_forms_of_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_completion({"prompt": prompt}, BOUNDS)[0].prompts == prompts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*sorted({field for field, _ in OUT_OF_RANGE}), "messages", "prompt", "logprobs", "tools"])


@given(st.dictionaries(FIELDS, JSON, max_size=5), st.booleans())
def test_any_body_is_taken_or_refused(body: dict[str, Any], is_chat: bool) -> None:
    """P2.19: there is no third way out."""
    parse = parse_chat if is_chat else parse_completion
    start: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": "x"}
    try:
        parse({**start, **body}, BOUNDS)
    except RefusalError as error:
        assert error.field
        assert len(json.dumps(error.body())) < 600


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"[" * 500_000, b'{"a":NaN}', b'{"a":-Infinity}', b"\xff\xfe\xfa", b"1" * 5000, b"{'a':1}"],
)
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(RefusalError) as refused:
        decode(body)
    assert refused.value.code == "invalid_json"
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(("num_bytes", "is_beside"), [(INLINE_BYTES, False), (INLINE_BYTES + 1, True)])
async def test_large_bodies_are_checked_beside_the_loop(num_bytes: int, is_beside: bool) -> None:
    """P5.15"""
    body = b'"' + b"x" * (num_bytes - 2) + b'"'

    def where(value: object) -> int:
        return threading.get_ident()

    found = await parse_body(body, where, anyio.CapacityLimiter(1))
    assert (found != threading.get_ident()) is is_beside


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"0," * 500_001 + b"0]",
        b"[" + b",".join([b"[[]]"] * 250_001) + b"]",
        b"[" + b",".join([b'{"a":0}'] * 100_001) + b"]",
    ],
)
def test_more_to_parse_than_the_loop_can_wait_for(body: bytes) -> None:
    """P5.15"""
    with pytest.raises(RefusalError) as refused:
        decode(body)
    assert (refused.value.kind, refused.value.code) == (Kind.TOO_LARGE, "body_too_large")
    assert decode(body, window_room=10**6), "a text or ids that the window holds may have as many"


def test_a_long_integer_is_refused_before_it_is_computed() -> None:
    """P5.15"""
    before = sys.get_int_max_str_digits()
    bound_integers()
    try:
        assert decode(b"9" * MAX_INTEGER_DIGITS) == 10**MAX_INTEGER_DIGITS - 1
        with pytest.raises(RefusalError) as refused:
            decode(b"9" * (MAX_INTEGER_DIGITS + 1))
    finally:
        sys.set_int_max_str_digits(before)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize("ending", [b"]", b"}"])
async def test_the_collector_is_away_while_a_large_body_is_parsed(ending: bytes) -> None:
    """P5.15: it would go through all lists so far again and again, which takes ten times as long as parsing them."""
    ran: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        ran.append(phase)

    parsed: list[int] = []
    gc.callbacks.append(note)
    try:
        with suppress(RefusalError):
            # The collector may run again once the document is there.
            await parse_body(
                b"[" + b",".join([b"[]"] * 100_000) + ending,
                lambda _: parsed.append(len(ran)),
                anyio.CapacityLimiter(1),
            )
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert (parsed or [len(ran)])[0] <= 4, "100,000 lists would have had the collector run a hundred times"


def test_log_probabilities_that_json_cannot_write() -> None:
    """P2.9"""
    assert [floored(value) for value in (float("-inf"), float("nan"), -1.5, -1e9)] == [-9999.0, -9999.0, -1.5, -9999.0]
    assert token_name(b"a") == "a"
    assert token_name(b"\xe2\x82") == "bytes:\\xe2\\x82"
