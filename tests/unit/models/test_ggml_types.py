import pytest

from services.models.ggml_types import GgmlType, GgmlTypeError, block_bytes, block_length, ggml_type, row_bytes

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", GgmlType)
def test_number_name_and_block_agree_with_the_gguf_package(kind: GgmlType) -> None:
    theirs = gguf.GGMLQuantizationType(kind.value)
    assert theirs.name == kind.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (block_length(kind), block_bytes(kind))
    assert ggml_type(kind.value) is kind


@pytest.mark.parametrize("theirs", [kind for kind in gguf.GGMLQuantizationType if kind.value not in set(GgmlType)])
def test_a_type_that_cannot_be_read_is_refused_by_its_name(theirs: gguf.GGMLQuantizationType) -> None:
    with pytest.raises(GgmlTypeError, match=rf"type {theirs.value} \({theirs.name}\) is not supported.*Q8_0"):
        ggml_type(theirs.value)


@pytest.mark.parametrize("number", [-1, 1000])
def test_a_number_that_ggml_does_not_define_is_unknown(number: int) -> None:
    with pytest.raises(GgmlTypeError, match=f"type {number} is unknown"):
        ggml_type(number)


def test_a_row_is_whole_blocks() -> None:
    assert row_bytes(GgmlType.Q4_1, 576) == 360
    assert row_bytes(GgmlType.Q6_K, 512) == 420
    assert row_bytes(GgmlType.F32, 3) == 12
    assert row_bytes(GgmlType.Q8_0, 0) == 0
    with pytest.raises(GgmlTypeError, match="576 elements is not a whole number of Q4_K blocks of 256"):
        row_bytes(GgmlType.Q4_K, 576)
    with pytest.raises(GgmlTypeError, match="-32 elements"):
        row_bytes(GgmlType.Q4_0, -32)
