"""The Llama family (SmolLM2, Mistral, Llama): written once against a rank's share of layers, heads, FFN and vocabulary.

PP and TP differ in the spans of the share and in whether the seam sums over ranks; attention is over all rows of the
share's heads or, where the cache is cut by tokens, over some rows of all heads (token_attention). The residual stream
is summed in place: the rank that keeps it adds its partial product to it, the others overwrite theirs with their
partial product, and the seam's sum is the new stream, so there is no addition besides. Eleven kernel calls a layer, and
the two sums.

Shapes: T tokens, N sampled rows, Hq and Hkv this share's heads, D head dimension, F this share's FFN columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Activation, AttentionShape, Rotary, StepInputs
from kernels.cpu.collective_status import Purpose
from kernels.rotary import rope_table
from kernels.weights import Weight
from services.models.geometry import RopePairing
from services.worker.memory.rows.kv_cache import Pool
from services.worker.model.stage import StageSpec, Weights
from services.worker.model.token_attention import TokenAttention, TokenStep


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's projections, this share's heads."""

    q: Weight
    k: Weight
    v: Weight
    output: Weight


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """One layer's FFN, this share's columns."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. A part that this share holds nothing of is None."""

    index: int
    attention_norm: Tensor
    attention: AttentionWeights | None
    ffn_norm: Tensor
    ffn: FfnWeights | None


def load_layer(store: Weights, spec: StageSpec, index: int) -> LayerWeights:
    """Views of one layer for this share; no byte is copied but the norms'."""
    geometry, share, prefix = spec.geometry, spec.share, f"layers.{index}."
    heads, kv_heads = share.heads.times(geometry.head_dim), share.kv_heads.times(geometry.head_dim)
    attention = ffn = None
    if len(heads):
        attention = AttentionWeights(
            q=store.matrix(prefix + "attn_q", rows=heads),
            k=store.matrix(prefix + "attn_k", rows=kv_heads),
            v=store.matrix(prefix + "attn_v", rows=kv_heads),
            output=store.matrix(prefix + "attn_output", columns=heads),
        )
    if len(share.ffn):
        ffn = FfnWeights(
            gate=store.matrix(prefix + "ffn_gate", rows=share.ffn),
            up=store.matrix(prefix + "ffn_up", rows=share.ffn),
            down=store.matrix(prefix + "ffn_down", columns=share.ffn),
        )
    return LayerWeights(index, store.vector(prefix + "attn_norm"), attention, store.vector(prefix + "ffn_norm"), ffn)


class Activations:
    """Buffers for the largest step, made once: a step of T tokens uses the first T rows' worth of each."""

    def __init__(self, spec: StageSpec) -> None:
        geometry, share, rows = spec.geometry, spec.share, spec.max_batch_tokens
        heads, kv_heads = len(share.heads) * geometry.head_dim, len(share.kv_heads) * geometry.head_dim
        self.hidden, self.normed = (
            torch.zeros(rows * geometry.hidden_size, device=spec.backend.device) for _ in range(2)
        )
        self.qkv = torch.zeros(rows * (heads + 2 * kv_heads), device=spec.backend.device)
        self.attended = torch.zeros(rows * heads, device=spec.backend.device)
        self.gate, self.up = (torch.zeros(rows * len(share.ffn), device=spec.backend.device) for _ in range(2))


def _view(buffer: Tensor, num_tokens: int, width: int) -> Tensor:
    return buffer[: num_tokens * width].view(num_tokens, width)


class LlamaStage:
    """One rank's share under one layout."""

    def __init__(self, spec: StageSpec, store: Weights) -> None:
        geometry, share = spec.geometry, spec.share
        self._spec = spec
        self._embedding = store.matrix("token_embd") if share.layers.begin == 0 else None
        self._layers = tuple(load_layer(store, spec, index) for index in range(share.layers.begin, share.layers.end))
        self._output_norm = store.vector("output_norm") if share.has_head else None
        self._head = store.matrix("output", rows=share.vocab) if share.has_head else None
        divisors = torch.tensor(geometry.rope_divisors, dtype=torch.float64)
        table = rope_table(geometry.head_dim, geometry.rope_theta, spec.max_context_tokens, divisors)
        self._rotary = Rotary(table.to(spec.backend.device), geometry.rope_pairing is RopePairing.INTERLEAVED)
        self._buffers = Activations(spec)
        self._by_tokens = None
        if spec.cut_by_tokens:
            assert spec.peers is not None, "rows of the cache are cut among peers"
            dim, rows = geometry.head_dim, spec.max_batch_tokens
            self._by_tokens = TokenAttention(spec.peers, spec.backend, dim, rows, self._rotary)

    def hidden(self, num_tokens: int) -> Tensor:
        """[T, hidden_size]: the residual stream."""
        return _view(self._buffers.hidden, num_tokens, self._spec.geometry.hidden_size)

    def embed(self, inputs: StepInputs) -> None:
        """Begins the residual stream from the ids."""
        assert self._embedding is not None, "the residual stream begins where the first layer is"
        self._spec.backend.embed(self._embedding, inputs.input_ids, self.hidden(inputs.num_tokens))

    def layers(self, inputs: StepInputs, pool: Pool) -> None:
        """Runs this share's layers."""
        step = _Step(self._spec, self._buffers, self._rotary, inputs, pool)
        by_tokens = None if self._by_tokens is None else self._by_tokens.step(inputs, pool)
        for layer in self._layers:
            step.attend(layer, pool, by_tokens)
            step.feed_forward(layer)

    def logits(self, inputs: StepInputs) -> Tensor:
        """[N, this share's vocabulary rows]."""
        rows = self.hidden(inputs.num_tokens).index_select(0, inputs.sampled_tokens)
        out = rows.new_empty((inputs.num_sampled, len(self._spec.share.vocab)))
        if self._head is not None and self._output_norm is not None:
            self._spec.backend.norm(rows, self._output_norm, self._spec.geometry.norm_epsilon, rows)
            self._spec.backend.linear(rows, self._head, out)
        return out


