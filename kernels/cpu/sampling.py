"""Sampling from logits, log-probabilities and penalties: one pass over the vocabulary where one suffices, never a sort
of it.

What is drawn depends on a row's logits and parameters, its seed and its output position, and on nothing else: not on
the batch, the rank, the order of calls or the instruction set. It keeps no state and never decides when a request ends.

A row's order is by logit, then the lower id first. The filters each keep a prefix of that order, and the shortest
counts:
- `top_k` keeps k ids (0 keeps all);
- `top_p` keeps the fewest whose probability, after temperature and among what top_k kept, reaches top_p (1 keeps all);
- `min_p` keeps ids at least min_p times as probable, after temperature, as the most probable (0 keeps all).
Of what is left one is drawn by its weight: the first in order of id whose running sum passes u times the total, where u
has 53 bits of the first two words of Philox 4x32-10 with key = seed and counter = (position, 0): low words first.
A temperature below 1e-5 takes the largest logit, the lowest id of equal ones.

Rows are float32 with inner stride 1 and may be apart; ids from `num_valid` on (a padded vocabulary) do not exist for
any function here. Bounds: weights 3e-7 relative; log-probabilities 2e-6 absolute plus rounding of the logit.
"""

import math

import torch
from torch import Tensor

import kernels._native as _native

MIN_TEMPERATURE = 1e-5


def _extent(logits_RV: Tensor, num_valid: int | None) -> tuple[int, int, int]:
    """Row stride, rows and ids of a `[rows, vocabulary]` tensor."""
    num_rows, num_columns = logits_RV.shape
    row_stride, column_stride = logits_RV.stride()
    num_ids = num_columns if num_valid is None else num_valid
    if column_stride != 1 or not 0 < num_ids <= num_columns:
        raise ValueError(
            f"logits of inner stride 1 and 1 to {num_columns} valid ids expected, got strides {logits_RV.stride()}, "
            f"{num_ids} valid ids"
        )
    return row_stride, num_rows, num_ids


def sample(
    logits_RV: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    out_ids: Tensor,
    out_finite: Tensor,
    *,
    num_valid: int | None = None,
) -> None:
    """Draws one id a row: `out_ids` int32 `[R]`, `out_finite` bool `[R]`.

    `temperature`, `top_p`, `min_p` are float32 `[R]`, `top_k` int32 `[R]`, `seed` uint64 (or int64 of the same bits)
    and `position` int64 `[R]`. A row with NaN or +inf among its valid logits, or nothing above -inf, gets id 0 and a
    false `out_finite`; other rows are unaffected. Raises ValueError for parameters outside their range, before anything
    is drawn.
    """
    row_stride, num_rows, num_ids = _extent(logits_RV, num_valid)
    for each in (temperature, top_k, top_p, min_p, seed, position, out_ids, out_finite):
        if each.numel() != num_rows:
            raise ValueError(f"{num_rows} rows of logits, but a parameter or output of {each.numel()}")
    if not (top_k.dtype == out_ids.dtype == torch.int32 and position.dtype == torch.int64 and seed.element_size() == 8):
        raise ValueError(
            f"top_k {top_k.dtype}, position {position.dtype}, seed {seed.dtype}: see sample for their types"
        )
    _native.sample(
        logits_RV.data_ptr(),
        row_stride,
        num_rows,
        num_ids,
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        seed.data_ptr(),
        position.data_ptr(),
        out_ids.data_ptr(),
        out_finite.data_ptr(),
    )


def log_softmax_at(logits_RV: Tensor, ids_RN: Tensor, out_RN: Tensor, *, num_valid: int | None = None) -> None:
    """Log-probabilities, as the model gives them, of ids int32 `[R, N]` into float32 `[R, N]`, both contiguous.

    A row that is not finite (see `sample`) gets NaN. Raises ValueError for an id outside the valid ones.
    """
    row_stride, num_rows, num_ids = _extent(logits_RV, num_valid)
    if ids_RN.shape != out_RN.shape or ids_RN.shape[0] != num_rows:
        raise ValueError(
            f"{num_rows} rows of logits, ids {tuple(ids_RN.shape)}, out {tuple(out_RN.shape)}: shapes differ"
        )
    _native.log_softmax_at(
        logits_RV.data_ptr(), row_stride, num_rows, num_ids, ids_RN.data_ptr(), ids_RN.shape[1], out_RN.data_ptr()
    )


