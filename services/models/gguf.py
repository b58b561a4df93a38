"""Reads the header of a GGUF file (version 2 or 3) from any buffer: metadata, and where each tensor lies.

Never opens a file, never copies a weight, and trusts no number in the file: each count and length is held against the
bytes that are left before it is used. Arrays are located when the header is read and decoded when first asked for, so
that opening a file with a vocabulary of a quarter of a million entries stays fast.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from services.models.ggml_types import GgmlTypeError, ggml_type, row_bytes
from services.models.model_file import ModelFileError, TensorEntry, check_extents

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
"""What ggml itself can hold."""
MAX_ARRAY_DEPTH = 4
"""Arrays of arrays are allowed by the format; a corrupt file must not recurse for ever."""
MAX_SPLIT_PARTS = 99_999
"""Five digits in a part's name."""
MIN_ENTRY_BYTES = 12
"""The shortest metadata entry or tensor record: an empty name and its type."""

Scalar = bool | int | float | str
_T = TypeVar("_T", bool, int, float, str)

_STRING, _ARRAY = 8, 9
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {code: struct.Struct("<" + letter) for code, letter in _SCALAR_CODES.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PART_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


class _Cursor:
    """A place in the buffer that only moves forward and never past the end."""

    __slots__ = ("buffer", "end", "file_name", "position")

    def __init__(self, buffer: memoryview, file_name: str, position: int = 0) -> None:
        self.buffer, self.file_name, self.position, self.end = buffer, file_name, position, len(buffer)

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.file_name}: {what} (header byte {self.position} of {self.end} in the file)")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.end - self.position:
            left = self.end - self.position
            raise self.fail(f"{what} needs {num_bytes} bytes, {left} are left: truncated or corrupt")

    def scalar(self, code: int, what: str) -> bool | int | float:
        layout = _SCALARS[code]
        self.need(layout.size, what)
        value: bool | int | float = layout.unpack_from(self.buffer, self.position)[0]
        self.position += layout.size
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(4, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(10, what))

    def text(self, what: str) -> str:
        num_bytes = self.u64(what)
        self.need(num_bytes, what)
        raw = bytes(self.buffer[self.position : self.position + num_bytes])
        self.position += num_bytes
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from error

    def skip_texts(self, count: int, what: str) -> None:
        """Moves over `count` strings; the one loop of opening that is as long as the vocabulary."""
        position, end, buffer, read = self.position, self.end, self.buffer, _U64.unpack_from
        for index in range(count):
            if position + 8 > end:
                self.position = position
                raise self.fail(f"{what}[{index}] of {count} lies outside the file: truncated or corrupt")
            position += 8 + read(buffer, position)[0]
        self.position = min(position, end)
        if position > end:
            raise self.fail(f"{what} ends at byte {position}: truncated or corrupt")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, still in the file."""

    key: str
    file_name: str
    element_code: int
    count: int
    encoded: memoryview

    def __len__(self) -> int:
        return self.count

    def numbers(self) -> tuple[float, ...]:
        """The elements of an array of numbers or booleans; whole ones are `int`."""
        if not self.count:
            return ()
        letter = _SCALAR_CODES.get(self.element_code)
        if letter is None:
            raise ModelFileError(f"{self.file_name}: {self.key} is not an array of numbers")
        return struct.unpack_from(f"<{self.count}{letter}", self.encoded)

    def texts(self) -> list[str]:
        """The elements of an array of strings; an empty array is one of any type."""
        if self.count and self.element_code != _STRING:
            raise ModelFileError(f"{self.file_name}: {self.key} is not an array of strings")
        raw, texts, position = bytes(self.encoded), [], 0
        for index in range(self.count):
            start = position + 8
            position = start + _U64.unpack_from(raw, position)[0]
            try:
                texts.append(raw[start:position].decode())
            except UnicodeDecodeError as error:
                raise ModelFileError(f"{self.file_name}: {self.key}[{index}] is not UTF-8: {error.reason}") from error
        return texts


class GgufMetadata(Mapping[str, Scalar | GgufArray]):
    """The metadata of one file, with getters that say which key is missing or of the wrong kind."""

    __slots__ = ("_values", "file_name")

    def __init__(self, file_name: str, values: Mapping[str, Scalar | GgufArray]) -> None:
        self.file_name, self._values = file_name, dict(values)

    def __getitem__(self, key: str) -> Scalar | GgufArray:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _typed(self, key: str, kind: type[_T]) -> _T | None:
        value = self._values.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None or type(value) is kind:
            return value
        raise ModelFileError(f"{self.file_name}: {key} must be a {kind.__name__}, found {type(value).__name__}")

    def _required(self, key: str, kind: type[_T]) -> _T:
        value = self._typed(key, kind)
        if value is None:
            raise ModelFileError(f"{self.file_name}: the metadata has no {key}")
        return value

    def text(self, key: str) -> str:
        """A string that must be there."""
        return self._required(key, str)

    def whole(self, key: str) -> int:
        """A whole number that must be there."""
        return self._required(key, int)

    def real(self, key: str) -> float:
        """A number that must be there."""
        return self._required(key, float)

    def text_or_none(self, key: str) -> str | None:
        """A string, if there."""
        return self._typed(key, str)

    def whole_or_none(self, key: str) -> int | None:
        """A whole number, if there."""
        return self._typed(key, int)

    def real_or_none(self, key: str) -> float | None:
        """A number, if there."""
        return self._typed(key, float)

    def flag_or_none(self, key: str) -> bool | None:
        """A boolean, if there."""
        return self._typed(key, bool)

    def array(self, key: str) -> GgufArray:
        """An array that must be there."""
        value = self._values.get(key)
        if isinstance(value, GgufArray):
            return value
        raise ModelFileError(f"{self.file_name}: the metadata has no array {key}")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One parsed file: what its header says, and the buffer it lies in."""

    file_name: str
    version: int
    metadata: GgufMetadata
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    """Where the tensors' bytes begin, which is where the header ends."""
    buffer: memoryview


