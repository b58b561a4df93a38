"""Stored weights as float32, in plain torch and independent of C: bit for bit what ggml's own reference makes of them.

Every product of a scale and a quant is exact in float32, so that only the addition of a minimum rounds, and once.

Shapes: N rows, B blocks of a row, K columns; bytes are the last axis.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.weights import Matrix, Weight, pieces_of
from services.models.ggml_types import GgmlType, block_bytes


def dequantised(weight: Weight) -> Tensor:
    """[num_rows, num_columns] float32 where the weight lies: a view of float32 in one piece, else a copy."""
    pieces = pieces_of(weight)
    if len(pieces) == 1:
        return _whole(pieces[0].matrix)
    device = pieces[0].matrix.stored_rows().device if pieces else None
    out_NK = torch.empty((weight.num_rows, weight.num_columns), device=device)
    for piece in pieces:
        matrix, row, column = piece.matrix, piece.first_row, piece.first_column
        out_NK[row : row + matrix.num_rows, column : column + matrix.num_columns] = _whole(matrix)
    return out_NK


def dequantised_rows(matrix: Matrix, ids_T: Tensor) -> Tensor:
    """[T, num_columns] float32: these rows of a matrix, no other is read."""
    return _numbers(matrix, matrix.stored_rows().index_select(0, ids_T.long()))


def _whole(matrix: Matrix) -> Tensor:
    return _numbers(matrix, matrix.stored_rows())


def _numbers(matrix: Matrix, stored: Tensor) -> Tensor:
    if matrix.ggml_type in _PLAIN:
        return stored.view(_PLAIN[matrix.ggml_type]).float()
    if not stored.numel():
        return torch.zeros((len(stored), matrix.num_columns), device=stored.device)
    blocks = stored.reshape(len(stored), -1, block_bytes(matrix.ggml_type))
    return _BLOCKS[matrix.ggml_type](blocks).reshape(len(stored), matrix.num_columns)


def _half(two_bytes: Tensor) -> Tensor:
    """[..., 1] float32 of the float16 in [..., 2]."""
    return two_bytes.contiguous().view(torch.float16).float()


def _fields(some_bytes: Tensor, bits: int) -> Tensor:
    """[..., 8 / bits, n] of [..., n] bytes: the lowest bits of all bytes first, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=some_bytes.device)[:, None]
    fields: Tensor = (some_bytes[..., None, :] >> shifts) & (2**bits - 1)
    return fields


def _signed(some_bytes: Tensor) -> Tensor:
    return some_bytes.contiguous().view(torch.int8).float()


def _scaled(quants: Tensor, scales: Tensor, minimums: Tensor | None = None) -> Tensor:
    """scale * quant - minimum; [..., groups] of each for quants of any shape in order."""
    grouped = quants.float().reshape(*scales.shape, -1) * scales[..., None]
    return grouped if minimums is None else grouped - minimums[..., None]


def _fifth_bits(some_bytes: Tensor) -> Tensor:
    """[..., 32] of 4 bytes: bit i is quant i's."""
    return _fields(some_bytes, 1).transpose(-1, -2).flatten(-2)


def _q4_0(b: Tensor) -> Tensor:
    return _scaled(_fields(b[..., 2:], 4).flatten(-2).float() - 8, _half(b[..., :2]))


def _q4_1(b: Tensor) -> Tensor:
    return _scaled(_fields(b[..., 4:], 4), _half(b[..., :2]), -_half(b[..., 2:4]))


def _q5_0(b: Tensor) -> Tensor:
    quants = _fields(b[..., 6:], 4).flatten(-2).float() + 16 * _fifth_bits(b[..., 2:6])
    return _scaled(quants - 16, _half(b[..., :2]))


def _q5_1(b: Tensor) -> Tensor:
    quants = _fields(b[..., 8:], 4).flatten(-2).float() + 16 * _fifth_bits(b[..., 4:8])
    return _scaled(quants, _half(b[..., :2]), -_half(b[..., 2:4]))


def _q8_0(b: Tensor) -> Tensor:
    return _scaled(_signed(b[..., 2:]), _half(b[..., :2]))


def _parts(some_bytes: Tensor, num: int) -> Tensor:
    """[..., num, n / num] of n bytes side by side."""
    return some_bytes.reshape(*some_bytes.shape[:-1], num, -1)


def _q2_k(b: Tensor) -> Tensor:
    quants = _fields(_parts(b[..., 16:80], 2), 2)
    return _scaled(quants, _half(b[..., 80:82]) * (b[..., :16] & 15), _half(b[..., 82:84]) * (b[..., :16] >> 4))


def _q3_k(b: Tensor) -> Tensor:
    quants = _fields(_parts(b[..., 32:96], 2), 2).flatten(-3).float() + 4 * _fields(b[..., :32], 1).flatten(-2)
    scales = _fields(b[..., 96:104], 4).flatten(-2).float() + 16 * _fields(b[..., 104:108], 2).flatten(-2)
    return _scaled(quants - 4, _half(b[..., 108:110]) * (scales - 32))


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K, [..., 8] each: four are low bits, four are nibbles and spare high bits."""
    first, second, third = _parts(b, 3).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, minimums


def _q4_k(b: Tensor) -> Tensor:
    scales, minimums = _six_bits(b[..., 4:16])
    quants = _fields(_parts(b[..., 16:], 4), 4)
    return _scaled(quants, _half(b[..., :2]) * scales, _half(b[..., 2:4]) * minimums)


def _q5_k(b: Tensor) -> Tensor:
    scales, minimums = _six_bits(b[..., 4:16])
    quants = _fields(_parts(b[..., 48:], 4), 4).flatten(-3) + 16 * _fields(b[..., 16:48], 1).flatten(-2)
    return _scaled(quants, _half(b[..., :2]) * scales, _half(b[..., 2:4]) * minimums)


def _q6_k(b: Tensor) -> Tensor:
    low = _fields(_parts(b[..., :128], 2), 4).flatten(-3)
    quants = low.float() + 16 * _fields(_parts(b[..., 128:192], 2), 2).flatten(-3)
    return _scaled(quants - 32, _half(b[..., 208:]) * _signed(b[..., 192:208]))


_PLAIN = MappingProxyType(
    {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16},
)
_BLOCKS: MappingProxyType[GgmlType, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        GgmlType.Q4_0: _q4_0,
        GgmlType.Q4_1: _q4_1,
        GgmlType.Q5_0: _q5_0,
        GgmlType.Q5_1: _q5_1,
        GgmlType.Q8_0: _q8_0,
        GgmlType.Q2_K: _q2_k,
        GgmlType.Q3_K: _q3_k,
        GgmlType.Q4_K: _q4_k,
        GgmlType.Q5_K: _q5_k,
        GgmlType.Q6_K: _q6_k,
    }
)
