"""Every tensor is covered by every layout, as often as its class says, and what cannot be cut is refused."""

from collections import Counter

import pytest
import torch

from services.core.layout import Layout, LayoutError, ShardUnits, Span
from services.placement.cuts import pp_layout, tp_layout
from services.placement.shares import Cut, TensorShard, canonical_tensor, held_shards
from tests.support.shard_models import CASES, SMALL, TIED, TWO_KV_HEADS, ShardModel, cells


def copies(model: ShardModel, layout: Layout) -> dict[str, Counter[tuple[int, int]]]:
    """How often each cell is held, by source."""
    source_of = {tensor.name: tensor.source for tensor in model.tensors()}
    counted: dict[str, Counter[tuple[int, int]]] = {source: Counter() for source in source_of.values()}
    for held in model.held(layout):
        for shard in held:
            counted[source_of[shard.tensor]].update(cells(shard))
    return counted


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layouts_cover_each_cell_as_often_as_its_class_says(case: tuple[ShardModel, Layout, Layout]) -> None:
    model, pp, tp = case
    in_pp, in_tp = copies(model, pp), copies(model, tp)
    replicated = sum(len(share.kv_heads) for share in tp.shares) > model.units.num_kv_heads
    for tensor in model.tensors():
        every_cell = cells(TensorShard(tensor.name, Span(0, tensor.rows), Span(0, tensor.columns)))
        assert set(in_pp[tensor.source]) == set(in_tp[tensor.source]) == every_cell
        if not model.tied or tensor.layer is not None:
            assert set(in_pp[tensor.name].values()) == {1}
        expected = set(in_tp[tensor.source].values())
        match tensor.cut:
            case Cut.WHOLE:
                assert expected == {tp.num_ranks}
            case Cut.HEAD_ROWS | Cut.HEAD_COLUMNS | Cut.FFN_ROWS | Cut.FFN_COLUMNS:
                assert expected == {1}
            case Cut.KV_HEAD_ROWS:
                assert expected == {1} or replicated
            case Cut.EMBEDDING:
                assert expected == {1 if tp.embedding_by_rows else tp.num_ranks}


def test_a_tied_head_on_another_stage_is_a_second_copy_of_one_source() -> None:
    held = TIED.held(pp_layout(TIED.units, 3))
    names = [[shard.tensor for shard in rank if shard.tensor in ("token_embd", "output")] for rank in held]
    assert names == [["token_embd"], [], ["output"]]
    source_of = {tensor.name: tensor.source for tensor in TIED.tensors()}
    assert source_of["output"] == "token_embd"


def test_a_tied_head_within_the_embedding_of_its_rank_is_not_held_twice() -> None:
    for by_rows in (False, True):
        held = TIED.held(tp_layout(TIED.units, 2, embedding_by_rows=by_rows))
        assert all("output" not in [shard.tensor for shard in rank] for rank in held)
    assert [shard.tensor for shard in TIED.held(pp_layout(TIED.units, 1))[0]].count("output") == 0


def test_shares_follow_the_classes() -> None:
    held = SMALL.held(tp_layout(SMALL.units, 2, [2, 1]))
    parts = {shard.tensor: (shard.rows, shard.columns) for shard in held[1]}
    assert parts["layers.0.attn_q"] == (Span(8, 12), Span(0, 4))
    assert parts["layers.0.attn_k"] == (Span(4, 6), Span(0, 4))
    assert parts["layers.0.attn_output"] == (Span(0, 4), Span(8, 12))
    assert parts["layers.0.ffn_gate"] == (Span(12, 14), Span(0, 4))
    assert parts["layers.0.ffn_down"] == (Span(0, 4), Span(12, 14))
    assert parts["output"] == (Span(7, 11), Span(0, 4))
    assert parts["layers.0.attn_norm"] == (Span(0, 1), Span(0, 4))


def test_stages_hold_what_they_use() -> None:
    first, last = SMALL.held(pp_layout(SMALL.units, 2, [1, 4]))
    assert {shard.tensor.split(".")[1] for shard in first if "." in shard.tensor} == {"0"}
    assert [shard.tensor for shard in first if "." not in shard.tensor] == ["token_embd"]
    assert [shard.tensor for shard in last if "." not in shard.tensor] == ["output_norm", "output"]


