"""Weights as views: shares add up to the whole, and the copy is made once, by whoever comes, and found again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from services.core.ggml_types import GgmlTypeError
from services.core.layout import Span, pp_layout, tp_layout
from services.mesh.errors import ConfigurationError
from services.mesh.model_files import ModelFiles, open_model
from services.worker.layouts import both_layouts, shard_units
from services.worker.weights import FEW_ROWS, WeightStore
from tests.unit.tiny_llama import TinyLlama, TinyShape, write_gguf, write_safetensors

SHAPE = TinyShape()
Q4_1 = gguf.GGMLQuantizationType.Q4_1


@contextmanager
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test-weights", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[ModelFiles, TinyLlama]:
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path, SHAPE, Q4_1)
    return open_model(path), model


def product(store: WeightStore, name: str, x: torch.Tensor, **spans: Span) -> torch.Tensor:
    linear = store.linear(name, **spans)
    out = torch.full((len(x), linear.stored.num_rows), torch.nan)
    linear.into(x, out)
    return out


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1, 50])
def test_products_by_either_way_are_the_models(tiny: tuple[ModelFiles, TinyLlama], num_rows: int) -> None:
    files, model = tiny
    with memfd() as fd:
        store = WeightStore(files, fd)
        store.fill_copy(0, 1)
        x = torch.randn(num_rows, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ model.weights["layers.1.ffn_up"].double().T
        torch.testing.assert_close(product(store, "layers.1.ffn_up", x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 40])
@pytest.mark.parametrize("weights", [None, [5, 1], [1, 1, 1], [2, 5, 1], [1] * 5])
def test_tensor_parallel_shares_add_up(
    tiny: tuple[ModelFiles, TinyLlama], num_rows: int, weights: list[int] | None
) -> None:
    files, model = tiny
    units = shard_units(files.geometry, files.tensors)
    layout = tp_layout(units, 2 if weights is None else len(weights), weights)
    with memfd() as fd:
        store = WeightStore(files, fd)
        store.fill_copy(0, 1)
        x = torch.randn(num_rows, SHAPE.ffn_size, generator=torch.Generator().manual_seed(1))
        total = torch.zeros(num_rows, SHAPE.hidden_size)
        for share in layout.shares:
            if len(share.ffn):
                part = store.linear("layers.0.ffn_down", columns=share.ffn)
                part.into(x[:, share.ffn.begin : share.ffn.end], total, accumulate=True)
        expected = x.double() @ model.weights["layers.0.ffn_down"].double().T
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_row_shares_are_the_rows(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    files, model = tiny
    with memfd() as fd:
        store = WeightStore(files, fd)
        store.fill_copy(0, 1)
        x = torch.randn(3, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ model.weights["layers.0.attn_q"].double()[32:64].T
        actual = product(store, "layers.0.attn_q", x, rows=Span(32, 64)).double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_share_has_no_matrix(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    store = WeightStore(tiny[0], None)
    with pytest.raises(AssertionError, match="empty share"):
        store.linear("layers.0.ffn_up", rows=Span(4, 4))


def test_columns_within_a_block_come_from_the_copy(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    files, model = tiny
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    with memfd() as fd:
        store = WeightStore(files, fd)
        store.fill_copy(0, 1)
        expected = x.double() @ model.weights["layers.0.attn_output"].double()[:, 16:64].T
        actual = product(store, "layers.0.attn_output", x, columns=Span(16, 64)).double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(GgmlTypeError, match="do not fall on blocks"):
        WeightStore(files, None).linear("layers.0.attn_output", columns=Span(16, 64))


def test_without_a_copy_many_rows_are_multiplied_too(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    files, model = tiny
    x = torch.randn(40, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    store = WeightStore(files, None)
    assert store.fill_copy(0, 1) == store.copy_bytes == 0
    expected = x.double() @ model.weights["layers.1.ffn_up"].double().T
    torch.testing.assert_close(product(store, "layers.1.ffn_up", x).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_copy_is_made_once_for_all_ranks_and_lives_on(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    files, _ = tiny
    num_linears = 7 * SHAPE.num_layers
    with memfd() as fd:
        first, second = WeightStore(files, fd), WeightStore(files, fd)
        assert first.fill_copy(0, 2) == num_linears
        assert second.fill_copy(1, 2) == 0
        del first, second
        assert WeightStore(files, fd).fill_copy(0, 1) == 0


def test_the_copy_of_another_file_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    models = [write_gguf(path, SHAPE, Q4_1, seed=seed) for seed, path in enumerate(paths)]
    x = torch.randn(40, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    with memfd() as fd:
        for path, model in zip(paths, models, strict=True):
            store = WeightStore(open_model(path), fd)
            assert store.fill_copy(0, 1) == 7 * SHAPE.num_layers
            expected = x.double() @ model.weights["layers.1.ffn_up"].double().T
            torch.testing.assert_close(product(store, "layers.1.ffn_up", x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [2, 40])
def test_safetensors_are_multiplied_as_they_are(tmp_path: Path, dtype: torch.dtype, num_rows: int) -> None:
    model = write_safetensors(tmp_path / "model", SHAPE, dtype)
    x = torch.randn(num_rows, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))
    with memfd() as fd:
        store = WeightStore(open_model(tmp_path / "model"), fd)
        store.fill_copy(0, 1)
        expected = x.double() @ model.weights["layers.1.ffn_up"].double().T
        torch.testing.assert_close(product(store, "layers.1.ffn_up", x).double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(store.vector("layers.1.ffn_norm"), model.weights["layers.1.ffn_norm"])


def test_fractional_weights_become_the_nearest_whole_shares(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    units = shard_units(tiny[0].geometry, tiny[0].tensors)
    even = both_layouts(replace(units, num_layers=3), 3, None, [0.7, 0.7, 0.7])
    assert even == both_layouts(replace(units, num_layers=3), 3, None, None)


def test_a_vector_that_does_not_fit_is_a_configuration_error(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    units = shard_units(tiny[0].geometry, tiny[0].tensors)
    assert pp_layout(units, 2).num_stages == 2
    with pytest.raises(ConfigurationError, match="pp_layers sums to 3"):
        both_layouts(units, 2, [1, 2], None)
