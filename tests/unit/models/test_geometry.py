"""Geometry from both formats, and the places of tensors: what is not computed is refused by name, never ignored."""

import math
import struct
from dataclasses import replace

import pytest

from services.models.geometry import RopePairing, geometry_from_config, geometry_from_gguf
from services.models.ggml_types import GgmlType
from services.models.gguf import GgufFile, parse_gguf
from services.models.model_file import ModelFileError
from services.models.safetensors import SafetensorsFile
from services.models.tensor_places import TensorPlace, expected_tensors, locate_tensors
from tests.support.gguf_bytes import GgufBytes, Tensor
from tests.support.small_model import CONFIG, GEOMETRY, METADATA, gguf_tensors


def gguf_file(metadata: dict[str, object], *tensors: Tensor) -> GgufFile:
    return parse_gguf(memoryview(GgufBytes(metadata, list(tensors)).build()), "m.gguf")


def test_the_numbers_of_a_gguf_file() -> None:
    assert geometry_from_gguf([gguf_file(METADATA)]) == GEOMETRY


def test_the_numbers_of_a_config() -> None:
    expected = replace(GEOMETRY, rope_pairing=RopePairing.HALVES)
    assert geometry_from_config(CONFIG, set()) == expected
    nested = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    assert (
        geometry_from_config({**nested, "rope_parameters": {"rope_type": "default", "rope_theta": 1000}}, [])
        == expected
    )
    assert (
        geometry_from_config({**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": None}, [])
        == expected
    )


def test_optional_numbers_follow_from_others() -> None:
    few = {
        key: value
        for key, value in METADATA.items()
        if key not in ("llama.attention.head_count_kv", "llama.vocab_size")
    }
    found = geometry_from_gguf(
        [gguf_file({**few, "tokenizer.ggml.tokens": ["a"] * 7, "llama.attention.key_length": 16})]
    )
    assert (found.num_kv_heads, found.vocab_size, found.head_dim) == (4, 7, 16)
    per_layer = geometry_from_gguf([gguf_file({**METADATA, "llama.feed_forward_length": [64, 64]})])
    assert per_layer == GEOMETRY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba is not supported; these are: llama"),
        ({"llama.expert_count": 8}, "expert_count is 8, only 0"),
        ({"llama.rope.dimension_count": 4}, "dimension_count is 4, only 8"),
        ({"llama.attention.value_length": 16}, "value_length is 16, only 8"),
        ({"llama.attention.sliding_window": 16}, r"sliding attention \(16 tokens of a context of 64\)"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn is not supported"),
        ({"llama.logit_scale": 2.0}, "logit_scale is set"),
        ({"llama.feed_forward_length": [64, 32]}, r"differs between layers \(\[32, 64\]\)"),
        ({"llama.attention.head_count_kv": 3}, "4 heads do not share 3 KV heads"),
        ({"llama.block_count": 0}, "num_layers is 0"),
        ({"llama.embedding_length": 12}, "head_dim is 3"),
        ({"llama.rope.freq_base": float("inf")}, "finite and positive"),
        ({"llama.context_length": "long"}, "context_length must be a int"),
    ],
)
def test_what_a_gguf_file_asks_for_in_vain_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        geometry_from_gguf([gguf_file({**METADATA, **changes})])
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen9ForCausalLM"]},
            "Qwen9ForCausalLM is not supported; these are: LlamaForCausalLM, Mistral",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"sliding_window": 16}, "sliding attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type yarn is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a int"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        geometry_from_config({**CONFIG, **changes}, set())


def test_p4_2_rope_factors_of_the_file_are_read_and_used() -> None:
    factors = Tensor("rope_freqs.weight", (4,), struct.pack("<4f", 1.0, 1.0, 2.5, 8.0))
    file = gguf_file(METADATA, *gguf_tensors(), factors)
    geometry = geometry_from_gguf([file])
    assert geometry.rope_divisors == (1.0, 1.0, 2.5, 8.0)
    assert "rope_freqs" not in str(locate_tensors([file], geometry).keys())
    linear = {**METADATA, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert geometry_from_gguf([gguf_file(linear, factors)]).rope_divisors == (2.0, 2.0, 5.0, 16.0)
    assert geometry_from_gguf([gguf_file(linear)]).rope_divisors == (2.0,) * 4
    with pytest.raises(ModelFileError, match="3 rotary factors for 4 rotated pairs"):
        geometry_from_gguf([gguf_file(METADATA, Tensor("rope_freqs.weight", (3,), struct.pack("<3f", 1, 1, 1)))])


def test_llama3_scaling_of_a_config_is_transformers_own() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    heads = {"hidden_size": 512, "num_attention_heads": 4, "rope_theta": 500_000.0, "max_position_embeddings": 131_072}
    divisors = geometry_from_config({**CONFIG, **heads, "rope_scaling": scaling}, set()).rope_divisors
    transformers_config = pytest.importorskip("transformers").LlamaConfig(
        **{key: value for key, value in {**CONFIG, **heads}.items() if key not in ("architectures", "rope_theta")},
        rope_parameters={**scaling, "rope_theta": 500_000.0},
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers_config, "cpu")
    ours = [500_000.0 ** (-2 * pair / 128) / divisor for pair, divisor in enumerate(divisors)]
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ours, frequencies.tolist(), strict=True))
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0


