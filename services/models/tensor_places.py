"""Where each weight of a model lies, under one set of names for all formats.

Never opens a file. The names are `token_embd`, `output_norm`, `output`, and for layer i `layers.{i}.` with `attn_norm`,
`attn_q`, `attn_k`, `attn_v`, `attn_output`, `ffn_norm`, `ffn_gate`, `ffn_up`, `ffn_down`.

Invariant of `locate_tensors`: every expected tensor is in exactly one place and has the expected shape, and no tensor
of the files is left over; what cannot be explained is refused by name before anything is served.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.models.geometry import ROPE_FACTORS_NAME, ModelGeometry
from services.models.ggml_types import GgmlType
from services.models.gguf import GgufFile
from services.models.model_file import ModelFileError, TensorEntry
from services.models.safetensors import SafetensorsFile

MAX_NAMES_SHOWN = 6
"""A wrong geometry makes hundreds of tensors wrong; the first few say it."""

WeightFile = GgufFile | SafetensorsFile

_GGUF_NAMES = {
    "token_embd": "token_embd.weight",
    "output_norm": "output_norm.weight",
    "output": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "attn_q": "blk.{}.attn_q.weight",
    "attn_k": "blk.{}.attn_k.weight",
    "attn_v": "blk.{}.attn_v.weight",
    "attn_output": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "ffn_gate": "blk.{}.ffn_gate.weight",
    "ffn_up": "blk.{}.ffn_up.weight",
    "ffn_down": "blk.{}.ffn_down.weight",
}
_HF_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "attn_q": "model.layers.{}.self_attn.q_proj.weight",
    "attn_k": "model.layers.{}.self_attn.k_proj.weight",
    "attn_v": "model.layers.{}.self_attn.v_proj.weight",
    "attn_output": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_gate": "model.layers.{}.mlp.gate_proj.weight",
    "ffn_up": "model.layers.{}.mlp.up_proj.weight",
    "ffn_down": "model.layers.{}.mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A matrix in one of the model's files; a vector is a matrix of one row."""

    file_index: int
    """Into the model's files, in the order given to `locate_tensors`."""
    offset: int
    """Bytes from the start of that file."""
    ggml_type: GgmlType
    rows: int
    columns: int


def expected_tensors(geometry: ModelGeometry) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every tensor that the model has, the head included where it is tied."""
    hidden, ffn = geometry.hidden_size, geometry.ffn_size
    q_rows, kv_rows = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    layer = {
        "attn_norm": (1, hidden),
        "attn_q": (q_rows, hidden),
        "attn_k": (kv_rows, hidden),
        "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows),
        "ffn_norm": (1, hidden),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    shapes = {"token_embd": (geometry.vocab_size, hidden)}
    for index in range(geometry.num_layers):
        shapes |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
    return shapes | {"output_norm": (1, hidden), "output": (geometry.vocab_size, hidden)}


def locate_tensors(files: Sequence[WeightFile], geometry: ModelGeometry) -> dict[str, TensorPlace]:
    """The place of every expected tensor; a tied head has the place of `token_embd`.

    Raises `ModelFileError` naming tensors that are missing, unknown, doubled or of another shape.
    """
    shapes = expected_tensors(geometry)
    names = _names_in_files(shapes, _GGUF_NAMES if isinstance(files[0], GgufFile) else _HF_NAMES)
    if geometry.tied_embeddings:
        del shapes["output"]
    places: dict[str, TensorPlace] = {}
    unknown: list[str] = []
    for file_index, file, tensor in _all_tensors(files):
        name = names.get(tensor.name)
        if name in shapes:
            if name in places:
                raise ModelFileError(f"{file.file_name}: tensor {tensor.name!r} is in two files of the model")
            places[name] = _place(file_index, file.file_name, tensor, shapes[name])
        elif name is None and not _is_derived(tensor.name):
            unknown.append(tensor.name)
    in_files = {name: file_name for file_name, name in names.items()}
    _refuse_any(
        files, "the model needs, and the files lack,", [in_files[name] for name in shapes if name not in places]
    )
    _refuse_any(files, "the files hold, and this architecture does not know,", unknown)
    if geometry.tied_embeddings:
        places["output"] = places["token_embd"]
    return places


def _names_in_files(shapes: Mapping[str, object], patterns: Mapping[str, str]) -> dict[str, str]:
    """The name in the files of each expected tensor, to the name here."""
    names = {}
    for name in shapes:
        scope, _, part = name.rpartition(".")
        names[patterns[part].format(scope.removeprefix("layers."))] = name
    return names


def _all_tensors(files: Sequence[WeightFile]) -> Iterator[tuple[int, WeightFile, TensorEntry]]:
    for file_index, file in enumerate(files):
        for tensor in file.tensors:
            yield file_index, file, tensor


def _is_derived(name: str) -> bool:
    """Tensors that are no weights: rotary factors, which the geometry has read, and rotary frequencies that follow from
    the configuration and are written by old exporters only."""
    return name == ROPE_FACTORS_NAME or name.endswith(".rotary_emb.inv_freq")


def _place(file_index: int, file_name: str, tensor: TensorEntry, expected: tuple[int, int]) -> TensorPlace:
    shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    if shape != expected:
        raise ModelFileError(
            f"{file_name}: tensor {tensor.name!r} has the shape {tensor.shape}, the metadata asks for "
            f"{expected if expected[0] > 1 else expected[1:]}"
        )
    return TensorPlace(file_index, tensor.offset, tensor.ggml_type, *expected)


def _refuse_any(files: Sequence[WeightFile], what: str, names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN])
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise ModelFileError(f"{files[0].file_name}: {what} {len(names)} tensors: {shown}{more}")