def parse_gguf(buffer: memoryview, file_name: str) -> GgufFile:
    """Parses the header at the start of `buffer`, which is the whole file; `file_name` is for messages only.

    Raises `ModelFileError` on anything a well-formed file cannot hold.
    """
    cursor = _Cursor(buffer.cast("B"), file_name)
    version = _read_preamble(cursor)
    num_tensors, num_entries = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    for count, what in ((num_tensors, "tensor"), (num_entries, "metadata")):
        cursor.need(count * MIN_ENTRY_BYTES, f"a {what} count of {count}")
    metadata = _read_metadata(cursor, num_entries)
    alignment = _alignment(cursor, metadata)
    records = [_read_tensor_record(cursor) for _ in range(num_tensors)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(_entry(file_name, record, data_offset, alignment) for record in records)
    check_extents(file_name, tensors, cursor.end)
    return GgufFile(file_name, version, metadata, tensors, min(data_offset, cursor.end), cursor.buffer)


def _read_preamble(cursor: _Cursor) -> int:
    cursor.need(8, "the preamble")
    magic = bytes(cursor.buffer[:4])
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: it begins with {magic!r}, {MAGIC!r} expected")
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = "it is big-endian; convert it again as little-endian" if swapped in VERSIONS else "convert it again"
        raise cursor.fail(f"GGUF version {version} is not read, only {VERSIONS}: {hint}")
    return version


def _read_metadata(cursor: _Cursor, num_entries: int) -> GgufMetadata:
    values: dict[str, Scalar | GgufArray] = {}
    for index in range(num_entries):
        key = cursor.text(f"metadata key {index}")
        if key in values:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        values[key] = _read_value(cursor, key, cursor.u32(key))
    return GgufMetadata(cursor.file_name, values)


def _read_value(cursor: _Cursor, key: str, code: int) -> Scalar | GgufArray:
    if code in _SCALARS:
        return cursor.scalar(code, key)
    if code == _STRING:
        return cursor.text(key)
    if code == _ARRAY:
        element_code, count = cursor.u32(key), cursor.u64(key)
        start = cursor.position
        _skip_array(cursor, key, element_code, count, depth=1)
        return GgufArray(key, cursor.file_name, element_code, count, cursor.buffer[start : cursor.position])
    raise cursor.fail(f"metadata key {key!r} has the unknown value type {code}")


def _skip_array(cursor: _Cursor, key: str, element_code: int, count: int, depth: int) -> None:
    if element_code in _SCALARS:
        num_bytes = _SCALARS[element_code].size * count
        cursor.need(num_bytes, f"{key} with {count} elements")
        cursor.position += num_bytes
    elif element_code == _STRING:
        cursor.need(8 * count, f"{key} with {count} elements")
        cursor.skip_texts(count, key)
    elif element_code == _ARRAY and depth < MAX_ARRAY_DEPTH:
        cursor.need(12 * count, f"{key} with {count} elements")
        for _ in range(count):
            _skip_array(cursor, key, cursor.u32(key), cursor.u64(key), depth + 1)
    else:
        raise cursor.fail(f"{key} is an array of the unknown value type {element_code}, or nested too deep")


def _alignment(cursor: _Cursor, metadata: GgufMetadata) -> int:
    alignment = metadata.whole_or_none("general.alignment")
    if alignment is None:
        return DEFAULT_ALIGNMENT
    if alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}, a power of two expected")
    return alignment


