"""The GGUF parser: what the reference package writes is read alike, and nothing in a damaged file is believed."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from services.models.ggml_types import GgmlType
from services.models.gguf import GgufArray, check_split, parse_gguf, split_part_names
from services.models.model_file import ModelFileError
from tests.support.gguf_bytes import GgufBytes, Tensor, text


def parse(raw: bytes, name: str = "m.gguf"):
    return parse_gguf(memoryview(raw), name)


def test_reads_what_the_reference_package_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_int64("i64", -(2**40))
    writer.add_uint64("u64", 2**60)
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("words", "día 한국어 \n")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("halves", [0.5, 1.5])
    writer.add_array("texts", ["a", "", "漢字"])
    writer.add_array("flags", [True, False])
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("plain", plain)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = (tmp_path / "m.gguf").read_bytes()

    file = parse(raw)

    values = {key: file.metadata[key] for key in ("u8", "i8", "u16", "i16", "i64", "u64", "f64", "flag", "words")}
    assert values == {
        "u8": 200, "i8": -5, "u16": 60_000, "i16": -30_000, "i64": -(2**40), "u64": 2**60, "f64": 0.1, "flag": True,
        "words": "día 한국어 \n",
    }  # fmt: skip
    assert file.metadata.array("numbers").numbers() == (1, -2, 3)
    assert file.metadata.array("halves").numbers() == (0.5, 1.5)
    assert file.metadata.array("texts").texts() == ["a", "", "漢字"]
    assert file.metadata.array("flags").numbers() == (True, False)
    by_name = {tensor.name: tensor for tensor in file.tensors}
    assert (by_name["plain"].shape, by_name["plain"].ggml_type) == ((2, 3), GgmlType.F32)
    assert (by_name["packed"].shape, by_name["packed"].ggml_type) == ((4, 64), GgmlType.Q4_1)
    assert raw[by_name["plain"].offset : by_name["plain"].end] == plain.tobytes()
    assert raw[by_name["packed"].offset : by_name["packed"].end] == packed.tobytes()


def test_version_2_is_read_and_others_are_refused_by_number() -> None:
    assert parse(GgufBytes(version=2).build()).version == 2
    with pytest.raises(ModelFileError, match="version 1 is not read"):
        parse(GgufBytes(version=1).build())
    with pytest.raises(ModelFileError, match="big-endian"):
        parse(GgufBytes(version=int.from_bytes(struct.pack(">I", 3), "little")).build())
    with pytest.raises(ModelFileError, match=r"not a GGUF file: it begins with b'PK"):
        parse(GgufBytes(magic=b"PK\x03\x04").build())


def test_nested_arrays_are_passed_over_and_what_follows_is_read() -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 7, 8)
    nested = text("nested") + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    file = parse(GgufBytes(raw_entries=[nested, text("after") + struct.pack("<II", 4, 5)]).build())
    assert file.metadata.whole("after") == 5
    assert isinstance(file.metadata["nested"], GgufArray)


def test_nesting_is_bounded() -> None:
    deep = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQI", 4, 1, 1)
    with pytest.raises(ModelFileError, match="nested too deep"):
        parse(GgufBytes(raw_entries=[text("deep") + struct.pack("<I", 9) + deep]).build())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (GgufBytes(num_tensors=2**40), "a tensor count of"),
        (GgufBytes(num_entries=2**40), "a metadata count of"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<I", 99)]), "unknown value type 99"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<IIQ", 9, 4, 2**62)]), "with 4611686018427387904 elements"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<IIQ", 9, 8, 2**62)]), "with 4611686018427387904 elements"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<IIQQ", 9, 8, 1, 2**62)]), "truncated or corrupt"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<IQ", 8, 2**62)]), "needs 4611686018427387904 bytes"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<IQ", 8, 1) + b"\xff"]), "is not UTF-8"),
        (GgufBytes(raw_entries=[text("a") + struct.pack("<II", 4, 1)] * 2), "appears twice"),
        (GgufBytes({"general.alignment": 24}), "alignment is 24"),
        (GgufBytes({"general.alignment": 0}), "alignment is 0"),
        (GgufBytes(tensors=[Tensor("t", (4,)), Tensor("t", (4,))]), "'t' is listed twice"),
        (GgufBytes(tensors=[Tensor("t", (4,)), Tensor("u", (4,), offset=0)]), "before 't' ends"),
        (GgufBytes(tensors=[Tensor("t", (4,), offset=8)]), "data offset 8, not a multiple of 32"),
        (GgufBytes(tensors=[Tensor("t", (4,), offset=2**40)]), "the file has"),
        (GgufBytes(tensors=[Tensor("t", (2**31, 2**31), data=b"")]), "it is truncated"),
        (GgufBytes(tensors=[Tensor("t", (4, 0))]), "empty shape"),
        (GgufBytes(tensors=[Tensor("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
        (GgufBytes(tensors=[Tensor("t", (4,), type_code=77)]), "'t': tensor type 77 is unknown"),
        (GgufBytes(tensors=[Tensor("t", (4,), type_code=20)]), "IQ4_NL"),
        (GgufBytes(tensors=[Tensor("t", (2, 33), type_code=2)]), "33 elements is not a whole number of Q4_0 blocks"),
    ],
)
def test_impossible_headers_are_refused_with_the_name_and_the_numbers(file: GgufBytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        parse(file.build(), "broken.gguf")
    assert "broken.gguf" in str(caught.value)


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = GgufBytes(
        {"general.architecture": "llama", "list": ["x", "yy"], "n": 3}, [Tensor("a", (2, 8)), Tensor("b", (8,))]
    ).build()
    for num_bytes in range(len(whole)):
        with pytest.raises(ModelFileError):
            parse(whole[:num_bytes])


def test_no_damage_gets_past_as_anything_but_a_clear_error() -> None:
    whole = GgufBytes(
        {"general.architecture": "llama", "list": ["x", "yy"], "n": 3, "f": 0.5}, [Tensor("a", (2, 8))]
    ).build()
    draw = random.Random(5)
    num_refused = 0
    for _ in range(4000):
        raw = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(whole) - 64)] = draw.randrange(256)
        try:
            file = parse(bytes(raw))
        except ModelFileError:
            num_refused += 1
            continue
        assert all(tensor.end <= len(raw) for tensor in file.tensors)
        for value in file.metadata.values():
            if isinstance(value, GgufArray) and value.element_code == 8:
                try:
                    assert len(value.texts()) == len(value)
                except ModelFileError as error:
                    assert "UTF-8" in str(error)
    assert num_refused > 1000


def test_metadata_getters_name_the_key_and_the_kind() -> None:
    metadata = parse(GgufBytes({"n": 3, "s": "x", "l": [1]}).build()).metadata
    assert (metadata.whole("n"), metadata.text("s"), metadata.real("n")) == (3, "x", 3.0)
    assert metadata.text_or_none("absent") is None
    with pytest.raises(ModelFileError, match="has no absent"):
        metadata.whole("absent")
    with pytest.raises(ModelFileError, match="s must be a int, found str"):
        metadata.whole("s")
    with pytest.raises(ModelFileError, match="no array n"):
        metadata.array("n")
    with pytest.raises(ModelFileError, match="not an array of strings"):
        metadata.array("l").texts()


def parts_of_two(**changes: object) -> list:
    second = {"split.no": 1, "split.count": 2, **changes}
    first = {"split.no": 0, "split.count": 2, "split.tensors.count": 2}
    names = split_part_names("m-00001-of-00002.gguf")
    files = [GgufBytes(first, [Tensor("a", (4,))]), GgufBytes(second, [Tensor("b", (4,))])]
    return [parse(file.build(), name) for file, name in zip(files, names, strict=True)]


def test_p4_6_parts_are_named_by_the_first() -> None:
    assert split_part_names("m-00001-of-00003.gguf") == tuple(f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3))
    assert split_part_names("m.gguf") == ("m.gguf",)
    with pytest.raises(ModelFileError, match="part 2 of 3: give the first"):
        split_part_names("m-00002-of-00003.gguf")
    check_split(parts_of_two())


def test_p4_6_parts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ModelFileError, match="it says part 1 of 2, but stands in place of part 2 of 2"):
        check_split(parts_of_two(**{"split.no": 0}))
    with pytest.raises(ModelFileError, match=r"split.count is 2, but its name stands for 1"):
        check_split(parts_of_two()[:1])
    twice = [
        *parts_of_two()[:1],
        parse(GgufBytes({"split.no": 1, "split.count": 2}, [Tensor("a", (4,))]).build(), "p2"),
    ]
    with pytest.raises(ModelFileError, match=r"'a' is in both m-00001-of-00002.gguf and p2"):
        check_split(twice)
    fewer = [*parts_of_two()[:1], parse(GgufBytes({"split.no": 1, "split.count": 2}).build(), "p2")]
    with pytest.raises(ModelFileError, match=r"split.tensors.count is 2, the parts hold 1"):
        check_split(fewer)
