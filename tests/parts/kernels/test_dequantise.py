"""Plain torch's reading of stored blocks, the oracle of C's, against the gguf package: to the bit."""

import pytest
import torch

from kernels.reference.dequantise import dequantised, dequantised_rows
from services.models.ggml_types import GgmlType, block_length
from tests.support.stored_weights import in_pieces, random_bytes, reference, view


@pytest.mark.parametrize("kind", list(GgmlType))
def test_every_type_to_the_bit(kind: GgmlType) -> None:
    num_columns = 768 if block_length(kind) > 1 else 509
    data = random_bytes(kind, 37, num_columns, seed=kind + 100)
    matrix, want = view(data, kind, num_columns), reference(data, kind)
    assert torch.equal(dequantised(matrix).view(torch.int32), want.view(torch.int32))
    ids = torch.tensor([36, 0, 5, 5])
    assert torch.equal(dequantised_rows(matrix, ids).view(torch.int32), want[ids].view(torch.int32))


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q6_K])
def test_shards_and_pieces(kind: GgmlType) -> None:
    data = random_bytes(kind, 21, 1024, seed=3)
    matrix, want = view(data, kind, 1024), reference(data, kind)
    assert torch.equal(dequantised(matrix.rows(3, 9).columns(256, 768)), want[3:9, 256:768])
    assert torch.equal(dequantised(in_pieces(matrix, [4, 5], [256, 512])), want)
    assert dequantised(matrix.rows(5, 5)).shape == (0, 1024)
