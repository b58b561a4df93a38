"""Attention over the paged pool of keys and values, for a ragged batch of prompts' chunks and decode rows.

It reads the pool and the worker's resident block table where they lie and never gathers, copies or allocates; it never
writes the pool (`kernels.cpu.elementwise.rope_and_store` does) and never decides which blocks a request owns.

Shapes: T tokens of the batch, S sequences, Hq local query heads, Hkv local KV heads, D head dimension, B blocks of the
pool, P KV heads of the pool, R resident rows, M blocks a row, N parts. Slots past `context_tokens` are never read as
values.

Where the cache is cut by tokens, each rank attends over the blocks it has (`places`), writes its part and the
log-sum-exp of its scores, and `merge_partials` joins the parts of all ranks.

Bound: float32 sums, e^x within 2e-7 relative; against float64, the error of a row of `out` is under
2e-6 + 1e-7 * scale * max |q| * max |k| of its largest value (norms of heads; a score carries its products' rounding,
and the error of a score is the relative error of its weight); merged from parts, twice that and 1e-7 * max |lse|.
Floor: a decode step reads every visible key and value once, at 8 * D bytes a token and KV head; a chunk takes 4 * D
flops a (query head, visible key). One thread: ranks are the parallelism.
"""

import torch
from torch import Tensor

import kernels._native as _native
from kernels.cpu import paths
from kernels.reference import attention as torch_attention

BLOCK_SLOTS = 16
MAX_HEAD_DIM = 256
NOT_HERE = -1
"""The place of a block whose rows another rank has."""


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
    lse_out: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Writes `out[t, h] = softmax(mask(softcap(scale * q[t, h] . K))) V` for every token of the batch.

    `q` and `out` are float32 `[T, Hq, D]` (token stride free, heads contiguous); the pools `[B, P, 16, D]`, contiguous;
    this call touches the pool's heads `[kv_head_begin, kv_head_begin + num_kv_heads)` and Hq = group * num_kv_heads.
    `block_tables` int32 `[R, M]`; `row_of_sequence` int32 `[S]`; `query_start` int32 `[S + 1]`, prefix sums of each
    sequence's queries; `context_tokens` int32 `[S]`, the tokens its last query sees, itself included, already in the
    pool. Query i of n stands at position context - n + i and sees positions up to its own, and only the last `window`
    of them (itself included) where given. `softcap` c bends scores to c * tanh(score / c).

    `lse_out`, float32 `[T, Hq]`, token stride free, takes the natural log of the sum of e^score. `places`, int32
    `[block ids]`, says where each block lies in these pools, `NOT_HERE` for a block of another rank, which is left out;
    a query that sees no block of these pools gets zeros and -inf. It needs `lse_out`.

    Raises ValueError for shapes that do not fit, and for a table row, context, block id or place outside its range,
    before anything is written.
    """
    _check_heads(q_THD, k_pool, v_pool, out_THD, kv_head_begin, num_kv_heads)
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"attention cannot take window {window} and softcap {softcap}: each is absent or above 0")
    _check_batch(block_tables, row_of_sequence, query_start, context_tokens)
    part = _part_arguments(q_THD, lse_out, places)
    if paths.takes_torch(q_THD):
        tables = torch_attention.Tables(block_tables, row_of_sequence, query_start, context_tokens, places)
        heads = slice(kv_head_begin, kv_head_begin + num_kv_heads)
        masking = torch_attention.Masking(scale, window, softcap)
        torch_attention.paged_attention(q_THD, (k_pool, v_pool), heads, tables, masking, out_THD, lse_out)
        return
    num_tokens, num_q_heads, head_dim = q_THD.shape
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
        *k_pool.shape[:2],
        kv_head_begin,
        *block_tables.shape,
        window or 0,
        scale,
        softcap or 0.0,
        *part,
    )


def merge_partials(parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
    """Writes the attention over all keys from its parts over some each: `sum(part * e^lse) / sum(e^lse)`.

    `parts` float32 `[N, T, Hq, D]` and `lse` float32 `[N, T, Hq]` as `paged_attention` writes them, part and token
    strides free; `out` float32 `[T, Hq, D]`, token stride free, apart from the parts. NaN where no part saw a key,
    since every token sees itself: somebody's blocks are missing. Raises ValueError for shapes that do not fit.
    """
    num_parts, num_tokens, num_heads, head_dim = parts_NTHD.shape
    if (
        num_parts < 1
        or head_dim % 8
        or lse_NTH.shape != parts_NTHD.shape[:3]
        or out_THD.shape != parts_NTHD.shape[1:]
        or parts_NTHD.stride()[2:] != (head_dim, 1)
        or out_THD.stride()[1:] != (head_dim, 1)
        or lse_NTH.stride(2) != 1
        or not parts_NTHD.dtype == lse_NTH.dtype == out_THD.dtype == torch.float32
    ):
        raise ValueError(
            f"parts [N, T, Hq, D], lse [N, T, Hq] and out [T, Hq, D] of float32 expected, got parts "
            f"{tuple(parts_NTHD.shape)} strides {parts_NTHD.stride()}, lse {tuple(lse_NTH.shape)} strides "
            f"{lse_NTH.stride()}, out {tuple(out_THD.shape)} strides {out_THD.stride()}: see merge_partials"
        )
    if paths.takes_torch(parts_NTHD):
        torch_attention.merge_partials(parts_NTHD, lse_NTH, out_THD)
        return
    _native.merge_partials(
        parts_NTHD.data_ptr(),
        lse_NTH.data_ptr(),
        out_THD.data_ptr(),
        num_parts,
        num_tokens,
        num_heads,
        head_dim,
        *parts_NTHD.stride()[:2],
        *lse_NTH.stride()[:2],
        out_THD.stride(0),
    )


def merge_partials_reference(parts_NTHD: Tensor, lse_NTH: Tensor) -> Tensor:
    """The same in plain torch on any device: returns `[T, Hq, D]` of the parts' type."""
    weights_NTH = lse_NTH.double().softmax(0).to(parts_NTHD.dtype)
    return (parts_NTHD * weights_NTH[..., None]).sum(0)


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


