"""The safetensors header parser and the rule by which files of a folder are chosen."""

import json
import struct

import pytest
import torch
from safetensors.torch import save

from services.models.ggml_types import GgmlType
from services.models.model_file import ModelFileError
from services.models.safetensors import (
    INDEX_NAME,
    SafetensorsFile,
    check_index,
    choose_weight_files,
    parse_index,
    parse_safetensors,
)


def parse(raw: bytes, name: str = "m.safetensors") -> SafetensorsFile:
    return parse_safetensors(memoryview(raw), name)


def framed(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_reference_package_writes() -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.full((1, 2), 0.5, dtype=torch.float16),
    }
    raw = save(tensors, metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in parse(raw).tensors}
    assert {name: (tensor.ggml_type, tensor.shape) for name, tensor in found.items()} == {
        "a": (GgmlType.F32, (2, 3)),
        "b": (GgmlType.BF16, (4,)),
        "c": (GgmlType.F16, (1, 2)),
    }
    for name, tensor in tensors.items():
        assert raw[found[name].offset : found[name].end] == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\0\0", "2 bytes are no safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "claims 4611686018427387904 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "unfetched large-file pointer"),
        (framed(b"{nope"), "not valid JSON"),
        (framed(b"[" * 100_000), "not valid JSON"),
        (framed(b'{"a": {}, "a": {}}'), "'a' appears twice"),
        (framed([1]), "the header is a list"),
        (framed({"a": 3}), "'a' is described by a int"),
        (framed({"a": entry("F8_E4M3")}, bytes(8)), "'a' is stored as F8_E4M3, which is not read yet"),
        (framed({"a": entry("I8")}, bytes(8)), "stored as I8"),
        (framed({"a": entry(shape=(-2,))}, bytes(8)), "shape is"),
        (framed({"a": entry(shape="2")}, bytes(8)), "shape is '2'"),
        (framed({"a": entry(shape=(3,))}, bytes(8)), r"takes 12 bytes, its range holds 8"),
        (framed({"a": entry(offsets=(0, 8, 16))}, bytes(8)), "has 3 numbers"),
        (framed({"a": entry(offsets=(8, 0))}, bytes(8)), "its range holds -8"),
        (framed({"a": entry(offsets=(4, 12))}, bytes(8)), "truncated"),
        (framed({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "'b' starts at byte"),
    ],
)
def test_impossible_headers_are_refused_by_name(raw: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        parse(raw, "broken.safetensors")
    assert "broken.safetensors" in str(caught.value)


SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
INDEX = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_p4_14_one_set_is_chosen_by_rule_and_the_rest_is_named() -> None:
    both = choose_weight_files({*SHARDS, "consolidated.safetensors", INDEX_NAME}, INDEX)
    assert both.names == tuple(sorted(SHARDS))
    assert "passed over: consolidated.safetensors" in both.rule
    whole = choose_weight_files({*SHARDS, "model.safetensors", "consolidated.safetensors"}, INDEX)
    assert whole.names == ("model.safetensors",)
    assert choose_weight_files(SHARDS, None).names == tuple(sorted(SHARDS))
    assert choose_weight_files({"weights.safetensors", "x.txt"}, None).names == ("weights.safetensors",)


@pytest.mark.parametrize("index", [INDEX, None])
def test_p4_12_a_missing_shard_is_refused_naming_the_file(index: dict[str, str] | None) -> None:
    with pytest.raises(ModelFileError, match=r"missing: model-00002-of-00002\.safetensors"):
        choose_weight_files(SHARDS - {"model-00002-of-00002.safetensors"}, index)


def test_no_rule_no_choice() -> None:
    with pytest.raises(ModelFileError, match=r"found \['a.safetensors', 'b.safetensors'\]"):
        choose_weight_files({"a.safetensors", "b.safetensors"}, None)
    with pytest.raises(ModelFileError, match="found none"):
        choose_weight_files({"pytorch_model.bin"}, None)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 3}}'],
)
def test_an_unusable_index_is_refused(text: str) -> None:
    with pytest.raises(ModelFileError, match=INDEX_NAME):
        parse_index(text)


def file_with(name: str, *tensors: str) -> SafetensorsFile:
    header = {tensor: entry(offsets=(8 * place, 8 * place + 8)) for place, tensor in enumerate(tensors)}
    return parse(framed(header, bytes(8 * len(tensors))), name)


def test_every_tensor_is_in_the_file_that_the_index_says() -> None:
    first, second = sorted(SHARDS)
    check_index(INDEX, [file_with(first, "a"), file_with(second, "b")])
    with pytest.raises(ModelFileError, match=r"puts tensor 'b' in .*found in no file"):
        check_index(INDEX, [file_with(first, "a"), file_with(second)])
    with pytest.raises(ModelFileError, match="'a' is in both"):
        check_index(INDEX, [file_with(first, "a"), file_with(second, "a", "b")])
