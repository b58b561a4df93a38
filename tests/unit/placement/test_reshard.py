"""Transfer plans against a reference that looks at every cell; from any layout to any layout."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.ids import Rank
from services.core.layout import Layout, LayoutError, ShardUnits, Span
from services.placement.cuts import pp_layout, tp_layout
from services.placement.reshard import SourceChoice, TransferPlan, transfer_plan
from services.placement.shares import RankShards, TensorShard
from tests.support.shard_models import CASES, HEADS_48, SMALL, TIED, TWO_KV_HEADS, ShardModel, cells


def check_against_cells(model: ShardModel, source: RankShards, destination: RankShards) -> TransferPlan:
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    plan = transfer_plan(model.tensors(), source, destination)
    has = [{(tensors[shard.tensor].source, cell) for shard in held for cell in cells(shard)} for held in source]
    arrived: dict[tuple[int, TensorShard], Counter[tuple[int, int]]] = {
        (rank, shard): Counter() for rank, held in enumerate(destination) for shard in held
    }
    for run in plan.runs:
        content = tensors[run.source_shard.tensor].source
        part = cells(TensorShard(content, run.rows, run.columns))
        assert part and content == tensors[run.destination_shard.tensor].source
        assert run.source_shard in source[run.source]
        assert part <= cells(run.source_shard)
        at_home = {(content, cell) for cell in part} <= has[run.destination]
        assert (run.source == run.destination) == at_home
        arrived[run.destination, run.destination_shard].update(part)
    for (_, shard), counted in arrived.items():
        assert counted == Counter(cells(shard)), "each cell of a destination shard arrives once"
    return plan


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_plans_cover_every_cell_once_both_ways(case: tuple[ShardModel, Layout, Layout]) -> None:
    model, pp, tp = case
    in_pp, in_tp = model.held(pp), model.held(tp)
    num_shards = sum(map(len, in_pp)) + sum(map(len, in_tp))
    for source, destination in ((in_pp, in_tp), (in_tp, in_pp)):
        plan = check_against_cells(model, source, destination)
        assert len(plan.runs) <= num_shards, "runs, not cells"


@st.composite
def layouts(draw: st.DrawFn, model: ShardModel, num_ranks: int) -> Layout:
    if draw(st.booleans()):
        cuts = sorted(
            draw(st.sets(st.integers(1, model.units.num_layers - 1), min_size=num_ranks - 1, max_size=num_ranks - 1))
        )
        return pp_layout(
            model.units,
            num_ranks,
            [end - begin for begin, end in zip([0, *cuts], [*cuts, model.units.num_layers], strict=True)],
        )
    return tp_layout(
        model.units,
        num_ranks,
        draw(st.lists(st.integers(1, 9), min_size=num_ranks, max_size=num_ranks)),
        replicate_kv_heads=draw(st.booleans()),
        embedding_by_rows=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(st.data(), st.sampled_from([SMALL, TIED, TWO_KV_HEADS]), st.integers(1, 4))
def test_any_layout_leads_to_any_other(data: st.DataObject, model: ShardModel, num_ranks: int) -> None:
    source, destination = data.draw(layouts(model, num_ranks)), data.draw(layouts(model, num_ranks))
    check_against_cells(model, model.held(source), model.held(destination))


def test_the_same_layout_moves_nothing() -> None:
    held = SMALL.held(tp_layout(SMALL.units, 2))
    plan = transfer_plan(SMALL.tensors(), held, held)
    assert all(run.source == run.destination for run in plan.runs)
    assert plan.received_bytes(Rank(0)) == plan.received_bytes(Rank(1)) == 0


def test_an_even_split_moves_what_the_floor_says() -> None:
    model = ShardModel(ShardUnits(num_layers=8, num_heads=8, num_kv_heads=8, ffn=64, ffn_unit=2, vocab=8))
    matrices = [tensor for tensor in model.tensors() if tensor.layer is not None and "norm" not in tensor.name]
    whole = sum(tensor.num_bytes(Span(0, tensor.rows), Span(0, tensor.columns)) for tensor in matrices)
    for num_ranks in (2, 4):
        names = {tensor.name for tensor in matrices}
        pp, tp = (
            tuple(tuple(shard for shard in held if shard.tensor in names) for held in model.held(layout))
            for layout in (pp_layout(model.units, num_ranks), tp_layout(model.units, num_ranks))
        )
        for source, destination in ((pp, tp), (tp, pp)):
            plan = transfer_plan(model.tensors(), source, destination)
            received = [plan.received_bytes(Rank(rank)) for rank in range(num_ranks)]
            assert received == [whole / num_ranks * (1 - 1 / num_ranks)] * num_ranks
            links = plan.link_bytes()
            assert sum(links.values()) == whole
            assert len({count for (sender, receiver), count in links.items() if sender != receiver}) == 1


def test_replicas_share_the_sending() -> None:
    model = TWO_KV_HEADS
    tp = tp_layout(model.units, 4, replicate_kv_heads=True)
    keys = {f"layers.{layer}.attn_k" for layer in range(5)}
    held = tuple(tuple(shard for shard in rank if shard.tensor in keys) for rank in model.held(tp))
    wanted = tuple(
        tuple(shard for shard in rank if shard.tensor in keys) for rank in model.held(pp_layout(model.units, 4))
    )
    plan = transfer_plan(model.tensors(), held, wanted)
    sent = Counter(run.source for run in plan.runs if run.source != run.destination)
    assert sum(sent.values()) == 5, "each stage has one of the two KV heads of its own and wants the other"
    assert max(sent.values()) - min(sent[Rank(rank)] for rank in range(4)) <= 1


def test_the_destination_is_its_own_source_whatever_the_balance() -> None:
    choice = SourceChoice()
    assert choice.choose([Rank(0), Rank(1)], Rank(1), 10) == 1
    assert [choice.choose([Rank(0), Rank(1)], Rank(2), 10) for _ in range(4)] == [0, 1, 0, 1]


def test_hashes_tell_plans_apart_and_ranks_agree() -> None:
    plans = [
        transfer_plan(HEADS_48.tensors(), HEADS_48.held(pp_layout(HEADS_48.units, 3)), HEADS_48.held(tp))
        for tp in (
            tp_layout(HEADS_48.units, 3),
            tp_layout(HEADS_48.units, 3),
            tp_layout(HEADS_48.units, 3, [30, 17, 17]),
        )
    ]
    assert plans[0].hash == plans[1].hash != plans[2].hash
    assert 0 <= plans[0].hash < 1 << 64
    parts = {run for rank in range(3) for run in plans[0].of(Rank(rank))}
    assert parts == set(plans[0].runs)


def test_a_source_that_lacks_a_part_is_refused_by_name() -> None:
    held = SMALL.held(pp_layout(SMALL.units, 2))
    lacking = (held[0], held[1][1:])
    with pytest.raises(LayoutError, match=r"rank 0 needs rows.*no rank of the layout before holds"):
        transfer_plan(SMALL.tensors(), lacking, SMALL.held(tp_layout(SMALL.units, 2)))
