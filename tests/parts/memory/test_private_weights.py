"""Weights that a rank owns: every share has the file's bits, what both layouts need is there once."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from kernels.cpu.linear import dequantize
from kernels.weights import Matrix
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout, Span
from services.models.model_files import ModelFiles, open_model
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.placement.pieces import canonical_tensors, resident_pieces, total_bytes
from services.placement.shares import held_shards
from services.worker.memory.weights.kept_weights import owned_weights
from services.worker.memory.weights.owned_weights import OwnedWeights
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf, write_safetensors

KINDS = {
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f16": gguf.GGMLQuantizationType.F16,
}
GROUPS: dict[str, tuple[int, Sequence[int] | None, Sequence[float] | None]] = {
    "one": (1, None, None),
    "two": (2, None, None),
    "three uneven": (3, (1, 1, 2), (1.0, 3.0, 2.0)),
    "four, some without heads": (4, None, (5.0, 1.0, 1.0, 1.0)),
}


def layouts_of(
    files: ModelFiles, group: tuple[int, Sequence[int] | None, Sequence[float] | None]
) -> dict[LayoutKind, Layout]:
    return both_layouts(shard_units(files.geometry, files.tensors), *group)


def values(matrix: Matrix) -> Tensor:
    out = torch.empty((matrix.num_rows, matrix.num_columns))
    dequantize(matrix, out)
    return out


def asked(files: ModelFiles, layout: Layout, rank: int) -> list[tuple[str, Span, Span]]:
    """Every part that a stage of this rank asks for."""
    units = shard_units(files.geometry, files.tensors)
    tensors = canonical_tensors(files.tensors, files.tensors, is_tied=False)
    return [(shard.tensor, shard.rows, shard.columns) for shard in held_shards(layout, units, tensors)[rank]]


def check_shares(files: ModelFiles, model: TinyLlama, layouts: dict[LayoutKind, Layout]) -> None:
    for rank in range(layouts[LayoutKind.PP].num_ranks):
        weights = owned_weights(files, Rank(rank), layouts)
        for layout in layouts.values():
            for name, rows, columns in asked(files, layout, rank):
                wanted = model.weights[name]
                if wanted.dim() == 1:
                    assert torch.equal(weights.vector(name), wanted)
                    continue
                part = values(weights.matrix(name, rows=rows, columns=columns))
                assert torch.equal(part, wanted[rows.begin : rows.end, columns.begin : columns.end]), name


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_share_of_both_layouts_has_the_files_bits(
    tmp_path: Path,
    kind: gguf.GGMLQuantizationType,
    group: tuple[int, Sequence[int] | None, Sequence[float] | None],
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", TinyShape(num_layers=4), kind)
    files = open_model(tmp_path / "tiny.gguf")
    check_shares(files, model, layouts_of(files, group))


def test_shares_that_cut_within_blocks_are_expanded(tmp_path: Path) -> None:
    """Three heads of 16 columns end within a block of 32."""
    model = write_gguf(tmp_path / "tiny.gguf", TinyShape(num_layers=2, num_kv_heads=6), KINDS["q4_1"])
    files = open_model(tmp_path / "tiny.gguf")
    layouts = layouts_of(files, GROUPS["two"])
    assert cut_within_blocks(files.geometry, files.tensors, layouts.values())
    check_shares(files, model, layouts)


def test_safetensors_in_bfloat16(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "tiny", TinyShape(num_layers=4), torch.bfloat16)
    files = open_model(tmp_path / "tiny")
    check_shares(files, model, layouts_of(files, GROUPS["three uneven"]))


def address_range(weights: OwnedWeights) -> tuple[int, int]:
    return weights._memory.data_ptr(), weights._memory.data_ptr() + weights.num_bytes


def test_a_tp_shard_of_an_own_layer_is_a_view_of_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", TinyShape(num_layers=4), KINDS["q4_1"])
    files = open_model(tmp_path / "tiny.gguf")
    weights = owned_weights(files, Rank(1), layouts_of(files, GROUPS["two"]))
    whole = weights.matrix("layers.2.ffn_down")
    shard = weights.matrix("layers.2.ffn_down", columns=Span(128, 224))
    assert (shard.address - whole.address, shard.row_stride_bytes) == (128 // 32 * 20, whole.row_stride_bytes)
    other = weights.matrix("layers.0.ffn_down", columns=Span(128, 224))
    assert other.row_stride_bytes == 96 // 32 * 20
    begin, end = address_range(weights)
    assert all(begin <= matrix.address < end for matrix in (whole, shard, other))
    with pytest.raises(KeyError, match="in no piece of this rank"):
        weights.matrix("layers.0.ffn_down")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_price_of_both_layouts(tmp_path: Path, num_ranks: int) -> None:
    """W/n for PP, and W/n of which 1/n is there already for TP: W/n * (2 - 1/n), of what is cut evenly."""
    shape = TinyShape(num_layers=4, num_heads=8, num_kv_heads=4, hidden_size=128, ffn_size=256)
    write_gguf(tmp_path / "tiny.gguf", shape, KINDS["f16"])
    files = open_model(tmp_path / "tiny.gguf")
    layouts = layouts_of(files, (num_ranks, None, None))
    units = shard_units(files.geometry, files.tensors)
    cut = [name for name in files.tensors if name.startswith("layers.") and not name.endswith("norm")]
    tensors = canonical_tensors({name: files.tensors[name] for name in cut}, (), is_tied=False)
    whole = sum(2 * files.tensors[name].rows * files.tensors[name].columns for name in cut)
    for rank in range(num_ranks):
        pieces = resident_pieces(rank, tuple(layouts.values()), units, tensors, ())
        assert total_bytes(pieces) == whole // num_ranks * (2 * num_ranks - 1) // num_ranks


def test_a_tied_head_is_there_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", TinyShape(num_layers=2, tied=True), KINDS["q8_0"])
    files = open_model(tmp_path / "tiny.gguf")
    weights = owned_weights(files, Rank(1), layouts_of(files, GROUPS["two"]))
    head = weights.matrix("output", rows=Span(66, 131))
    assert head.address == weights.matrix("token_embd").rows(66, 131).address