def test_replicas_hold_the_same_kv_rows_and_share_the_query_rows() -> None:
    held = TWO_KV_HEADS.held(tp_layout(TWO_KV_HEADS.units, 4, replicate_kv_heads=True))
    k_rows = [next(shard.rows for shard in rank if shard.tensor == "layers.0.attn_k") for rank in held]
    q_rows = [next(shard.rows for shard in rank if shard.tensor == "layers.0.attn_q") for rank in held]
    assert k_rows == [Span(0, 2), Span(0, 2), Span(2, 4), Span(2, 4)]
    assert q_rows == [Span(0, 4), Span(4, 8), Span(8, 12), Span(12, 16)]


def test_padded_rows_are_bytes_of_the_last_row_and_of_no_other() -> None:
    head = next(tensor for tensor in TIED.tensors() if tensor.name == "output")
    assert TIED.units.num_padded_vocab == 1
    assert head.num_bytes(Span(8, 11), Span(0, 4)) == (3 + 1) * 2 * 3
    assert head.num_bytes(Span(0, 8), Span(0, 4)) == 8 * 2 * 3
    assert head.num_bytes(Span(11, 11), Span(0, 4)) == 0


def test_a_cut_within_a_block_is_refused_with_the_remedy() -> None:
    units = ShardUnits(num_layers=2, num_heads=2, num_kv_heads=2, ffn=64, ffn_unit=32, vocab=8)
    tensor = canonical_tensor("layers.0.attn_output", 128, 128, block_columns=128, block_bytes=70)
    with pytest.raises(LayoutError, match=r"attn_output.*column 64, within a block of 128.*expanded"):
        held_shards(tp_layout(units, 2), units, [tensor])
    whole = held_shards(pp_layout(units, 2), units, [tensor])
    assert whole[0][0].columns == Span(0, 128)


def test_a_shape_that_contradicts_the_geometry_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"attn_q.*13.*6 units"):
        held_shards(tp_layout(SMALL.units, 2), SMALL.units, [canonical_tensor("layers.0.attn_q", 13, 4)])


def test_a_name_that_nobody_cuts_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"attn_sinks.*attn_q"):
        canonical_tensor("layers.0.attn_sinks", 1, 4)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 5)])
def test_replicated_kv_heads_compute_what_one_rank_computes(weights: tuple[int, ...]) -> None:
    """Attention from the shards themselves, each query head with the KV head at its place, as the kernel counts."""
    model, dim, num_tokens = TWO_KV_HEADS, TWO_KV_HEADS.head_dim, 5
    generator = torch.Generator().manual_seed(1)
    whole = {
        tensor.name: torch.randn((tensor.rows, tensor.columns), generator=generator, dtype=torch.float64)
        for tensor in model.tensors()
    }
    x = torch.randn((num_tokens, model.hidden), generator=generator, dtype=torch.float64)

    def partial(held: tuple[TensorShard, ...]) -> torch.Tensor:
        parts = {
            shard.tensor.removeprefix("layers.0."): whole[shard.tensor][
                shard.rows.begin : shard.rows.end, shard.columns.begin : shard.columns.end
            ]
            for shard in held
        }
        if "attn_q" not in parts:
            return torch.zeros_like(x)
        q, k, v = ((x @ parts[name].T).view(num_tokens, -1, dim) for name in ("attn_q", "attn_k", "attn_v"))
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
        mask = torch.full((num_tokens, num_tokens), -torch.inf, dtype=torch.float64).triu(1)
        scores = torch.einsum("qhd,khd->hqk", q, k) + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(num_tokens, -1)
        return attended @ parts["attn_output"].T

    layout = tp_layout(model.units, len(weights), weights, replicate_kv_heads=True)
    summed = torch.stack([partial(held) for held in model.held(layout)]).sum(0)
    alone = partial(model.held(tp_layout(model.units, 1))[0])
    torch.testing.assert_close(summed, alone, rtol=1e-12, atol=1e-12)
