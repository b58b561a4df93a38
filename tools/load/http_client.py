"""Streams of one HTTP server on this machine: a request out, its server-sent events in, each with its time of arrival.

Only the loopback address: a load generator that could be pointed at another machine would be a weapon. Everything that
is read has a bound. Never retries, never judges; needs nothing beyond the standard library.
"""

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.core.errors import ConfigurationError

CONNECT_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
"""Of one piece of a body; an event with logprobs is a few hundred bytes."""
DONE = b"[DONE]"

Event = dict[str, Any]


class StreamError(Exception):
    """The server refused the request, ended it with an error, or broke the protocol."""


@dataclass(frozen=True, slots=True)
class Loopback:
    """An address of this machine."""

    host: str
    port: int


def parse_loopback(text: str) -> Loopback:
    """`127.0.0.1:8000`, `[::1]:8000` or `localhost:8000`, with or without `http://`.

    Raises:
        ConfigurationError: not an address with a port, or not of this machine.
    """
    host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigurationError(f"{text!r} is no address: give host:port")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return Loopback(host, int(port))
    if host == "localhost":
        return Loopback(host, int(port))
    raise ConfigurationError(f"{host} is not this machine: load is only made on the loopback address")


async def stream_events(
    address: Loopback, path: str, body: Mapping[str, object], api_key: str | None = None
) -> AsyncGenerator[tuple[int, Event], None]:
    """Posts `body` and yields (monotonic nanoseconds, event) until the stream is done.

    Raises:
        StreamError: with the status and the server's own words, or what was wrong with its answer.
    """
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=MAX_HEADER_BYTES)
    try:
        writer.write(_request(address, path, json.dumps(body).encode(), api_key))
        await writer.drain()
        status, headers = await _head(reader)
        pieces = _body(reader, headers)
        if status != 200:
            text = b"".join([piece async for _, piece in pieces])
            raise StreamError(f"HTTP {status}: {text[:500].decode('utf-8', 'replace')}")
        async for arrived_ns, event in _events(pieces):
            yield arrived_ns, event
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError) as error:
        raise StreamError(f"the stream broke: {type(error).__name__}: {error}") from error
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _request(address: Loopback, path: str, body: bytes, api_key: str | None) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}:{address.port}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise StreamError(f"no HTTP answer: {first[:100]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[tuple[int, bytes]]:
    """Yields the pieces of a body as they come, with their times."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(headers.get("content-length", "0"))
        yield time.monotonic_ns(), await reader.readexactly(_bounded(length))
        return
    while length := _bounded(int((await reader.readline()).split(b";")[0], 16)):
        piece = await reader.readexactly(length + 2)
        yield time.monotonic_ns(), piece[:-2]
    await reader.readline()


def _bounded(length: int) -> int:
    if not 0 <= length <= MAX_CHUNK_BYTES:
        raise StreamError(f"a piece of {length} bytes, at most {MAX_CHUNK_BYTES} expected")
    return length


async def _events(pieces: AsyncIterator[tuple[int, bytes]]) -> AsyncIterator[tuple[int, Event]]:
    rest = b""
    async for arrived_ns, piece in pieces:
        *blocks, rest = (rest + piece).split(b"\n\n")
        _bounded(len(rest))
        for block in blocks:
            data = block.strip().removeprefix(b"data:").strip()
            if data == DONE:
                return
            event = json.loads(data)
            if "error" in event:
                raise StreamError(f"the server ended the stream: {json.dumps(event['error'])[:500]}")
            yield arrived_ns, event
    raise StreamError(f"the stream ended without {DONE.decode()}")
