"""The load generator against a real socket of this process: what it hears, when, and what it refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from tools.load.arrivals import Arrival, fit, read_trace
from tools.load.http_client import Loopback, StreamError, parse_loopback, stream_events
from tools.load.http_load import HttpLoad, Shape, prompt_ids

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def completion(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def ending(num_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": num_tokens}}) + b"data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Loopback]:
    """An HTTP server that reads a request and leaves the answer's bytes to `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        await answer(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield Loopback(host, port)


def pieces(*parts: bytes) -> Answer:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def heard(answer: Answer) -> list[object]:
    async with server(answer) as address:
        return [found async for _, found in stream_events(address, "/v1/completions", {})]


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "http://127.9.9.9:80/", "[::1]:8000", "localhost:1"])
def test_addresses_of_this_machine(text: str) -> None:
    assert parse_loopback(text).port in (8000, 80, 1)


@pytest.mark.parametrize(
    "text", ["10.0.0.1:80", "0.0.0.0:80", "example.org:80", "127.0.0.1", ":80", "127.0.0.1:0", "127.0.0.1.evil.org:80"]
)
def test_every_other_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"loopback|no address"):
        parse_loopback(text)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_do_not_depend_on_how_the_body_is_cut(size: int) -> None:
    body = completion("é") + completion("b", "length") + ending(2)
    cut = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
    found = await heard(pieces(HEAD, *cut, chunk(b"")))
    assert [item["choices"][0]["text"] for item in found[:2]] == ["é", "b"]  # type: ignore[index]
    assert found[2]["usage"] == {"completion_tokens": 2}  # type: ignore[index]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([HEAD, chunk(completion("a")), chunk(b"")], "ended without"),
        ([HEAD, chunk(completion("a"))], "broke"),
        ([HEAD, b"ffffffff\r\n"], "at most"),
        ([HEAD, b"zz\r\n"], "broke"),
        ([HEAD, chunk(event({"error": {"message": "the group is gone"}}))], "the group is gone"),
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"], "HTTP 429: full"),
        ([b"SSH-2.0\r\n\r\n"], "no HTTP"),
        ([], "broke"),
    ],
)
async def test_whatever_is_not_a_whole_stream_is_an_error(parts: Sequence[bytes], words: str) -> None:
    with pytest.raises(StreamError, match=words):
        await heard(pieces(*parts))


async def asked(answer: Answer, shape: Shape, seconds: float) -> HttpLoad:
    async with server(answer) as address:
        load = HttpLoad(address, "some", shape)
        await load.run(seconds)
        return load


async def test_a_decoder_asks_until_its_time_is_over_and_then_ends_whole() -> None:
    bodies: list[dict[str, object]] = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        num_tokens = body["max_tokens"]
        assert isinstance(num_tokens, int)
        tokens = [chunk(completion("t")) for _ in range(num_tokens - 1)] + [chunk(completion("t", "length"))]
        writer.write(HEAD + b"".join(tokens) + chunk(ending(num_tokens)) + chunk(b""))

    load = await asked(answer, Shape(num_decoders=2, decoder_tokens=5, decoder_prompt_tokens=9, burst_prompts=0), 0.05)
    assert len(load.streamed) == len(bodies) >= 2
    assert all(stream.is_whole and len(stream.arrived_ns) == 5 and stream.ttft_ns for stream in load.streamed)
    prompts = [body["prompt"] for body in bodies]
    assert {len(prompt) for prompt in prompts} == {9}  # type: ignore[arg-type]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)  # type: ignore[arg-type]
    assert all(body["temperature"] == 0 and body["ignore_eos"] and body["stream"] for body in bodies)


async def test_what_breaks_is_recorded_and_counts_as_failed() -> None:
    load = await asked(pieces(HEAD, chunk(completion("t"))), Shape(num_decoders=1, burst_prompts=0), 0.01)
    assert [stream.is_whole for stream in load.streamed] == [False]
    assert "broke" in load.streamed[0].error


async def test_an_answer_that_is_shorter_than_asked_counts_as_failed() -> None:
    answer = pieces(HEAD, chunk(completion("t", "stop") + ending(1)), chunk(b""))
    load = await asked(answer, Shape(num_decoders=0, burst_prompts=0, arrivals=(Arrival(0.0, 4, 3),)), 1.0)
    assert [(stream.kind, stream.error, stream.is_whole) for stream in load.streamed] == [("arrival", "", False)]


async def test_an_ending_without_text_is_no_token() -> None:
    body = completion("a") + completion("", None) + completion("", "length") + ending(2)
    load = await asked(
        pieces(HEAD, chunk(body), chunk(b"")),
        Shape(num_decoders=0, burst_prompts=0, arrivals=(Arrival(0.0, 4, 2),)),
        1.0,
    )
    assert len(load.streamed[0].arrived_ns) == 2
    assert load.streamed[0].is_whole


async def prompts_of(seed: int | None) -> list[object]:
    bodies: list[object] = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body["prompt"])
        writer.write(HEAD + chunk(completion("t", "length") + ending(1)) + chunk(b""))

    async with server(answer) as address:
        load = HttpLoad(address, "some", Shape(), seed=seed)
        for _ in range(2):
            await load.ask("decode", 20, 1)
    return bodies


async def test_runs_repeat_by_their_seed_and_else_do_not() -> None:
    assert await prompts_of(3) == await prompts_of(3)
    assert await prompts_of(None) != await prompts_of(None)


def test_prompts_are_drawn_from_a_seed() -> None:
    assert prompt_ids(1, 40) == prompt_ids(1, 40)
    assert prompt_ids(1, 40)[:4] != prompt_ids(2, 40)[:4]


def test_both_forms_of_traces(tmp_path: Path) -> None:
    table = tmp_path / "some.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    lines = tmp_path / "some.jsonl"
    lines.write_text('{"timestamp": 500, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n')
    rows = read_trace(table)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert rows[1].at_s == pytest.approx(4.314579)
    assert read_trace(lines) == [Arrival(0.0, 7, 2)]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"missing|no arrivals"):
        read_trace(path)


def test_a_scaled_trace_fits_and_says_by_how_much() -> None:
    lengths = [1000, 2000, 3000, 4000] * 4 + [90_000]
    trace = [Arrival(float(second), lengths[second % 17], 400) for second in range(1020)]
    scaled = fit(trace, seconds=60.0, max_prompt_tokens=500, max_output_tokens=64, utilisation=0.5)
    assert scaled.length_scale == 0.125
    assert {arrival.prompt_tokens for arrival in scaled.arrivals} == {125, 250, 375, 500}
    assert scaled.num_cut == sum(trace[place].prompt_tokens == 90_000 for place in range(len(scaled.arrivals))) > 0
    assert scaled.arrivals[-1].at_s == pytest.approx(57.0)
    assert sum(arrival.work_s for arrival in scaled.arrivals) == pytest.approx(30.0, rel=0.1)
    assert all(arrival.output_tokens == 50 for arrival in scaled.arrivals)
    assert f"{len(scaled.arrivals)} arrivals, lengths x 0.125" in scaled.statement()
