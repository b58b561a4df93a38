"""Attention over the paged pool, sequence by sequence with a gather of what its queries see; see kernels.cpu.attention.

A sequence takes, for a moment, its visible keys and values once for every query head, and its scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.ids import BLOCK_SLOTS


@dataclass(frozen=True, slots=True)
class Tables:
    """Of a batch: who its queries belong to and where their rows are; see kernels.cpu.attention.paged_attention."""

    blocks: Tensor
    row_of_sequence: Tensor
    query_start: Tensor
    context_tokens: Tensor
    places: Tensor | None


@dataclass(frozen=True, slots=True)
class Masking:
    """What bends or hides scores."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence's queries [begin, end) of the batch, and the positions [oldest, context) that any of them sees."""

    index: int
    row: int
    begin: int
    end: int
    oldest: int
    context: int


def paged_attention(
    q_THD: Tensor,
    pools: tuple[Tensor, Tensor],
    heads: slice,
    tables: Tables,
    masking: Masking,
    out_THD: Tensor,
    lse_out: Tensor | None,
) -> None:
    """Writes outputs, and log-sum-exps where wanted; raises ValueError before anything is written."""
    sequences = _sequences(len(q_THD), tables, masking.window)
    found = [_slots(sequence, tables, len(pools[0])) for sequence in sequences]
    for sequence, (position_C, slot_C) in zip(sequences, found, strict=True):
        queries = slice(sequence.begin, sequence.end)
        keys_HCD, values_HCD = (_gathered(pool, heads, slot_C, q_THD.shape[1]) for pool in pools)
        scores_HTC = _scores(q_THD[queries], keys_HCD, sequence, position_C, masking)
        lse_HT = scores_HTC.logsumexp(-1)
        weights_HTC = (scores_HTC - lse_HT[..., None]).exp()
        # A query that sees nothing here has -inf - -inf: no weight, not NaN.
        weights_HTC = torch.where(lse_HT[..., None] == -torch.inf, 0.0, weights_HTC)
        out_THD[queries] = (weights_HTC @ values_HCD).transpose(0, 1).to(out_THD.dtype)
        if lse_out is not None:
            lse_out[queries] = lse_HT.T.to(lse_out.dtype)


def merge_partials(parts_NTHD: Tensor, lse_NTH: Tensor, out_THD: Tensor) -> None:
    """Writes the attention over all keys from its parts; NaN where no part saw a key."""
    weights_NTH = lse_NTH.double().softmax(0)
    out_THD.copy_((parts_NTHD.double() * weights_NTH[..., None]).sum(0))


def _sequences(num_tokens: int, tables: Tables, window: int | None) -> list[_Sequence]:
    starts, rows = tables.query_start.tolist(), tables.row_of_sequence.tolist()
    contexts = tables.context_tokens.tolist()
    num_rows, table_tokens = tables.blocks.shape[0], tables.blocks.shape[1] * BLOCK_SLOTS
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(f"query_start runs from {starts[0]} to {starts[-1]}, but q has {num_tokens} tokens")
    found = []
    for index, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        begin, end = starts[index], starts[index + 1]
        if not 0 <= row < num_rows:
            raise ValueError(f"sequence {index}: table row {row} outside the {num_rows} resident rows")
        if not 0 <= begin <= end <= num_tokens:
            raise ValueError(f"sequence {index}: queries [{begin}, {end}) outside the {num_tokens} of the batch")
        if not end - begin <= context <= table_tokens:
            raise ValueError(
                f"sequence {index}: context of {context} tokens, but {end - begin} queries and a table for "
                f"{table_tokens} tokens"
            )
        oldest = 0 if window is None else max(0, context - (end - begin) + 1 - window)
        found.append(_Sequence(index, row, begin, end, oldest, context))
    return found


def _slots(sequence: _Sequence, tables: Tables, num_pool_blocks: int) -> tuple[Tensor, Tensor]:
    """Visible positions whose rows are in these pools, and their slots there; int64 [C]."""
    first, last = sequence.oldest // BLOCK_SLOTS, -(-sequence.context // BLOCK_SLOTS)
    blocks, places = tables.blocks[sequence.row, first:last].long(), tables.places
    num_ids, where = (num_pool_blocks, "pool") if places is None else (places.numel(), "table of places")
    for place in ((blocks < 0) | (blocks >= num_ids)).nonzero().flatten()[:1].tolist():
        raise ValueError(
            f"sequence {sequence.index}: block {int(blocks[place])} at place {first + place} of table row "
            f"{sequence.row} outside the {num_ids} of the {where}"
        )
    if places is not None:
        ids, blocks = blocks, places[blocks].long()
        for place in (blocks >= num_pool_blocks).nonzero().flatten()[:1].tolist():
            raise ValueError(
                f"sequence {sequence.index}: block {int(ids[place])} has place {int(blocks[place])}, outside the "
                f"pool's {num_pool_blocks} blocks"
            )
    position_C = torch.arange(sequence.oldest, sequence.context, device=blocks.device)
    block_C = blocks[position_C // BLOCK_SLOTS - first]
    slot_C = block_C * BLOCK_SLOTS + position_C % BLOCK_SLOTS
    is_here = block_C >= 0
    return position_C[is_here], slot_C[is_here]


def _gathered(pool: Tensor, heads: slice, slot_C: Tensor, num_q_heads: int) -> Tensor:
    """[Hq, C, D] float64 of the pool's rows."""
    rows_CHD = pool[slot_C // BLOCK_SLOTS, heads, slot_C % BLOCK_SLOTS]
    return rows_CHD.double().transpose(0, 1).repeat_interleave(num_q_heads // rows_CHD.shape[1], 0)


def _scores(q_THD: Tensor, keys_HCD: Tensor, sequence: _Sequence, position_C: Tensor, masking: Masking) -> Tensor:
    """[Hq, T, C] float64, -inf where a query does not see a position."""
    scores_HTC = q_THD.double().transpose(0, 1) @ keys_HCD.transpose(1, 2) * masking.scale
    if masking.softcap is not None:
        scores_HTC = masking.softcap * torch.tanh(scores_HTC / masking.softcap)
    position_T = torch.arange(sequence.context - len(q_THD), sequence.context, device=q_THD.device)[:, None]
    hidden_TC = position_C > position_T
    if masking.window is not None:
        hidden_TC = hidden_TC | (position_C <= position_T - masking.window)
    return scores_HTC.masked_fill(hidden_TC, -torch.inf)
