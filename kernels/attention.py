"""Attention over the paged pool of keys and values, for a ragged batch of prompts' chunks and decode rows.

It reads the pool and the worker's resident block table where they lie and never gathers, copies or allocates; it never
writes the pool (`kernels.elementwise.rope_and_store` does) and never decides which blocks a request owns.

Shapes: T tokens of the batch, S sequences, Hq local query heads, Hkv local KV heads, D head dimension, B blocks of the
pool, P KV heads of the pool, R resident rows, M blocks a row. Slots past `context_tokens` are never read as values.

Bound: float32 sums, e^x within 2e-7 relative; against float64, the error of a row of `out` is under
2e-6 + 1e-7 * scale * max |q| * max |k| of its largest value (norms of heads; a score carries its products' rounding,
and the error of a score is the relative error of its weight). Floor: a decode step reads every visible key and value
once, at 8 * D bytes a token and KV head; a chunk takes 4 * D flops a (query head, visible key). One thread: ranks are
the parallelism.
"""

import torch
from torch import Tensor

import kernels._native as _native

BLOCK_SLOTS = 16
MAX_HEAD_DIM = 256


def paged_attention(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    row_of_sequence: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    out_THD: Tensor,
    *,
    kv_head_begin: int,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Writes `out[t, h] = softmax(mask(softcap(scale * q[t, h] . K))) V` for every token of the batch.

    `q` and `out` are float32 `[T, Hq, D]` (token stride free, heads contiguous); the pools `[B, P, 16, D]`, contiguous;
    this call touches the pool's heads `[kv_head_begin, kv_head_begin + num_kv_heads)` and Hq = group * num_kv_heads.
    `block_tables` int32 `[R, M]`; `row_of_sequence` int32 `[S]`; `query_start` int32 `[S + 1]`, prefix sums of each
    sequence's queries; `context_tokens` int32 `[S]`, the tokens its last query sees, itself included, already in the
    pool. Query i of n stands at position context - n + i and sees positions up to its own, and only the last `window`
    of them (itself included) where given. `softcap` c bends scores to c * tanh(score / c). Raises ValueError for shapes
    that do not fit, and for a table row, context or block id outside its range, before anything is written.
    """
    _check_heads(q_THD, k_pool, v_pool, out_THD, kv_head_begin, num_kv_heads)
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"attention cannot take window {window} and softcap {softcap}: each is absent or above 0")
    _check_batch(block_tables, row_of_sequence, query_start, context_tokens)
    num_tokens, num_q_heads, head_dim = q_THD.shape
    num_blocks, num_pool_heads = k_pool.shape[:2]
    num_table_rows, table_stride = block_tables.shape
    _native.paged_attention(
        q_THD.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        block_tables.data_ptr(),
        row_of_sequence.data_ptr(),
        query_start.data_ptr(),
        context_tokens.data_ptr(),
        out_THD.data_ptr(),
        row_of_sequence.numel(),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        q_THD.stride(0),
        out_THD.stride(0),
        num_blocks,
        num_pool_heads,
        kv_head_begin,
        num_table_rows,
        table_stride,
        window or 0,
        scale,
        softcap or 0.0,
    )


def _check_heads(
    q_THD: Tensor, k_pool: Tensor, v_pool: Tensor, out_THD: Tensor, kv_head_begin: int, num_kv_heads: int
) -> None:
    num_q_heads, head_dim = q_THD.shape[1:]
    num_pool_heads, block_slots, pool_dim = k_pool.shape[1:]
    if (
        block_slots != BLOCK_SLOTS
        or pool_dim != head_dim
        or v_pool.shape != k_pool.shape
        or not (k_pool.is_contiguous() and v_pool.is_contiguous())
        or out_THD.shape != q_THD.shape
        or head_dim % 8
        or head_dim > MAX_HEAD_DIM
        or num_kv_heads < 1
        or num_q_heads % num_kv_heads
        or not 0 <= kv_head_begin <= num_pool_heads - num_kv_heads
        or q_THD.stride()[1:] != (head_dim, 1)
        or out_THD.stride()[1:] != (head_dim, 1)
    ):
        raise ValueError(
            f"attention cannot take q {tuple(q_THD.shape)} strides {q_THD.stride()}, out strides {out_THD.stride()}, "
            f"pool {tuple(k_pool.shape)}, {num_kv_heads} KV heads from {kv_head_begin}: see paged_attention"
        )


def _check_batch(block_tables: Tensor, row_of_sequence: Tensor, query_start: Tensor, context_tokens: Tensor) -> None:
    num_sequences = row_of_sequence.numel()
    if (
        query_start.numel() != num_sequences + 1
        or context_tokens.numel() != num_sequences
        or not block_tables.is_contiguous()
        or not block_tables.dtype == row_of_sequence.dtype == query_start.dtype == context_tokens.dtype == torch.int32
    ):
        raise ValueError(
            f"{num_sequences} sequences as int32 expected, got query_start of {query_start.numel()} (one more than "
            f"sequences), context_tokens of {context_tokens.numel()}, tables {block_tables.dtype}: pass one batch"
        )


def paged_attention_reference(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    row_of_sequence: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    *,
    kv_head_begin: int,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same in plain torch and float64, with a gather: returns `[T, Hq, D]` float64."""
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64)
    group = q_THD.shape[1] // num_kv_heads
    heads = slice(kv_head_begin, kv_head_begin + num_kv_heads)
    for sequence, row in enumerate(row_of_sequence.tolist()):
        begin, end = query_start[sequence].item(), query_start[sequence + 1].item()
        context = int(context_tokens[sequence].item())
        blocks = block_tables[row, : -(-context // BLOCK_SLOTS)].long()
        # [blocks, Hkv, 16, D] -> [Hq, context, D]
        k_HCD, v_HCD = (
            pool[blocks][:, heads].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
            for pool in (k_pool, v_pool)
        )
        scores_HTC = q_THD[begin:end].double().transpose(0, 1) @ k_HCD.transpose(1, 2) * scale
        if softcap is not None:
            scores_HTC = softcap * torch.tanh(scores_HTC / softcap)
        position_T = torch.arange(context - (end - begin), context)[:, None]
        key_C = torch.arange(context)[None, :]
        hidden_TC = key_C > position_T
        if window is not None:
            hidden_TC = hidden_TC | (key_C <= position_T - window)
        weights_HTC = scores_HTC.masked_fill(hidden_TC, -torch.inf).softmax(-1)
        out_THD[begin:end] = (weights_HTC @ v_HCD).transpose(0, 1)
    return out_THD
