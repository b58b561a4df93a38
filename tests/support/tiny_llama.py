"""A tiny Llama with random weights: its files in either format, and its logits by plain torch in float64.

The reference shares no code with the worker: no paging, no layouts, no kernels.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

_GGUF_NAMES = {
    "token_embd": "token_embd.weight",
    "output_norm": "output_norm.weight",
    "output": "output.weight",
}


@dataclass(frozen=True, slots=True)
class TinyShape:
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 16
    hidden_size: int = 96
    ffn_size: int = 224
    vocab_size: int = 131
    max_context_tokens: int = 256
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """Weights by canonical name, float32, [rows, columns]; vectors [columns]."""

    shape: TinyShape
    weights: dict[str, Tensor]
    interleaved: bool

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), vocab_size] float64: the logits after every position of one sequence."""
        shape, w = self.shape, {name: tensor.double() for name, tensor in self.weights.items()}
        x = w["token_embd"][torch.tensor(ids)]
        for layer in range(shape.num_layers):
            x = self._layer(x, {k.split(".")[2]: v for k, v in w.items() if k.startswith(f"layers.{layer}.")})
        x = _norm(x, w["output_norm"], shape.norm_epsilon)
        return x @ w["token_embd" if shape.tied else "output"].T

    def _layer(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        shape, n = self.shape, len(x)
        y = _norm(x, w["attn_norm"], shape.norm_epsilon)
        q = self._rotate((y @ w["attn_q"].T).view(n, shape.num_heads, shape.head_dim))
        k = self._rotate((y @ w["attn_k"].T).view(n, shape.num_kv_heads, shape.head_dim))
        v = (y @ w["attn_v"].T).view(n, shape.num_kv_heads, shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1) @ w["attn_output"].T
        y = _norm(x, w["ffn_norm"], shape.norm_epsilon)
        return x + (torch.nn.functional.silu(y @ w["ffn_gate"].T) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T

    def _rotate(self, x: Tensor) -> Tensor:
        shape = self.shape
        pairs = torch.arange(shape.head_dim // 2, dtype=torch.float64)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * shape.rope_theta ** (-2 * pairs / shape.head_dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        half = shape.head_dim // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else (x[..., :half], x[..., half:])
        turned = (a * cos - b * sin, a * sin + b * cos)
        return torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def random_weights(shape: TinyShape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"token_embd": (shape.vocab_size, hidden), "output_norm": (hidden,)}
    if not shape.tied:
        sizes["output"] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        parts = {
            "attn_norm": (hidden,),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_norm": (hidden,),
            "ffn_gate": (shape.ffn_size, hidden),
            "ffn_up": (shape.ffn_size, hidden),
            "ffn_down": (hidden, shape.ffn_size),
        }
        sizes |= {f"layers.{layer}.{part}": size for part, size in parts.items()}
    return {name: _random(size, generator) for name, size in sizes.items()}


def _random(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, generator=generator)
    return 1 + 0.1 * noise if len(size) == 1 else noise * (1.5 / size[-1] ** 0.5)


def write_gguf(path: Path, shape: TinyShape, kind: gguf.GGMLQuantizationType, seed: int = 7) -> TinyLlama:
    """Writes the model with its matrices in `kind`; the weights returned are what the file says, dequantised."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_context_tokens)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    stored = {}
    for name, tensor in random_weights(shape, seed).items():
        own = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else kind
        packed = gguf.quants.quantize(tensor.numpy(), own)
        stored[name] = torch.from_numpy(gguf.quants.dequantize(packed, own).astype(np.float32))
        file_name = _GGUF_NAMES.get(name) or f"blk.{name.removeprefix('layers.')}.weight"
        writer.add_tensor(file_name, packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyLlama(shape, stored, interleaved=True)


def write_safetensors(folder: Path, shape: TinyShape, dtype: torch.dtype, seed: int = 7) -> TinyLlama:
    """Writes the model as Hugging Face does; the weights returned are the rounded ones."""
    names = {
        "token_embd": "model.embed_tokens.weight",
        "output_norm": "model.norm.weight",
        "output": "lm_head.weight",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    stored = {name: tensor.to(dtype) for name, tensor in random_weights(shape, seed).items()}
    in_file = {}
    for name, tensor in stored.items():
        scope, _, part = name.rpartition(".")
        in_file[f"model.{scope}.{names[part]}.weight" if scope else names[part]] = tensor
    folder.mkdir(exist_ok=True)
    save_file(in_file, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return TinyLlama(shape, {name: tensor.float() for name, tensor in stored.items()}, interleaved=False)
