"""The smallest model of the llama architecture, as metadata, as a config and as tensors of zeros."""

from services.models.geometry import Architecture, ModelGeometry, RopePairing
from services.models.tensor_places import expected_tensors
from tests.support.gguf_bytes import Tensor

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.rope.freq_base": 1000.0,
    "llama.vocab_size": 10,
}
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.5,
    "rope_theta": 1000,
    "vocab_size": 10,
}
GEOMETRY = ModelGeometry(
    architecture=Architecture.LLAMA,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    ffn_size=64,
    vocab_size=10,
    max_context_tokens=64,
    rope_theta=1000.0,
    rope_pairing=RopePairing.INTERLEAVED,
    rope_divisors=(1.0,) * 4,
    norm_epsilon=0.5,
    tied_embeddings=True,
)


def gguf_tensors(geometry: ModelGeometry = GEOMETRY) -> list[Tensor]:
    shapes = expected_tensors(geometry)
    names = {name: name.replace("layers.", "blk.") + ".weight" for name in shapes}
    chosen = [name for name in shapes if not (geometry.tied_embeddings and name == "output")]
    return [Tensor(names[name], shapes[name] if shapes[name][0] > 1 else shapes[name][1:]) for name in chosen]
