"""Reads the header of a safetensors file from any buffer, and decides which files of a folder make up the model.

Never opens a file and never copies a weight. The header is JSON of bounded size; each tensor's byte range is held
against its shape, its type and the file. Which files are taken is one rule (`choose_weight_files`), so that a folder
with two copies of the weights never loads both.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from services.models.ggml_types import GgmlType, row_bytes
from services.models.model_file import ModelFileError, TensorEntry, check_extents

MAX_HEADER_BYTES = 100_000_000
"""The bound that the format itself sets."""
INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r"^model-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_TYPES = {"F32": GgmlType.F32, "F16": GgmlType.F16, "BF16": GgmlType.BF16}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One parsed file: where its tensors lie, and the buffer."""

    file_name: str
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which files hold the weights, and why these."""

    names: tuple[str, ...]
    rule: str
    """Why these were taken and what was passed over: one line for the log."""


def parse_safetensors(buffer: memoryview, file_name: str) -> SafetensorsFile:
    """Parses the header at the start of `buffer`, which is the whole file; `file_name` is for messages only.

    Raises `ModelFileError` on a malformed header, on a type that is not read (by name), and on byte ranges that do not
    fit their shape or the file.
    """
    view = buffer.cast("B")
    data_offset = _data_offset(view, file_name)
    try:
        header = json.loads(bytes(view[8:data_offset]), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file_name}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{file_name}: the header is a {type(header).__name__}, an object expected")
    header.pop("__metadata__", None)
    tensors = tuple(_entry(file_name, name, record, data_offset) for name, record in header.items())
    check_extents(file_name, tensors, len(view))
    return SafetensorsFile(file_name, tensors, data_offset, view)


def _data_offset(view: memoryview, file_name: str) -> int:
    if len(view) < 8:
        raise ModelFileError(f"{file_name}: {len(view)} bytes are no safetensors file")
    num_bytes = int.from_bytes(view[:8], "little")
    if num_bytes > MAX_HEADER_BYTES or num_bytes > len(view) - 8:
        raise ModelFileError(
            f"{file_name}: the header claims {num_bytes} bytes; the file has {len(view)} and a header at most "
            f"{MAX_HEADER_BYTES}: truncated, or not a safetensors file (an unfetched large-file pointer?)"
        )
    return 8 + num_bytes


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values


def _entry(file_name: str, name: str, record: object, data_offset: int) -> TensorEntry:
    where = f"{file_name}: tensor {name!r}"
    if not isinstance(record, dict):
        raise ModelFileError(f"{where} is described by a {type(record).__name__}, an object expected")
    kind = _TYPES.get(str(record.get("dtype")))
    if kind is None:
        raise ModelFileError(
            f"{where} is stored as {record.get('dtype')}, which is not read yet; these are: {', '.join(_TYPES)}. "
            "Convert the model, or take a GGUF file of it"
        )
    shape, (begin, end) = _whole_numbers(where, record, "shape"), _range(where, record)
    num_bytes = prod(shape[:-1]) * row_bytes(kind, shape[-1]) if shape else row_bytes(kind, 1)
    if end - begin != num_bytes:
        raise ModelFileError(f"{where} of shape {shape} takes {num_bytes} bytes, its range holds {end - begin}")
    return TensorEntry(name, kind, shape, data_offset + begin, num_bytes)


def _whole_numbers(where: str, record: Mapping[str, object], key: str) -> tuple[int, ...]:
    values = record.get(key)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ModelFileError(f"{where}: {key} is {values!r}, a list of whole numbers expected")
    return tuple(values)


def _range(where: str, record: Mapping[str, object]) -> tuple[int, int]:
    offsets = _whole_numbers(where, record, "data_offsets")
    if len(offsets) != 2:
        raise ModelFileError(f"{where}: data_offsets has {len(offsets)} numbers, 2 expected")
    return offsets[0], offsets[1]


def parse_index(text: str, file_name: str = INDEX_NAME) -> dict[str, str]:
    """The index of a sharded model: which file, beside the index, holds each tensor."""
    try:
        weight_map = json.loads(text)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{file_name}: no weight_map could be read: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{file_name}: weight_map must be a non-empty object")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise ModelFileError(
                f"{file_name}: tensor {tensor!r} is said to be in {name!r}, a plain file name expected"
            )
    return weight_map


def choose_weight_files(names: Collection[str], index: Mapping[str, str] | None) -> WeightFiles:
    """Which of a folder's file `names` make up the model: one set, by the first rule that applies.

    1. `model.safetensors`; 2. the shards that the index names; 3. shards numbered as a complete set, without an index;
    4. the only safetensors file there is. Any other copy is passed over. Raises `ModelFileError` naming each missing
    shard, or when no rule applies.
    """
    if WHOLE_NAME in names:
        return _chosen((WHOLE_NAME,), names, "it is the whole model in one file")
    if index is not None:
        return _chosen(_complete(tuple(sorted(set(index.values()))), names, INDEX_NAME), names, "the index names them")
    numbered = sorted((match for name in names if (match := _SHARD_NAME.match(name))), key=lambda match: match[0])
    if numbered:
        count = int(numbered[0]["count"])
        wanted = tuple(f"model-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1))
        return _chosen(_complete(wanted, names, numbered[0][0]), names, "their numbers make a complete set")
    single = [name for name in names if name.endswith(".safetensors")]
    if len(single) == 1:
        return _chosen((single[0],), names, "it is the only one")
    raise ModelFileError(
        f"no {WHOLE_NAME}, no {INDEX_NAME} and not one safetensors file alone: found {sorted(single) or 'none'}"
    )


def _complete(wanted: tuple[str, ...], names: Collection[str], source: str) -> tuple[str, ...]:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ModelFileError(
            f"{source} asks for {len(wanted)} files, missing: {', '.join(missing)}; the download is incomplete, "
            "fetch it again"
        )
    return wanted


def _chosen(taken: tuple[str, ...], names: Collection[str], why: str) -> WeightFiles:
    passed_over = sorted(name for name in names if name.endswith(".safetensors") and name not in taken)
    rest = f"; passed over: {', '.join(passed_over)}" if passed_over else ""
    return WeightFiles(taken, f"{', '.join(taken)} taken, {why}{rest}")


def check_index(index: Mapping[str, str], files: Collection[SafetensorsFile]) -> None:
    """Raises `ModelFileError` unless each tensor is in the one file that the index names, and in no other."""
    found: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in found:
                raise ModelFileError(f"tensor {tensor.name!r} is in both {found[tensor.name]} and {file.file_name}")
            found[tensor.name] = file.file_name
    for name, file_name in index.items():
        if found.get(name) != file_name:
            raise ModelFileError(
                f"{INDEX_NAME} puts tensor {name!r} in {file_name}, found in {found.get(name, 'no file')}: the folder "
                "mixes two models or a download is incomplete"
            )
