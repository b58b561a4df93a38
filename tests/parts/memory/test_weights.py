"""Weights as views: shares add up to the whole, and what must be expanded is made once and found again."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.weights import Matrix
from services.core.errors import ConfigurationError
from services.core.layout import Span
from services.models.model_files import ModelFiles, open_model
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.worker.memory.weights.mapped import WeightStore
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf, write_safetensors

ALIGNED = TinyShape()
"""A KV group's columns are one Q4_1 block of 32."""
MISALIGNED = TinyShape(num_kv_heads=6)
"""A KV group's columns are half a block."""
Q4_1 = gguf.GGMLQuantizationType.Q4_1


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test-weights", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def tiny(folder: Path, shape: TinyShape = ALIGNED, seed: int = 7) -> tuple[ModelFiles, TinyLlama]:
    path = folder / f"tiny-{seed}.gguf"
    model = write_gguf(path, shape, Q4_1, seed)
    return open_model(path), model


def open_store(files: ModelFiles, fd: int, num_ranks: int) -> WeightStore:
    units = shard_units(files.geometry, files.tensors)
    layouts = both_layouts(replace(units, num_layers=num_ranks), num_ranks, None, None)
    return WeightStore(files, fd, cut_within_blocks(files.geometry, files.tensors, layouts.values()))


def product(matrix: Matrix, x: Tensor) -> Tensor:
    out = torch.full((len(x), matrix.num_rows), torch.nan)
    CpuBackend().linear(x, matrix, out)
    return out.double()


def some_rows(num_columns: int, num_rows: int = 3) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("weights", [[1, 1], [5, 1], [1, 1, 1], [2, 5, 1], [1] * 8])
@pytest.mark.parametrize("shape", [ALIGNED, MISALIGNED], ids=["aligned", "misaligned"])
def test_tensor_parallel_shares_add_up(tmp_path: Path, memfd: int, shape: TinyShape, weights: list[float]) -> None:
    files, model = tiny(tmp_path, shape)
    units = replace(shard_units(files.geometry, files.tensors), num_layers=len(weights))
    layouts = both_layouts(units, len(weights), None, weights)
    store = WeightStore(files, memfd, cut_within_blocks(files.geometry, files.tensors, layouts.values()))
    store.expand(0, 1)
    for name, width in (("attn_output", shape.num_heads * shape.head_dim), ("ffn_down", shape.ffn_size)):
        x, total = some_rows(width), torch.zeros(3, shape.hidden_size)
        for share in next(layout for layout in layouts.values() if layout.kind.value == "tp").shares:
            columns = share.heads.times(shape.head_dim) if name == "attn_output" else share.ffn
            matrix = store.matrix(f"layers.0.{name}", columns=columns)
            CpuBackend().linear(x[:, columns.begin : columns.end], matrix, total, accumulate=True)
        expected = x.double() @ model.weights[f"layers.0.{name}"].double().T
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_row_shares_are_the_rows(tmp_path: Path, memfd: int) -> None:
    files, model = tiny(tmp_path)
    x = some_rows(ALIGNED.hidden_size)
    expected = x.double() @ model.weights["layers.0.attn_q"].double()[32:64].T
    actual = product(open_store(files, memfd, 1).matrix("layers.0.attn_q", rows=Span(32, 64)), x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_expanded_where_shares_end_on_blocks(tmp_path: Path, memfd: int) -> None:
    store = open_store(tiny(tmp_path)[0], memfd, 3)
    assert store.expand(0, 3) == store.expanded_bytes == 0
    assert os.fstat(memfd).st_size == 0


def test_expanded_tensors_are_made_once_for_all_ranks_and_live_on(tmp_path: Path, memfd: int) -> None:
    files, _ = tiny(tmp_path, MISALIGNED)
    first, second = open_store(files, memfd, 2), open_store(files, memfd, 2)
    assert first.expand(0, 2) == MISALIGNED.num_layers
    assert second.expand(1, 2) == 0
    del first, second
    assert open_store(files, memfd, 2).expand(0, 1) == 0


def test_a_rank_that_died_half_way_leaves_the_rest_to_others(tmp_path: Path, memfd: int) -> None:
    files, _ = tiny(tmp_path, MISALIGNED)
    store = open_store(files, memfd, 2)
    assert store._expanded is not None
    half_written = next(store._expanded.missing(0, 2))
    store._expanded.tensors[half_written].fill_(1.0)
    assert open_store(files, memfd, 2).expand(1, 2) == MISALIGNED.num_layers


def test_expanded_tensors_of_another_file_are_not_taken(tmp_path: Path, memfd: int) -> None:
    x = some_rows(48)
    for seed in (1, 2):
        files, model = tiny(tmp_path, MISALIGNED, seed)
        store = open_store(files, memfd, 2)
        assert store.expand(0, 1) == MISALIGNED.num_layers
        expected = x.double() @ model.weights["layers.1.attn_output"].double()[:, :48].T
        actual = product(store.matrix("layers.1.attn_output", columns=Span(0, 48)), x)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_safetensors_are_multiplied_as_they_are(tmp_path: Path, memfd: int, dtype: torch.dtype) -> None:
    model = write_safetensors(tmp_path / "model", ALIGNED, dtype)
    store = open_store(open_model(tmp_path / "model"), memfd, 2)
    x = some_rows(ALIGNED.hidden_size)
    expected = x.double() @ model.weights["layers.1.ffn_up"].double().T
    torch.testing.assert_close(product(store.matrix("layers.1.ffn_up"), x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(store.vector("layers.1.ffn_norm"), model.weights["layers.1.ffn_norm"])


def test_equal_fractions_are_equal_shares(tmp_path: Path) -> None:
    files, _ = tiny(tmp_path)
    units = replace(shard_units(files.geometry, files.tensors), num_layers=3)
    assert both_layouts(units, 3, None, [0.7, 0.7, 0.7]) == both_layouts(units, 3, None, None)


def test_a_vector_that_does_not_fit_is_a_configuration_error(tmp_path: Path) -> None:
    files, _ = tiny(tmp_path)
    with pytest.raises(ConfigurationError, match="pp_layers sums to 3"):
        both_layouts(shard_units(files.geometry, files.tensors), 2, [1, 2], None)
