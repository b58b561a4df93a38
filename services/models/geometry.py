"""The shape of a model: what its files say of layers, heads, widths and rotary embedding, in one form for all formats.

Never opens a file and never guesses: an architecture, a scaling or an option that the model code does not compute is
refused by name, since a model that loads and is computed differently answers nonsense without an error.

Invariant: all scaling of the rotary embedding is in `rope_divisors`, whatever the file's way of saying it; the worker
has one formula.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from services.models.ggml_types import GgmlType
from services.models.gguf import GgufArray, GgufFile, GgufMetadata
from services.models.model_file import ModelFileError

_T = TypeVar("_T", bool, int, float, str)


class Architecture(Enum):
    """How a layer is computed. Files of several makers share one: SmolLM2, Mistral and Llama are all LLAMA."""

    LLAMA = "llama"


class RopePairing(Enum):
    """Which two elements of a head are rotated together: a matter of how the file orders the rows of q and k."""

    INTERLEAVED = "interleaved"
    """(0, 1), (2, 3), …: GGUF files of the llama architecture, whose converter permutes the rows."""
    HALVES = "halves"
    """(0, d/2), (1, d/2 + 1), …: safetensors as Hugging Face writes them."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What model code, layouts and budgets need to know of a model besides its weights."""

    architecture: Architecture
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    """Rows of the embedding table; the tokenizer may know fewer."""
    max_context_tokens: int
    rope_theta: float
    rope_pairing: RopePairing
    rope_divisors: tuple[float, ...]
    """One per rotated pair i in [0, head_dim / 2): its frequency is rope_theta ** (-2 i / head_dim) / divisor."""
    norm_epsilon: float
    tied_embeddings: bool
    """Whether the head's matrix is the embedding table."""

    def checked(self, source: str) -> "ModelGeometry":
        """Itself; raises `ModelFileError` naming `source` if the numbers cannot belong to one model."""
        counts = {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "ffn_size": self.ffn_size,
            "vocab_size": self.vocab_size,
            "max_context_tokens": self.max_context_tokens,
        }
        for name, count in counts.items():
            if count < 1:
                raise ModelFileError(f"{source}: {name} is {count}, at least 1 expected")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"{source}: {self.num_heads} heads do not share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelFileError(f"{source}: head_dim is {self.head_dim}; rotary embedding needs pairs")
        if len(self.rope_divisors) != self.head_dim // 2:
            raise ModelFileError(
                f"{source}: {len(self.rope_divisors)} rotary factors for {self.head_dim // 2} rotated pairs"
            )
        positive = (self.rope_theta, self.norm_epsilon, *self.rope_divisors)
        if not all(math.isfinite(number) and number > 0 for number in positive):
            raise ModelFileError(
                f"{source}: rotary base, rotary factors and norm epsilon must all be finite and positive"
            )
        return self


GGUF_ARCHITECTURES = ("llama",)
HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROPE_FACTORS_NAME = "rope_freqs.weight"


def geometry_from_gguf(parts: Sequence[GgufFile]) -> ModelGeometry:
    """The geometry of a GGUF model; the first part holds the metadata.

    Raises `ModelFileError` on an unsupported architecture or option, and on missing or impossible numbers.
    """
    metadata = parts[0].metadata
    name = metadata.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise _unsupported(metadata.file_name, name, GGUF_ARCHITECTURES)
    return _llama_from_gguf(metadata, parts, name).checked(metadata.file_name)


def geometry_from_config(
    config: Mapping[str, object], tensor_names: Collection[str], source: str = "config.json"
) -> ModelGeometry:
    """The geometry of a safetensors model, from its `config.json` and the names of its tensors.

    Raises `ModelFileError` as `geometry_from_gguf` does.
    """
    reader = _Config(config, source)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"model_type {config.get('model_type')!r}"
    if name not in HF_ARCHITECTURES:
        raise _unsupported(source, name, HF_ARCHITECTURES)
    return _llama_from_config(reader, tensor_names).checked(source)


def _unsupported(source: str, name: str, supported: Sequence[str]) -> ModelFileError:
    return ModelFileError(f"{source}: the architecture {name} is not supported; these are: {', '.join(supported)}")