def _part_arguments(q_THD: Tensor, lse_out: Tensor | None, places: Tensor | None) -> tuple[int, int, int, int]:
    """Address and token stride of the log-sum-exps, address and length of the places; 0 for what is not given."""
    if lse_out is not None and (
        lse_out.shape != q_THD.shape[:2] or lse_out.stride(1) != 1 or lse_out.dtype != torch.float32
    ):
        raise ValueError(
            f"lse_out float32 {tuple(q_THD.shape[:2])} with inner stride 1 expected, got {lse_out.dtype} "
            f"{tuple(lse_out.shape)} strides {lse_out.stride()}"
        )
    if places is not None and (
        lse_out is None or places.dtype != torch.int32 or not places.is_contiguous() or not places.numel()
    ):
        raise ValueError(
            f"places int32 of at least one block, contiguous, and lse_out expected, got {places.dtype} "
            f"{tuple(places.shape)} strides {places.stride()} and "
            f"{'no lse_out: parts cannot be merged without' if lse_out is None else 'lse_out'}"
        )
    lse = (0, 0) if lse_out is None else (lse_out.data_ptr(), lse_out.stride(0))
    return (*lse, 0, 0) if places is None else (*lse, places.data_ptr(), places.numel())


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
    return paged_attention_and_lse_reference(
        q_THD,
        k_pool,
        v_pool,
        block_tables,
        row_of_sequence,
        query_start,
        context_tokens,
        kv_head_begin=kv_head_begin,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
        softcap=softcap,
    )[0]


def paged_attention_and_lse_reference(
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
) -> tuple[Tensor, Tensor]:
    """As `paged_attention_reference`, and the log-sum-exps `[T, Hq]` float64."""
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float64)
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
        scores_HTC = scores_HTC.masked_fill(hidden_TC, -torch.inf)
        out_THD[begin:end] = (scores_HTC.softmax(-1) @ v_HCD).transpose(0, 1)
        lse_TH[begin:end] = scores_HTC.logsumexp(-1).T
    return out_THD, lse_TH