def top_logprobs(
    logits_RV: Tensor, num_top: int, out_ids_RN: Tensor, out_logprobs_RN: Tensor, *, num_valid: int | None = None
) -> None:
    """The num_top (at most 256) most probable ids of each row, in order, with their log-probabilities as the model
    gives them.

    `out_ids` int32 and `out_logprobs` float32 are `[R, num_top]`, contiguous. A row that is not finite gets id 0 and
    NaN; where fewer ids are above -inf, the rest is id 0 and -inf. Raises ValueError where num_top is out of range.
    """
    row_stride, num_rows, num_ids = _extent(logits_RV, num_valid)
    if not out_ids_RN.shape == out_logprobs_RN.shape == (num_rows, num_top):
        raise ValueError(f"outputs of {(num_rows, num_top)} expected, got {tuple(out_ids_RN.shape)}")
    _native.top_logprobs(
        logits_RV.data_ptr(),
        row_stride,
        num_rows,
        num_ids,
        num_top,
        out_ids_RN.data_ptr(),
        out_logprobs_RN.data_ptr(),
    )


def penalize(
    logits_RV: Tensor,
    row: int,
    token_ids: Tensor,
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    num_valid: int | None = None,
) -> None:
    """Penalises, in place in one row, the ids of a history int32 `[n]` (repeats included).

    Each distinct id: a positive logit is divided by `repetition`, another multiplied; then `presence` is subtracted,
    and `frequency` once for each time it occurs. A caller whose repetition penalty covers more tokens than the others
    (prompt and output, against output) calls twice, repetition first. Raises ValueError for an id outside the valid
    ones.
    """
    row_stride, num_rows, num_ids = _extent(logits_RV, num_valid)
    if not 0 <= row < num_rows or repetition <= 0:
        raise ValueError(f"row {row} of {num_rows}, repetition penalty {repetition}: in range and positive expected")
    _native.penalize(
        logits_RV.data_ptr() + row * row_stride * 4,
        num_ids,
        token_ids.data_ptr(),
        token_ids.numel(),
        presence,
        frequency,
        repetition,
    )


def add_sparse(logits_RV: Tensor, rows: Tensor, ids: Tensor, values: Tensor, *, num_valid: int | None = None) -> None:
    """logits[rows[i], ids[i]] += values[i], in place: biases of a batch as int32, int32 and float32 `[n]`.

    Raises ValueError for a row or id out of range, before anything is added.
    """
    row_stride, num_rows, num_ids = _extent(logits_RV, num_valid)
    if not rows.numel() == ids.numel() == values.numel():
        raise ValueError(f"{rows.numel()} rows, {ids.numel()} ids and {values.numel()} values: one of each expected")
    _native.add_sparse(
        logits_RV.data_ptr(),
        row_stride,
        num_rows,
        num_ids,
        rows.data_ptr(),
        ids.data_ptr(),
        values.data_ptr(),
        values.numel(),
    )


def uniform_reference(seed: int, position: int) -> float:
    """The number in [0, 1) that a (seed, output position) draws with: Philox 4x32-10 in plain integers."""
    low = 0xFFFFFFFF
    words = [position & low, position >> 32 & low, 0, 0]
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ keys[0], b & low, a >> 32 ^ words[3] ^ keys[1], a & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def kept_reference(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities `[V]`, float64, of what the filters leave of one row, by sorting it."""
    order = torch.sort(logits_V.double(), descending=True, stable=True).indices
    weights = torch.exp((logits_V[order].double() - logits_V.max().double()) / temperature)
    num = len(order) if top_k == 0 else min(top_k, len(order))
    if top_p < 1:
        before = weights[:num].cumsum(0) - weights[:num]
        num = int((before < top_p * weights[:num].sum()).sum())
    num = min(num, int((weights >= min_p).sum()))
    kept = torch.zeros_like(weights)
    kept[order[:num]] = weights[:num]
    return kept / kept.sum()


def sample_reference(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int | None:
    """One row's draw in float64 by sorting; None where the row is not finite."""
    if not bool((logits_V < math.inf).all()) or bool((logits_V == -math.inf).all()):
        return None
    if temperature < MIN_TEMPERATURE:
        return int(logits_V.argmax())
    running = kept_reference(logits_V, temperature, top_k, top_p, min_p).cumsum(0)
    return int(torch.searchsorted(running, uniform_reference(seed, position) * running[-1], right=True))


def penalize_reference(
    logits_V: Tensor, token_ids: list[int], *, presence: float, frequency: float, repetition: float
) -> Tensor:
    """One row's penalties in float64, returned."""
    row = logits_V.double()
    for token_id in set(token_ids):
        value = row[token_id]
        value = value / repetition if value > 0 else value * repetition
        row[token_id] = value - presence - frequency * token_ids.count(token_id)
    return row
