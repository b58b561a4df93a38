"""What every backend refuses of a step's attention: shapes, types and strides, which no device need be asked for.

Shapes: T tokens of the step, Hq and Hkv heads of this share, D head dimension, B blocks and P KV heads of a pool.
"""

import torch
from torch import Tensor

from kernels.backend import AttentionShape, Rotary, StepInputs
from services.core.ids import BLOCK_SLOTS

MAX_HEAD_DIM = 256


def check_shape(shape: AttentionShape) -> None:
    """ValueError for heads, a head dimension, a window or a soft cap that nothing computes."""
    if (
        shape.head_dim % 8
        or not 0 < shape.head_dim <= MAX_HEAD_DIM
        or shape.num_kv_heads < 1
        or shape.num_heads % shape.num_kv_heads
        or shape.kv_head_begin < 0
        or (shape.window is not None and shape.window < 1)
        or (shape.soft_cap is not None and not shape.soft_cap > 0)
    ):
        raise ValueError(
            f"attention cannot take {shape}: query heads in whole groups of KV heads, a head dimension that is a "
            f"multiple of 8 and at most {MAX_HEAD_DIM}, and a window and soft cap that are absent or above 0 expected"
        )


def check_inputs(inputs: StepInputs, places: Tensor | None) -> None:
    """ValueError for tables that are not int32, contiguous and of one step."""
    num_tokens, num_sequences = inputs.num_tokens, inputs.row_of_sequence.numel()
    counts = {
        "positions": num_tokens,
        "slots": num_tokens,
        "query_start": num_sequences + 1,
        "context_tokens": num_sequences,
        "row_of_sequence": num_sequences,
        "block_tables": inputs.block_tables.numel(),
    }
    for name, count in counts.items():
        tensor: Tensor = getattr(inputs, name)
        if tensor.numel() != count or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} of {count} int32, contiguous, expected for {num_tokens} tokens of {num_sequences} sequences, "
                f"got {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
            )
    if places is not None and (places.dtype != torch.int32 or not places.is_contiguous() or not places.numel()):
        raise ValueError(
            f"places int32 of at least one block, contiguous, expected, got {places.dtype} {tuple(places.shape)} "
            f"strides {places.stride()}"
        )


def check_planes(shape: AttentionShape, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
    """ValueError for planes that have not these heads: [B, P, 16, D] of this type, contiguous."""
    pool = keys.shape
    if (
        values.shape != pool
        or len(pool) != 4
        or pool[2] != BLOCK_SLOTS
        or pool[3] != shape.head_dim
        or pool[1] < shape.kv_head_begin + shape.num_kv_heads
        or not keys.dtype == values.dtype == dtype
        or not (keys.is_contiguous() and values.is_contiguous())
    ):
        raise ValueError(
            f"planes {dtype} [blocks, heads, {BLOCK_SLOTS}, {shape.head_dim}], contiguous, with KV heads "
            f"[{shape.kv_head_begin}, {shape.kv_head_begin + shape.num_kv_heads}) expected, got {keys.dtype} "
            f"{tuple(pool)} and {values.dtype} {tuple(values.shape)}"
        )


def check_rotation(
    inputs: StepInputs,
    shape: AttentionShape,
    qkv_THD: tuple[Tensor, Tensor, Tensor],
    rotary: Rotary,
    dtype: torch.dtype,
) -> None:
    """ValueError for queries, keys and values that do not fit the step; there may be more KV heads than the shape's."""
    (q_THD, k_THD, v_THD), num_tokens, table = qkv_THD, inputs.num_tokens, rotary.table
    dim = shape.head_dim
    if (
        q_THD.shape != (num_tokens, shape.num_heads, dim)
        or k_THD.shape != (num_tokens, k_THD.shape[1], dim)
        or v_THD.shape != k_THD.shape
        or not _has_whole_heads(q_THD, k_THD, v_THD)
        or not q_THD.dtype == k_THD.dtype == v_THD.dtype == dtype
        or table.dtype != torch.float32
        or not table.is_contiguous()
        or table.shape[1] > dim
        or table.shape[1] % 2
    ):
        raise ValueError(
            f"rope cannot take q {tuple(q_THD.shape)} {q_THD.stride()}, k {tuple(k_THD.shape)} {k_THD.stride()}, v "
            f"{tuple(v_THD.shape)} {v_THD.stride()}, table {tuple(table.shape)} in a step of {num_tokens} tokens and "
            f"{shape}: {dtype}, heads contiguous, expected"
        )


def check_attended(
    inputs: StepInputs,
    shape: AttentionShape,
    tensors_THD: tuple[Tensor, Tensor],
    lse_TH: Tensor | None,
    *,
    is_part: bool,
    dtype: torch.dtype,
) -> None:
    """ValueError for queries, outputs and log-sum-exps, float32, that do not fit; `is_part`: blocks are elsewhere."""
    (q_THD, out_THD), expected = tensors_THD, (inputs.num_tokens, shape.num_heads, shape.head_dim)
    if (
        q_THD.shape != expected
        or out_THD.shape != expected
        or not _has_whole_heads(q_THD, out_THD)
        or not q_THD.dtype == out_THD.dtype == dtype
    ):
        raise ValueError(
            f"attention cannot take q {q_THD.dtype} {tuple(q_THD.shape)} {q_THD.stride()} and out {out_THD.dtype} "
            f"{tuple(out_THD.shape)} {out_THD.stride()}: {dtype} {expected}, heads contiguous, expected"
        )
    if lse_TH is None and is_part:
        raise ValueError("attention over a part of the blocks without its log-sum-exps: parts cannot be merged without")
    if lse_TH is not None and (lse_TH.shape != expected[:2] or lse_TH.stride(1) != 1 or lse_TH.dtype != torch.float32):
        raise ValueError(
            f"log-sum-exps float32 {expected[:2]} with inner stride 1 expected, got {lse_TH.dtype} "
            f"{tuple(lse_TH.shape)} strides {lse_TH.stride()}"
        )


def _has_whole_heads(*tensors: Tensor) -> bool:
    return all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in tensors)


def check_parts(parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
    """ValueError for parts, their float32 log-sum-exps and an output that are not of one attention."""
    num_parts, _, _, head_dim = parts_NTHD.shape
    if (
        num_parts < 1
        or head_dim % 8
        or lse_NTH.shape != parts_NTHD.shape[:3]
        or out_THD.shape != parts_NTHD.shape[1:]
        or parts_NTHD.stride()[2:] != (head_dim, 1)
        or out_THD.stride()[1:] != (head_dim, 1)
        or lse_NTH.stride(2) != 1
        or not lse_NTH.dtype == torch.float32
        or parts_NTHD.dtype != out_THD.dtype
    ):
        raise ValueError(
            f"parts [N, T, Hq, D], lse [N, T, Hq] and out [T, Hq, D] of one type expected, got parts "
            f"{tuple(parts_NTHD.shape)} strides {parts_NTHD.stride()}, lse {tuple(lse_NTH.shape)} strides "
            f"{lse_NTH.stride()}, out {tuple(out_THD.shape)} strides {out_THD.stride()}: heads contiguous expected"
        )
