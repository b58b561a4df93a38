"""What ends early and what is refused, over real sockets and a scheduler at the other end of a real stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from services.core.request import Rejected, RejectReason
from services.router.http.protocol import MAX_HEAD_BYTES
from tests.support.router_stand import ALPHABET, Stand, alphabet, events_of, eventually, stand
from tests.unit.router.test_sessions import a_choice


@pytest_asyncio.fixture
async def at(tmp_path: Path) -> AsyncIterator[Stand]:
    async with stand(tmp_path, alphabet) as found:
        yield found


async def test_a_lost_generation_is_not_seen_by_the_client(at: Stand) -> None:
    """P2.25"""
    at.scheduler.gate_at = 4
    asked = asyncio.ensure_future(at.complete(prompt="go", max_tokens=10, seed=5, stream=True))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    await at.scheduler.until(lambda: at.router.admission.num_open_requests == 1)
    at.scheduler.lose("rank 1: killed")
    at.scheduler.open_gate()
    at.scheduler.reopen()
    events = events_of((await asked).text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "ABCDEFGHIJ"
    first, second = at.scheduler.requests()
    assert first.request_id != second.request_id
    assert second.token_ids[:2] == first.token_ids
    assert bytes(second.token_ids[2:]) == ALPHABET[: len(second.token_ids) - 2]
    assert (second.num_prompt_tokens, second.max_output_tokens) == (2, 10)
    assert second.sampling == first.sampling
    await eventually(lambda: at.router.health.served_generation == 2)


async def test_a_restarted_scheduler_is_not_seen_by_the_client(at: Stand) -> None:
    at.scheduler.gate_at = 2
    asked = asyncio.ensure_future(at.chat(max_tokens=6))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    at.scheduler.hang_up()
    at.scheduler.open_gate()
    body = (await asked).json()
    assert body["choices"][0]["message"]["content"] == "ABCDEF"
    assert body["usage"]["completion_tokens"] == 6
    assert at.scheduler.num_streams == 2


async def test_a_stream_that_is_given_up_between_two_words_is_not_the_routers_end(at: Stand) -> None:
    at.scheduler.gate_at = 2
    asked = asyncio.ensure_future(at.chat(max_tokens=6))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    at.router.client.drop("a test")
    # With the next turn of the loop this is to be said on a stream that is closed by then.
    late = a_choice(max_output_tokens=6)
    at.router.client.open(late, lambda: None)
    at.scheduler.open_gate()
    assert (await asked).json()["choices"][0]["message"]["content"] == "ABCDEF"
    await eventually(lambda: late.ending is not None)
    assert at.scheduler.num_streams == 2


async def test_the_budget_of_a_lost_generation_ends(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, resubmit_budget_s=0.0) as at:
        at.scheduler.gate_at = 2
        asked = [asyncio.ensure_future(at.chat(stream=stream)) for stream in (True, False)]
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 2)
        await eventually(lambda: at.router.client.num_open == 2)
        at.scheduler.lose("rank 0: killed")
        streamed, whole = [await answer for answer in asked]
        assert whole.status_code == 503
        assert "rank 0: killed" in whole.json()["error"]["message"]
        assert whole.headers["retry-after"]
        if streamed.status_code == 200:
            events = events_of(streamed.text)
            assert "error" in events[-2]
            assert events[-1] == "[DONE]"
        else:
            assert streamed.status_code == 503
        refused = await at.chat()
        assert refused.status_code == 503
        assert "rank 0: killed" in refused.json()["error"]["message"]
        ready = await at.http.get("/ready")
        assert ready.status_code == 503
        assert "rank 0: killed" in ready.text
        at.scheduler.open_gate()
        at.scheduler.reopen()
        await eventually(lambda: at.router.health.served_generation == 2)
        assert (await at.chat()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_the_connection_aborts(at: Stand, stream: bool) -> None:
    """P2.17"""
    at.scheduler.gate_at = 2
    asked = asyncio.ensure_future(at.chat(stream=stream, n=2))
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 2)
    asked.cancel()
    await at.scheduler.until(lambda: len(at.scheduler.aborted) == 2)
    assert {*at.scheduler.aborted} == {submission.request_id for submission in at.scheduler.requests()}
    assert at.router.client.num_open == 0
    assert at.router.admission.num_open_requests == 0
    assert at.router.admission.num_streams == 0


async def test_drain_ends_with_a_word(tmp_path: Path) -> None:
    """P5.8"""
    async with stand(tmp_path, alphabet, drain_s=0.0) as at:
        at.scheduler.gate_at = 2
        asked = [asyncio.ensure_future(at.chat(stream=stream)) for stream in (True, True, False, False)]
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 4)
        await eventually(lambda: at.router.client.num_open == 4)
        at.shell.stop.set()
        answers = [await answer for answer in asked]
        for answer in answers[:2]:
            if answer.status_code == 200:
                events = events_of(answer.text)
                assert "shutting down" in events[-2]["error"]["message"]
                assert events[-1] == "[DONE]"
        for answer in answers[2:]:
            assert answer.status_code == 503
            assert "shutting down" in answer.json()["error"]["message"]


async def test_drain_lets_open_requests_end(at: Stand) -> None:
    at.scheduler.gate_at = 2
    asked = asyncio.ensure_future(at.chat())
    await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
    at.shell.stop.set()
    await eventually(lambda: at.router.admission.closed_because is not None)
    at.scheduler.open_gate()
    assert (await asked).json()["choices"][0]["message"]["content"] == ALPHABET.decode()


@pytest.mark.parametrize("content", [b"[]", b"null", b"123", b'"x"', b"{", b"", b"[" * 500_000 + b"]" * 500_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_malformed_bodies(at: Stand, path: str, content: bytes) -> None:
    """P2.19"""
    answer = await at.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.content) < 8192


@pytest.mark.parametrize("line", [b"x-flood: 1\r\n" * 1000, b"y" * 16_384])
async def test_a_head_that_does_not_end_is_not_kept(at: Stand, line: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nx-long: ")
    num_bytes = 0
    with suppress(ConnectionError):
        while not reader.at_eof() and num_bytes < 64 * MAX_HEAD_BYTES:
            writer.write(line)
            num_bytes += len(line)
            await writer.drain()
            await asyncio.sleep(0)
    assert num_bytes < 64 * MAX_HEAD_BYTES, "the connection was still taking bytes"
    writer.close()
    large = {"x-large": "y" * (MAX_HEAD_BYTES // 2)}
    assert (await at.http.get("/version", headers=large)).status_code == 200


async def test_wrong_content_type_method_and_path(at: Stand) -> None:
    """P2.19"""
    for headers in ({}, {"content-type": "text/plain"}):
        answer = await at.http.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["message"]
    assert (await at.http.get("/v1/completions")).status_code == 405
    missing = await at.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


async def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, max_request_bytes=4096) as at:
        answer = await at.complete(prompt="a" * 5_000_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert (await at.complete(prompt="a", max_tokens=1)).status_code == 200


async def test_many_values_are_refused_by_count(at: Stand) -> None:
    answer = await at.http.post(
        "/v1/completions", content=b'{"x":[' + b"1," * 600_000 + b"1]}", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


async def test_errors_never_echo_the_input(at: Stand) -> None:
    """P2.21"""
    parts = [{"type": "secret-thing", "text": ["secret-thing"]}] * 4000
    answer = await at.chat(messages=[{"role": "user", "content": parts}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert b"secret-thing" not in answer.content
    assert len(answer.content) < 1024


async def test_a_template_refuses_with_its_own_words(at: Stand) -> None:
    """P2.24"""
    answer = await at.chat(messages=[{"role": "tool", "content": "x"}])
    assert answer.status_code == 400
    assert "no tools here" in answer.json()["error"]["message"]


async def test_unknown_fields_are_tolerated(at: Stand) -> None:
    """P2.20"""
    answer = await at.chat(
        messages=[{"role": "user", "content": "x", "id": "1"}],
        foo=1,
        metadata={},
        store=False,
        parallel_tool_calls=True,
        user="me",
        max_tokens=1,
    )
    assert answer.status_code == 200


async def test_overload_is_429(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, max_open_requests=1) as at:
        at.scheduler.gate_at = 1
        first = asyncio.ensure_future(at.chat(max_tokens=2))
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
        second = await at.chat()
        assert second.status_code == 429
        assert second.headers["retry-after"]
        assert second.json()["error"]["type"] == "rate_limit_error"
        at.scheduler.open_gate()
        assert (await first).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("reason", "status"),
    [(RejectReason.OVERLOADED, 429), (RejectReason.INVALID, 400), (RejectReason.UNAVAILABLE, 503)],
)
async def test_the_schedulers_refusals_keep_their_status(
    at: Stand, reason: RejectReason, status: int, stream: bool
) -> None:
    at.scheduler.refuse = lambda submission: Rejected(submission.request_id, reason, "token_ids", "too many: 9 of 8")
    answer = await at.chat(stream=stream)
    assert answer.status_code == status
    assert "9 of 8" in answer.json()["error"]["message"]


async def test_a_key_where_one_is_set(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, api_key="sesame") as at:
        refused = await at.chat()
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        answer = await at.http.get("/v1/models", headers={"authorization": "Bearer sesame"})
        assert answer.status_code == 200
        assert (await at.http.get("/health")).status_code in (200, 503)


async def test_equal_client_ids_are_served_both(at: Stand) -> None:
    """P2.15"""
    headers = {"x-request-id": "mine"}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answers = await asyncio.gather(
        *(at.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2))
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert len({answer.json()["id"] for answer in answers}) == 2
