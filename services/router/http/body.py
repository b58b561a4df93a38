"""The body of an HTTP request: read within a bound, parsed within a bound, so that no body can hold up the loop.

The parser holds the interpreter for the whole of a document, on whatever thread, so what is bounded is its work: bytes,
values (counted by their commas), lists and objects (by their brackets), members (by their colons). Text may have all of
these too, so each bound grows with the window. Never echoes what was sent.
"""

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from services.router.openai.refusal import Kind, RefusalError

Parsed = TypeVar("Parsed")

MAX_VALUES = 500_000
"""Commas of one document: about 0.15 s of parsing at worst on a slow core; a window of ids may have more."""
MAX_CONTAINERS = 500_000
"""Lists and objects of one document: about as much work, while the collector is away."""
MAX_MEMBERS = 100_000
"""Members of the objects of one document: about as much work again, since names are hashed and kept."""
MAX_INTEGER_DIGITS = 640
"""The least that the interpreter lets one ask for. Reading digits takes the square of their number: with its own bound
of 4,300, a body full of such integers takes half a second."""
INLINE_BYTES = 65_536
"""A body up to here is parsed and checked on the loop: a millisecond at worst."""
_TYPES = ("application/json", "text/json")


def bound_integers() -> None:
    """Once, for the process: an integer of more digits is no JSON here."""
    sys.set_int_max_str_digits(MAX_INTEGER_DIGITS)


def declared_bytes(request: Request, max_bytes: int) -> int:
    """How long the body is said to be; one that comes in chunks says nothing, and may be of `max_bytes`.

    Raises:
        RefusalError: it is longer than `max_bytes`, or not declared as JSON.
    """
    _check_type(request.headers.get("content-type"))
    # The parser of the head has refused everything but digits.
    num_bytes = int(request.headers.get("content-length", max_bytes))
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return num_bytes


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. The connection has the clock, and drops what comes after a refusal.

    Raises:
        RefusalError: it is longer than `max_bytes`.
        ClientDisconnect: the client went away, or was too slow.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def parse_body(
    body: bytes, parse: Callable[[object], Parsed], limiter: anyio.CapacityLimiter, window_room: int = 0
) -> Parsed:
    """The document, through `parse`; a large one on a thread, as far as that helps.

    `window_room` is how many values a prompt that fits the window may have: no bound is below it.

    Raises:
        RefusalError: it is not JSON, too deep or has too many values, or `parse` refused it.
    """
    if len(body) <= INLINE_BYTES:
        return parse(decode(body, window_room))
    return await anyio.to_thread.run_sync(partial(_decode_and_parse, body, parse, window_room), limiter=limiter)


def decode(body: bytes, window_room: int = 0) -> object:
    """The JSON value of a body.

    Raises:
        RefusalError: it is not one, or is beyond the bounds.
    """
    if not body.strip():
        raise _not_json("the body is empty: a JSON object is expected")
    _check_work(body, window_room)
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise _not_json("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise _not_json("the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except ValueError:
        # A number of more digits than the interpreter converts.
        raise _not_json("the body has a number that is too long") from None


def _check_work(body: bytes, window_room: int) -> None:
    for marks, bound, what in (
        ((b",",), MAX_VALUES, "values"),
        ((b"[", b"{"), MAX_CONTAINERS, "lists and objects"),
        ((b":",), MAX_MEMBERS, "members of objects"),
    ):
        most = max(bound, window_room)
        if sum(map(body.count, marks)) > most:
            raise RefusalError(Kind.TOO_LARGE, f"the body has more than {most} {what}", code="body_too_large")


def _decode_and_parse(body: bytes, parse: Callable[[object], Parsed], window_room: int) -> Parsed:
    # The collector would go through all that was parsed so far again and again, and find nothing.
    gc.disable()
    try:
        document = decode(body, window_room)
    finally:
        gc.enable()
    return parse(document)


def _check_type(content_type: str | None) -> None:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind in _TYPES or kind.endswith("+json"):
        return
    raise RefusalError(
        Kind.UNSUPPORTED_MEDIA,
        "the Content-Type must be application/json" if content_type else "the Content-Type is missing",
        code="unsupported_content_type",
    )


def _too_large(max_bytes: int) -> RefusalError:
    return RefusalError(
        Kind.TOO_LARGE, f"the body is larger than the {max_bytes} bytes a request may have", code="body_too_large"
    )


def _refuse_constant(name: str) -> object:
    raise _not_json(f"the body is not valid JSON: {name} is no number of JSON")


def _not_json(message: str) -> RefusalError:
    return RefusalError(Kind.INVALID, message, code="invalid_json")


__all__ = ["ClientDisconnect", "bound_integers", "declared_bytes", "decode", "parse_body", "read_body"]