@dataclass(frozen=True, slots=True)
class _TensorRecord:
    name: str
    dimensions: tuple[int, ...]
    type_code: int
    data_offset: int


def _read_tensor_record(cursor: _Cursor) -> _TensorRecord:
    name = cursor.text("a tensor's name")
    num_dimensions = cursor.u32(name)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} expected")
    dimensions = tuple(cursor.u64(name) for _ in range(num_dimensions))
    return _TensorRecord(name, dimensions, cursor.u32(name), cursor.u64(name))


def _entry(file_name: str, record: _TensorRecord, data_offset: int, alignment: int) -> TensorEntry:
    """Turns a record into an entry: shape outermost first, offset from the start of the file."""
    where = f"{file_name}: tensor {record.name!r}"
    shape = record.dimensions[::-1]
    if 0 in shape:
        raise ModelFileError(f"{where} has the empty shape {shape}")
    if record.data_offset % alignment:
        raise ModelFileError(f"{where} is at data offset {record.data_offset}, not a multiple of {alignment}")
    try:
        kind = ggml_type(record.type_code)
        num_bytes = prod(shape[:-1]) * row_bytes(kind, shape[-1])
    except GgmlTypeError as error:
        raise ModelFileError(f"{where}: {error}") from error
    return TensorEntry(record.name, kind, shape, data_offset + record.data_offset, num_bytes)


def split_part_names(first_name: str) -> tuple[str, ...]:
    """The file names of all parts of a model, from the name of its first; the name alone when it is not split."""
    match = _PART_NAME.match(first_name)
    if match is None:
        return (first_name,)
    count, part = int(match["count"]), int(match["part"])
    if part != 1:
        raise ModelFileError(f"{first_name} is part {part} of {count}: give the first part's path")
    if count == 0:
        raise ModelFileError(f"{first_name} names no parts")
    return tuple(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1))


def check_split(parts: Sequence[GgufFile]) -> None:
    """Raises `ModelFileError` unless the parts are all of one model, in their order, with no tensor twice."""
    first = parts[0]
    count = first.metadata.whole_or_none("split.count") or 1
    if count != len(parts):
        raise ModelFileError(
            f"{first.file_name}: split.count is {count}, but its name stands for {len(parts)}; a part's name must be "
            "as the splitter wrote it (…-00001-of-0000N.gguf)"
        )
    if count > 1:
        for index, part in enumerate(parts):
            _check_part(part, index, count)
    owners: dict[str, str] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in owners:
                raise ModelFileError(f"tensor {tensor.name!r} is in both {owners[tensor.name]} and {part.file_name}")
            owners[tensor.name] = part.file_name
    expected = first.metadata.whole_or_none("split.tensors.count")
    if expected is not None and expected != len(owners):
        raise ModelFileError(f"{first.file_name}: split.tensors.count is {expected}, the parts hold {len(owners)}")


def _check_part(part: GgufFile, index: int, count: int) -> None:
    number, of = part.metadata.whole("split.no"), part.metadata.whole("split.count")
    if (number, of) != (index, count):
        raise ModelFileError(
            f"{part.file_name}: it says part {number + 1} of {of}, but stands in place of part {index + 1} of {count}"
        )
