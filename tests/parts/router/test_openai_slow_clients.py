"""Clients that begin and do not go on, come in crowds, or send what nobody will take: each costs a bound, no more."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.router_stand import ALPHABET, Stand, alphabet, eventually, stand

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
GOOD = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": 2}).encode()
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(at: Stand) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, whose body is left unread."""
    line = await reader.readline()
    return int(line.split()[1])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"POST /v1/comp",
        HEAD,
        HEAD + b"100\r\n\r\n",
        HEAD + b"100\r\n\r\n{",
        HEAD[:-16] + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    ],
)
async def test_an_unfinished_request_ends_by_its_clock(tmp_path: Path, sent: bytes) -> None:
    async with stand(tmp_path, alphabet, head_s=0.2, body_s=0.2) as at, connection(at) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert (await at.complete(prompt="x", max_tokens=2)).status_code == 200
        assert at.router.admission.receiving_bytes == 0


async def test_bytes_that_come_one_by_one_do_not_stop_the_clock(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, head_s=0.3, body_s=0.3) as at, connection(at) as (reader, writer):
        writer.write(HEAD + b"100000\r\n\r\n{")
        ended = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(10):
            while not ended.done():
                writer.write(b" ")
                await asyncio.wait([ended], timeout=0.02)
        assert ended.result().startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_is_used_again_has_the_clock_again(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, head_s=0.3) as at, connection(at) as (reader, writer):
        for rest in (b"", HEAD[:20]):
            writer.write(HEAD + str(len(GOOD)).encode() + b"\r\n\r\n" + GOOD + rest)
            assert await status_of(reader) == 200
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}}}")
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_no_clock_runs_against_an_answer(tmp_path: Path) -> None:
    """Neither against a stream that takes longer than heads and bodies may, nor against what waits behind it."""
    async with stand(tmp_path, alphabet, head_s=0.1, body_s=0.1) as at, connection(at) as (reader, writer):
        at.scheduler.gate_at = 2
        body = json.dumps({"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 4}).encode()
        writer.write(HEAD + str(len(body)).encode() + b"\r\n\r\n" + body + b"\r\n" + HEAD[:20])
        await reader.readuntil(b"data: ")
        # Two connections after it, one after the other, are given up; this one is not.
        for _ in range(2):
            async with connection(at) as (other, _):
                assert (await other.read()).startswith(b"HTTP/1.1 408 ")
        at.scheduler.open_gate()
        async with asyncio.timeout(10):
            rest = await reader.read()
        assert b"[DONE]" in rest
        assert b"408" in rest.partition(b"[DONE]")[2]


async def test_connections_are_bounded_and_a_place_that_is_left_is_taken(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, max_connections=3) as at:
        server = at.router.server.server_state
        await eventually(lambda: not server.connections)
        async with connection(at), connection(at), connection(at) as (_, third):
            await eventually(lambda: len(server.connections) == 3)
            async with connection(at) as (reader, _):
                assert await status_of(reader) == 503
            third.close()
            await eventually(lambda: len(server.connections) == 2)
            assert (await at.complete(prompt="x", max_tokens=2)).status_code == 200


async def test_bodies_are_refused_by_their_declared_length_before_a_byte_is_read(tmp_path: Path) -> None:
    async with (
        stand(tmp_path, alphabet, max_request_bytes=5000, max_receiving_bytes=6000) as at,
        connection(at) as (first, first_writer),
        connection(at) as (second, second_writer),
        connection(at) as (third, third_writer),
    ):
        body = GOOD + b" " * (4000 - len(GOOD))
        first_writer.write(HEAD + b"4000\r\n\r\n" + body[:10])
        await eventually(lambda: at.router.admission.receiving_bytes == 4000)
        second_writer.write(HEAD + b"4000\r\n\r\n")
        assert await status_of(second) == 429
        third_writer.write(HEAD + b"5001\r\n\r\n")
        assert await status_of(third) == 413
        first_writer.write(body[10:])
        assert await status_of(first) == 200
        # What was refused may still send its body, and ask again on the same connection.
        await second.readuntil(b"}}")
        second_writer.write(body + HEAD + b"4000\r\n\r\n" + body)
        assert await status_of(second) == 200


async def test_a_full_router_reads_no_body(tmp_path: Path) -> None:
    async with stand(tmp_path, alphabet, max_open_requests=1) as at, connection(at) as (reader, writer):
        at.scheduler.gate_at = 1
        first = asyncio.ensure_future(at.complete(prompt="x", max_tokens=2))
        await at.scheduler.until(lambda: len(at.scheduler.requests()) == 1)
        writer.write(HEAD + b"4000\r\n\r\n")
        assert await status_of(reader) == 429
        at.scheduler.open_gate()
        assert (await first).json()["choices"][0]["text"] == ALPHABET[:2].decode()


async def test_a_refused_body_without_an_end_is_not_taken_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.http.protocol.MAX_DROPPED_BYTES", 100_000)
    async with stand(tmp_path, alphabet, max_request_bytes=1024) as at, connection(at) as (_, writer):
        writer.write(HEAD[:-16] + b"transfer-encoding: chunked\r\n\r\n")
        num_sent = 0
        with pytest.raises(ConnectionError):
            while num_sent < 50_000_000:
                writer.write(b"10000\r\n" + b" " * 65_536 + b"\r\n")
                num_sent += 65_536
                await writer.drain()
                await asyncio.sleep(0)
        assert num_sent < 50_000_000
