"""Weights of every stored type for tests: random blocks with finite scales, and what the gguf package makes of them."""

from itertools import pairwise

import gguf
import numpy as np
import torch

from kernels.weights import Matrix, PiecedMatrix, PlacedMatrix
from services.models.ggml_types import GgmlType, block_bytes, block_length

# Where a block keeps its float16 numbers: random bytes there would make infinities.
HALVES = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}


def random_bytes(kind: GgmlType, num_rows: int, num_columns: int, seed: int) -> np.ndarray:
    """[rows, bytes] of random blocks with finite scales of both signs, zeros and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    if block_length(kind) == 1:
        values = torch.from_numpy(rng.standard_normal((num_rows, num_columns)).astype(np.float32))
        dtype = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, (num_rows, num_columns // block_length(kind), block_bytes(kind)), dtype=np.uint8)
    for place in HALVES[kind]:
        halves = (rng.standard_normal(blocks.shape[:2]) * 10.0 ** rng.integers(-8, 1, blocks.shape[:2])).astype(
            np.float16
        )
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def reference(data: np.ndarray, kind: GgmlType) -> torch.Tensor:
    """[N, K] float32, by the gguf package."""
    if kind is GgmlType.F32:
        return torch.from_numpy(data.view(np.float32).copy())
    if kind is GgmlType.F16:
        return torch.from_numpy(data.view(np.float16).astype(np.float32))
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.value)))


def view(data: np.ndarray, kind: GgmlType, num_columns: int) -> Matrix:
    """The matrix over these bytes."""
    return Matrix.from_buffer(memoryview(data).cast("B"), 0, kind, data.shape[0], num_columns)


def in_pieces(matrix: Matrix, rows: list[int], columns: list[int]) -> PiecedMatrix:
    """The matrix in pieces cut at these rows and columns."""
    row_cuts, column_cuts = [0, *rows, matrix.num_rows], [0, *columns, matrix.num_columns]
    pieces = [
        PlacedMatrix(row, column, matrix.rows(row, row_end).columns(column, column_end))
        for row, row_end in pairwise(row_cuts)
        for column, column_end in pairwise(column_cuts)
    ]
    return PiecedMatrix(matrix.num_rows, matrix.num_columns, tuple(pieces))
