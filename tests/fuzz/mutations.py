"""Hostile input drawn from one integer: bytes changed where formats keep their numbers, JSON with impossible values."""

import copy
import json
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (
    -1,
    0,
    1,
    2,
    127,
    255,
    2**15,
    2**16 - 1,
    2**22,
    2**28,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**60,
    2**63 - 1,
    2**64 - 1,
)
TEXTS = (
    "",
    "x",
    "\x00",
    "é\ud7ff🙂",
    "x" * 70_000,
    "<|im_end|>",
    "../x",
    "%999999d",
    "{{ 7 ** 7 ** 9 }}",
    "{%",
    "[" * 3000,
)
_NESTED = json.loads("[" * 200 + "]" * 200)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *TEXTS,
    0.5,
    1e308,
    -0.0,
    None,
    True,
    [],
    {},
    [0] * 3000,
    _NESTED,
    {"a": {"b": [1]}},
)


def damaged(draw: Random, raw: bytes) -> bytes:
    """One to four changes: bits, numbers of four or eight bytes, pieces left out, doubled or put elsewhere."""
    found = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found) + 1)
        end = min(len(found), at + draw.choice((1, 2, 8, 100)))
        match draw.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
            case 1 | 2:
                width = draw.choice((1, 4, 8))
                number = draw.choice(NUMBERS) % 2 ** (8 * width)
                found[at : at + width] = number.to_bytes(width, "little")
            case 3:
                del found[at:end]
            case 4:
                found[at:at] = found[at:end] * draw.choice((1, 2, 50))
            case _:
                found[at:at] = draw.choice(TEXTS[:4]).encode()
    return bytes(found)


def changed(draw: Random, document: Any) -> Any:
    """A JSON document with one to three of its values, or names, replaced."""
    found = copy.deepcopy(document)
    for _ in range(draw.randint(1, 3)):
        found = _changed_once(draw, found)
    return found


def _changed_once(draw: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            value[draw.choice(TEXTS)] = value.pop(name)
        else:
            value[name] = _changed_once(draw, value[name])
        return value
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        value[at] = _changed_once(draw, value[at])
        return value
    return copy.deepcopy(draw.choice(VALUES))


def as_json(draw: Random, document: Any) -> bytes:
    """The document's bytes, damaged now and then; lone surrogates and non-finite numbers may be among them."""
    raw = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return damaged(draw, raw) if draw.random() < 0.3 else raw


def filled(draw: Random, message: Message, depth: int = 0) -> Message:
    """A message with random fields of every kind, numbers of enums that nobody knows among them."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4:
            continue
        if field.is_repeated:
            _fill_repeated(draw, message, field, depth)
        elif field.message_type is not None:
            if depth < 4:
                inner = getattr(message, field.name)
                inner.SetInParent()
                filled(draw, inner, depth + 1)
        else:
            setattr(message, field.name, _scalar(draw, field))
    return message


def _fill_repeated(draw: Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    entries = getattr(message, field.name)
    for _ in range(draw.choice((0, 1, 2, 3, 40))):
        if field.message_type is None:
            entries.append(_scalar(draw, field))
        elif depth < 3:
            filled(draw, entries.add(), depth + 1)


def _scalar(draw: Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 3, 32)))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw.choice(TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draw.choice((0.0, -1.0, 1e38, float("nan"), float("inf"), 0.5))
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw.choice((0, 1, 2, 3, 99, -1))
        case FieldDescriptor.CPPTYPE_INT32:
            return draw.choice((0, 1, -1, 2**31 - 1, -(2**31)))
        case FieldDescriptor.CPPTYPE_INT64:
            return draw.choice((0, 1, -1, 2**63 - 1, -(2**63)))
        case FieldDescriptor.CPPTYPE_UINT32:
            return draw.choice((0, 1, 2, 2**32 - 1))
        case _:
            return draw.choice((0, 1, 2, 2**64 - 1))
