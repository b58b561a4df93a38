"""A GGUF file of the llama architecture as transformers' own model, in float32, by the gguf package's own reading.

transformers reads such files itself only where `accelerate` is installed; this needs nothing but both packages. It
shares no code with the mesh's own reading: tests take it as their oracle.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
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
WHOLE = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight", "output": "lm_head.weight"}


def load_llama(path: Path) -> LlamaForCausalLM:
    """The model, ready to be called.

    Raises:
        ValueError: the file is of another architecture.
    """
    reader = gguf.GGUFReader(path)
    if (found := reader.fields["general.architecture"].contents()) != "llama":
        raise ValueError(f"{path.name} is of the architecture {found}; of GGUF files only llama is measured")
    config = _config(reader)
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(_weights(reader, config), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def _config(reader: Any) -> LlamaConfig:
    def number(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    return LlamaConfig(
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=int(number("attention.head_count")),
        num_key_value_heads=int(number("attention.head_count_kv")),
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        vocab_size=int(number("vocab_size")),
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
    )


def _weights(reader: Any, config: LlamaConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, part = tensor.name.removesuffix(".weight"), tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            # The file pairs neighbours in the rotary embedding, transformers pairs halves.
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        layer = name.split(".")[1] if name.startswith("blk.") else None
        weights[WHOLE[name] if layer is None else f"model.layers.{layer}.{NAMES[part]}.weight"] = torch.tensor(values)
    return weights