@pytest.mark.parametrize(
    ("flag", "has_head", "is_tied"),
    [(None, True, False), (None, False, True), (True, True, True), (False, False, False)],
)
def test_p4_1_a_head_is_tied_by_its_flag_or_else_by_its_absence(
    flag: bool | None, has_head: bool, is_tied: bool
) -> None:
    config = CONFIG if flag is None else {**CONFIG, "tie_word_embeddings": flag}
    assert geometry_from_config(config, {"lm_head.weight"} if has_head else set()).tied_embeddings is is_tied


def test_p4_1_a_tied_head_lies_where_the_embedding_lies() -> None:
    file = gguf_file(METADATA, *gguf_tensors())
    places = locate_tensors([file], geometry_from_gguf([file]))
    assert places.keys() == expected_tensors(GEOMETRY).keys()
    assert places["output"] == places["token_embd"]
    own = gguf_file(METADATA, *gguf_tensors(replace(GEOMETRY, tied_embeddings=False)))
    untied = locate_tensors([own], geometry_from_gguf([own]))
    assert untied["output"] != untied["token_embd"]


def test_p4_3_table_and_head_may_be_of_different_types() -> None:
    table = {"token_embd.weight": (14, 210), "output.weight": (8, 8 * 34)}
    wide = {**METADATA, "llama.embedding_length": 256, "llama.attention.key_length": 8}
    geometry = replace(GEOMETRY, hidden_size=256, tied_embeddings=False)
    tensors = [
        Tensor(tensor.name, tensor.shape, bytes(10 * table[tensor.name][1]), table[tensor.name][0])
        if tensor.name in table
        else tensor
        for tensor in gguf_tensors(geometry)
    ]
    file = gguf_file(wide, *tensors)
    places = locate_tensors([file], geometry_from_gguf([file]))
    assert (places["token_embd"].ggml_type, places["output"].ggml_type) == (GgmlType.Q6_K, GgmlType.Q8_0)


def test_places_are_those_of_the_directory() -> None:
    file = gguf_file(METADATA, *gguf_tensors())
    entry = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down.weight")
    places = locate_tensors([file], GEOMETRY)
    assert places["layers.1.ffn_down"] == TensorPlace(0, entry.offset, GgmlType.F32, rows=32, columns=64)
    assert (places["layers.0.attn_norm"].rows, places["layers.0.attn_norm"].columns) == (1, 32)


def test_tensors_of_several_files_are_counted_by_file() -> None:
    tensors = gguf_tensors()
    files = [gguf_file(METADATA, *tensors[:5]), gguf_file({}, *tensors[5:])]
    places = locate_tensors(files, GEOMETRY)
    assert {place.file_index for place in places.values()} == {0, 1}
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' is in two files"):
        locate_tensors([*files, gguf_file({}, tensors[0])], GEOMETRY)


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    tensors = gguf_tensors()
    with pytest.raises(ModelFileError, match=r"lack, 1 tensors: blk.1.attn_k.weight"):
        locate_tensors([gguf_file(METADATA, *[t for t in tensors if t.name != "blk.1.attn_k.weight"])], GEOMETRY)
    with pytest.raises(ModelFileError, match=r"does not know, 2 tensors: blk.0.attn_q.bias, blk.2.attn_q.weight"):
        extra = [Tensor("blk.0.attn_q.bias", (32,)), Tensor("blk.2.attn_q.weight", (32, 32))]
        locate_tensors([gguf_file(METADATA, *tensors, *extra)], GEOMETRY)
    with pytest.raises(ModelFileError, match=r"'blk.0.attn_q.weight' has the shape \(32, 32\), .* asks for \(48, 32\)"):
        locate_tensors([gguf_file(METADATA, *tensors)], replace(GEOMETRY, num_heads=6))
    with pytest.raises(ModelFileError, match="and 12 more"):
        locate_tensors([gguf_file(METADATA, tensors[0], tensors[-1])], replace(GEOMETRY, num_layers=2))


def test_hugging_face_names_are_found_and_what_is_derived_is_passed_over() -> None:
    from services.models.tensor_places import _HF_NAMES, TensorEntry

    geometry = replace(GEOMETRY, rope_pairing=RopePairing.HALVES)
    shapes = expected_tensors(geometry)
    entries, offset = [], 0
    for name, (rows, columns) in shapes.items():
        scope, _, part = name.rpartition(".")
        shape = (rows, columns) if rows > 1 else (columns,)
        in_file = _HF_NAMES[part].format(scope.removeprefix("layers."))
        entries.append(TensorEntry(in_file, GgmlType.BF16, shape, offset, 2 * rows * columns))
        offset += 2 * rows * columns
    assert "model.layers.1.self_attn.q_proj.weight" in {entry.name for entry in entries}
    entries.append(TensorEntry("model.layers.0.self_attn.rotary_emb.inv_freq", GgmlType.F32, (4,), offset, 16))
    file = SafetensorsFile("m.safetensors", tuple(entries), 0, memoryview(b""))
    places = locate_tensors([file], geometry)
    assert places.keys() == shapes.keys()
    # A tied head that the file stores all the same is the table, not the copy.
    assert places["output"] == places["token_embd"]