class _Step:
    """The views of one step, made once for all layers."""

    def __init__(self, spec: StageSpec, buffers: Activations, rotary: Rotary, inputs: StepInputs, pool: Pool) -> None:
        geometry, share, n = spec.geometry, spec.share, inputs.num_tokens
        heads, kv_heads, dim = len(share.heads), len(share.kv_heads), geometry.head_dim
        self.spec, self.backend, self.rotary = spec, spec.backend, rotary
        self.hidden = _view(buffers.hidden, n, geometry.hidden_size)
        self.normed = _view(buffers.normed, n, geometry.hidden_size)
        self.qkv = _view(buffers.qkv, n, (heads + 2 * kv_heads) * dim)
        self.q, self.k, self.v = torch.split(self.qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        self.attended = _view(buffers.attended, n, heads * dim)
        self.q_heads, self.attended_heads = self.q.view(n, heads, dim), self.attended.view(n, heads, dim)
        self.k_heads, self.v_heads = self.k.view(n, kv_heads, dim), self.v.view(n, kv_heads, dim)
        self.gate, self.up = _view(buffers.gate, n, len(share.ffn)), _view(buffers.up, n, len(share.ffn))
        self.planned = None
        if heads and not spec.cut_by_tokens:
            begin = share.kv_heads.begin - pool.first_kv_head
            self.planned = spec.backend.plan(inputs, AttentionShape(heads, kv_heads, begin, dim, dim**-0.5))

    def attend(self, layer: LayerWeights, pool: Pool, by_tokens: TokenStep | None) -> None:
        """Attention and its output projection, summed into the residual stream."""
        weights, keys, values = layer.attention, pool.keys[layer.index], pool.values[layer.index]
        if weights is not None:
            self.backend.norm(self.hidden, layer.attention_norm, self.spec.geometry.norm_epsilon, self.normed)
            self.backend.linear(self.normed, weights.q, self.q)
            self.backend.linear(self.normed, weights.k, self.k)
            self.backend.linear(self.normed, weights.v, self.v)
        if by_tokens is not None:
            by_tokens.attend(self.qkv, keys, values, self.attended_heads)
        elif weights is not None:
            self._attend_by_heads(pool, keys, values)
        self._add(None if weights is None else weights.output, self.attended, Purpose.ATTENTION_OUTPUT)

    def _attend_by_heads(self, pool: Pool, keys: Tensor, values: Tensor) -> None:
        """Every row of this share's heads is here; a head that others have copies of is written to theirs as well."""
        k, v = self.k_heads, self.v_heads
        if pool.copied_kv_heads:
            k, v = (torch.cat((heads, heads[:, pool.copied_kv_heads]), 1) for heads in (k, v))
        assert self.planned is not None, "this share has heads"
        self.backend.rope_and_store(self.planned, self.q_heads, k, v, self.rotary, keys, values)
        self.backend.attend(self.planned, self.q_heads, keys, values, self.attended_heads)

    def feed_forward(self, layer: LayerWeights) -> None:
        """The gated FFN, summed into the residual stream."""
        weights = layer.ffn
        if weights is not None:
            self.backend.norm(self.hidden, layer.ffn_norm, self.spec.geometry.norm_epsilon, self.normed)
            self.backend.linear(self.normed, weights.gate, self.gate)
            self.backend.linear(self.normed, weights.up, self.up)
            self.backend.gate(self.gate, self.up, self.gate, Activation.SILU)
        self._add(None if weights is None else weights.down, self.gate, Purpose.FFN_OUTPUT)

    def _add(self, matrix: Weight | None, x: Tensor, purpose: Purpose) -> None:
        """None: this share has nothing to add."""
        if matrix is not None:
            self.backend.linear(x, matrix, self.hidden, accumulate=self.spec.keeps_residual)
        elif not self.spec.keeps_residual:
            self.hidden.zero_()
        if self.spec.peers is not None:
            self.spec.peers.sum(self.hidden, purpose)


def build(spec: StageSpec, store: Weights) -> LlamaStage:
    """The stage of one share."""
    return LlamaStage(spec, store)
