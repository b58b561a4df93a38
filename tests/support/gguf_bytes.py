"""Writes GGUF bytes field by field, wrong ones too, which the package's own writer would refuse."""

import struct
from dataclasses import dataclass, field
from math import prod

TEXT, ARRAY = 8, 9
U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10
_LETTERS = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(code: int, value: object) -> bytes:
    return text(str(value)) if code == TEXT else struct.pack("<" + _LETTERS[code], value)


def typed(value: object) -> bytes:
    """A value with its type in front; whole numbers are u32, lists take the type of their first element."""
    if isinstance(value, list):
        code = code_of(value[0]) if value else U32
        return struct.pack("<IIQ", ARRAY, code, len(value)) + b"".join(scalar(code, item) for item in value)
    return struct.pack("<I", code_of(value)) + scalar(code_of(value), value)


def code_of(value: object) -> int:
    return {bool: BOOL, int: U32, float: F32, str: TEXT}[type(value)]


@dataclass
class Tensor:
    """A record of the tensor directory; offset and data are made to fit unless they are given."""

    name: str
    shape: tuple[int, ...]
    data: bytes | None = None
    type_code: int = 0
    offset: int | None = None


@dataclass
class GgufBytes:
    metadata: dict[str, object] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"
    num_tensors: int | None = None
    num_entries: int | None = None
    raw_entries: list[bytes] = field(default_factory=list)

    def header(self) -> bytes:
        entries = [text(key) + typed(value) for key, value in self.metadata.items()] + self.raw_entries
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(entries) if self.num_entries is None else self.num_entries,
        )
        head = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join(entries)
        offset = 0
        for tensor in self.tensors:
            place = offset if tensor.offset is None else tensor.offset
            dimensions = tensor.shape[::-1]
            head += text(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            head += struct.pack("<IQ", tensor.type_code, place)
            offset = _aligned(place + len(self.bytes_of(tensor)))
        return head

    @staticmethod
    def bytes_of(tensor: Tensor) -> bytes:
        return bytes(4 * prod(tensor.shape)) if tensor.data is None else tensor.data

    def build(self) -> bytes:
        head = self.header()
        out = head + bytes(_aligned(len(head)) - len(head))
        for tensor in self.tensors:
            data = self.bytes_of(tensor)
            out += data + bytes(_aligned(len(data)) - len(data))
        return out


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 32) * 32