def _llama_from_gguf(metadata: GgufMetadata, parts: Sequence[GgufFile], name: str) -> ModelGeometry:
    num_heads = _uniform(metadata, f"{name}.attention.head_count")
    hidden_size = metadata.whole(f"{name}.embedding_length")
    head_dim = metadata.whole_or_none(f"{name}.attention.key_length") or hidden_size // max(num_heads, 1)
    max_context_tokens = metadata.whole(f"{name}.context_length")
    _refuse_gguf_options(metadata, name, head_dim, max_context_tokens)
    tensor_names = {tensor.name for part in parts for tensor in part.tensors}
    has_kv_heads = f"{name}.attention.head_count_kv" in metadata
    return ModelGeometry(
        architecture=Architecture.LLAMA,
        num_layers=metadata.whole(f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(metadata, f"{name}.attention.head_count_kv") if has_kv_heads else num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        ffn_size=_uniform(metadata, f"{name}.feed_forward_length"),
        vocab_size=metadata.whole_or_none(f"{name}.vocab_size") or len(metadata.array("tokenizer.ggml.tokens")),
        max_context_tokens=max_context_tokens,
        rope_theta=metadata.real_or_none(f"{name}.rope.freq_base") or 10_000.0,
        rope_pairing=RopePairing.INTERLEAVED,
        rope_divisors=_gguf_rope_divisors(metadata, parts, name, head_dim),
        norm_epsilon=metadata.real(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in tensor_names,
    )


def _uniform(metadata: GgufMetadata, key: str) -> int:
    """A number that some files write once per layer; layers that differ are refused."""
    value = metadata.get(key)
    if not isinstance(value, GgufArray):
        return metadata.whole(key)
    numbers = set(value.numbers())
    if len(numbers) != 1:
        raise ModelFileError(f"{metadata.file_name}: {key} differs between layers ({sorted(numbers)}): not supported")
    return int(numbers.pop())


def _refuse_gguf_options(metadata: GgufMetadata, name: str, head_dim: int, max_context_tokens: int) -> None:
    """Refuses what files of this architecture may ask for and its model code does not compute."""
    same_as = {
        f"{name}.attention.value_length": head_dim,
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.expert_count": 0,
        f"{name}.nextn_predict_layers": 0,
    }
    for key, expected in same_as.items():
        found = metadata.whole_or_none(key)
        if found is not None and found != expected:
            raise ModelFileError(f"{metadata.file_name}: {key} is {found}, only {expected} is supported")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if metadata.real_or_none(f"{name}.{key}"):
            raise ModelFileError(f"{metadata.file_name}: {name}.{key} is set, which is not supported")
    window = metadata.whole_or_none(f"{name}.attention.sliding_window")
    _refuse_window(metadata.file_name, window, max_context_tokens)


def _refuse_window(source: str, window: int | None, max_context_tokens: int) -> None:
    if window is not None and 0 < window < max_context_tokens:
        raise ModelFileError(
            f"{source}: sliding attention ({window} tokens of a context of {max_context_tokens}) is not supported"
        )


def _gguf_rope_divisors(
    metadata: GgufMetadata, parts: Sequence[GgufFile], name: str, head_dim: int
) -> tuple[float, ...]:
    """Linear scaling from the metadata times the factors of the file's own tensor; a file may have either."""
    kind = metadata.text_or_none(f"{name}.rope.scaling.type") or "none"
    linear = 1.0
    if kind == "linear":
        linear = metadata.real(f"{name}.rope.scaling.factor")
    elif kind != "none":
        raise ModelFileError(
            f"{metadata.file_name}: {name}.rope.scaling.type {kind} is not supported, none and linear are"
        )
    else:
        linear = metadata.real_or_none(f"{name}.rope.scale_linear") or 1.0
    for part in parts:
        for tensor in part.tensors:
            if tensor.name == ROPE_FACTORS_NAME:
                if tensor.ggml_type is not GgmlType.F32:
                    raise ModelFileError(f"{part.file_name}: {tensor.name} is {tensor.ggml_type.name}, F32 expected")
                factors = struct.unpack_from(f"<{tensor.num_bytes // 4}f", part.buffer, tensor.offset)
                return tuple(linear * factor for factor in factors)
    return (linear,) * (head_dim // 2)


@dataclass(frozen=True, slots=True)
class _Config:
    """A `config.json` with getters that name the key which is missing or of the wrong kind."""

    values: Mapping[str, object]
    source: str

    def get(self, key: str, kind: type[_T]) -> _T | None:
        value = self.values.get(key)
        if kind is float and type(value) is int:
            return float(value)
        if value is None or type(value) is kind:
            return value
        raise ModelFileError(f"{self.source}: {key} must be a {kind.__name__}, found {value!r}")

    def need(self, key: str, kind: type[_T]) -> _T:
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(f"{self.source}: {key} is missing")
        return value

    def part(self, key: str) -> "_Config":
        value = self.values.get(key)
        return _Config(value if isinstance(value, dict) else {}, f"{self.source}: {key}")


def _llama_from_config(config: _Config, tensor_names: Collection[str]) -> ModelGeometry:
    _refuse_config_options(config)
    num_heads, hidden_size = config.need("num_attention_heads", int), config.need("hidden_size", int)
    head_dim = config.get("head_dim", int) or hidden_size // max(num_heads, 1)
    # Newer files keep theta beside the scaling, older ones beside everything else.
    scaling = config.part("rope_parameters") if config.values.get("rope_parameters") else config.part("rope_scaling")
    theta = scaling.get("rope_theta", float) or config.get("rope_theta", float) or 10_000.0
    return ModelGeometry(
        architecture=Architecture.LLAMA,
        num_layers=config.need("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", int) or num_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        ffn_size=config.need("intermediate_size", int),
        vocab_size=config.need("vocab_size", int),
        max_context_tokens=config.need("max_position_embeddings", int),
        rope_theta=theta,
        rope_pairing=RopePairing.HALVES,
        rope_divisors=_config_rope_divisors(scaling, theta, head_dim),
        norm_epsilon=config.need("rms_norm_eps", float),
        tied_embeddings=_is_tied(config, tensor_names),
    )


def _is_tied(config: _Config, tensor_names: Collection[str]) -> bool:
    """The flag where it is set; a head that is absent from the files, with no flag, is the embedding table."""
    flag = config.get("tie_word_embeddings", bool)
    return "lm_head.weight" not in tensor_names if flag is None else flag


def _refuse_config_options(config: _Config) -> None:
    only = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "rope_interleaved": False,
        "quantization_config": None,
    }
    for key, expected in only.items():
        found = config.values.get(key)
        if found is not None and found != expected:
            raise ModelFileError(f"{config.source}: {key} is {found!r}, only {expected!r} is supported")
    _refuse_window(config.source, config.get("sliding_window", int), config.need("max_position_embeddings", int))


def _config_rope_divisors(scaling: _Config, theta: float, head_dim: int) -> tuple[float, ...]:
    if scaling.get("partial_rotary_factor", float) not in (None, 1.0):
        raise ModelFileError(
            f"{scaling.source}: partial_rotary_factor is not 1: rotating part of a head is not supported"
        )
    kind = scaling.get("rope_type", str) or scaling.get("type", str) or "default"
    if kind == "default":
        return (1.0,) * (head_dim // 2)
    if kind == "linear":
        return (scaling.need("factor", float),) * (head_dim // 2)
    if kind == "llama3":
        return tuple(_llama3_divisor(scaling, theta ** (-2 * pair / head_dim)) for pair in range(head_dim // 2))
    raise ModelFileError(f"{scaling.source}: rope_type {kind} is not supported; default, linear and llama3 are")


def _llama3_divisor(scaling: _Config, frequency: float) -> float:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's own rule)."""
    factor = scaling.need("factor", float)
    low, high = scaling.need("low_freq_factor", float), scaling.need("high_freq_factor", float)
    turns = scaling.need("original_max_position_embeddings", int) * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    kept = (turns - low) / (high - low)
    return 1.0 / ((1.0 - kept) / factor + kept)
