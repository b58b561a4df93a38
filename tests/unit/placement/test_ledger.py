"""The memory ledger: terms against sums done by hand, capacity against search, ids against every rank."""

from dataclasses import replace

import pytest

from kernels import _native
from kernels.cpu.shm_region import RegionLayout, RegionShape
from services.core.ids import LayoutKind, Rank
from services.models.geometry import ModelGeometry
from services.models.ggml_types import GgmlType
from services.models.tensor_places import TensorPlace, expected_tensors
from services.placement.cuts import pp_layout, tp_layout
from services.placement.demand import Deployment, Model, deployed_layouts, plan_memory, price_line, region_bytes
from services.placement.ledger import (
    Ceiling,
    Ledger,
    LedgerError,
    MemoryMode,
    PoolBacking,
    PoolCost,
    Term,
    check_id_space,
)
from services.placement.prices import MachineDemand, ModelDemand, make_ledger
from services.placement.shares import canonical_tensor
from services.placement.staging import PAGE_STAGING_BYTES
from tests.support.small_model import GEOMETRY

DEPLOYMENT = Deployment(num_ranks=2, max_batch_rows=512, max_resident_requests=64)
UNITS, _ = deployed_layouts(DEPLOYMENT, GEOMETRY, {})
BLOCK = 2 * 16 * 2 * 2 * 8 * 4
CONTEXT = 1000


def demand(
    kv_tokens: tuple[int, ...] | None = None, num_ranks: int = 2, geometry: ModelGeometry = GEOMETRY
) -> ModelDemand:
    tensors = tuple(
        canonical_tensor(name, *shape, source="token_embd" if name == "output" else None)
        for name, shape in expected_tensors(geometry).items()
    )
    layouts = {
        LayoutKind.PP: pp_layout(UNITS, num_ranks),
        LayoutKind.TP: tp_layout(UNITS, num_ranks, kv_tokens=kv_tokens),
    }
    return ModelDemand(
        layouts=layouts,
        units=UNITS,
        tensors=tensors,
        file_bytes=100_001,
        expanded_bytes=0,
        hidden_size=geometry.hidden_size,
        head_dim=geometry.head_dim,
        kv_element_bytes=4,
        max_batch_rows=8,
        max_resident_requests=4,
        context_tokens=64,
        rotary_tokens=64,
    )


def ledger(mode: MemoryMode, backing: PoolBacking = PoolBacking.RESIDENT, **changes: object) -> Ledger:
    machine = MachineDemand(mode, backing, CONTEXT, (Term("services", 77, is_addressed=False),))
    model = demand(changes.pop("kv_tokens", None))  # type: ignore[arg-type]
    return make_ledger(model, replace(machine, **changes))  # type: ignore[arg-type]


def term(found: Ledger, rank: int, part: str) -> int:
    (size,) = [term.num_bytes for term in found.ranks[rank].terms if part in term.name]
    return size


# By hand, in float32 elements: a layer, half of one by heads and FFN (norms whole), embedding and final norm.
LAYER = 2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64
HALF_LAYER = 2 * 32 + (LAYER - 2 * 32) // 2
EMBEDDING, NORM = 10 * 32, 32
PP = [4 * (LAYER + EMBEDDING), 4 * (LAYER + EMBEDDING + NORM)]
TP = [4 * (2 * HALF_LAYER + EMBEDDING + NORM)] * 2


def test_shared_pages_are_counted_once_for_the_host_and_charged_in_parts() -> None:
    found = ledger(MemoryMode.SHARED)
    assert not any("weights" in term.name for account in found.ranks for term in account.terms)
    assert [account.charged_bytes for account in found.ranks] == [50_001, 50_001]
    own = sum(term.num_bytes for account in found.ranks for term in account.terms)
    assert found.host_bytes(0) == own + 100_001 + 77
    assert found.host_bytes(3) - found.host_bytes(0) == 3 * BLOCK


def test_private_modes_hold_what_their_layouts_do() -> None:
    exchange = ledger(MemoryMode.EXCHANGE, message_bytes=5000)
    assert [term(exchange, rank, "arena") for rank in (0, 1)] == [max(PP[rank], TP[rank]) for rank in (0, 1)]
    assert term(exchange, 0, "staging") == PAGE_STAGING_BYTES + 2 * 5000
    image = ledger(MemoryMode.IMAGE)
    assert [term(image, 0, "image of pp"), term(image, 0, "image of tp")] == [PP[0], TP[0]]
    assert (
        image.ranks[0].fixed_bytes - ledger(MemoryMode.EXCHANGE).ranks[0].fixed_bytes
        == PP[0] + TP[0] - PAGE_STAGING_BYTES
    )
    cold = ledger(MemoryMode.IMAGE, cold_image=True)
    assert image.ranks[0].fixed_bytes - cold.ranks[0].fixed_bytes == min(PP[0], TP[0])


def test_dual_adds_the_tp_shard_of_the_other_stages_layers_alone() -> None:
    """W/n + W/n·(1−1/n): a rank's TP shard of its own layers is a view into them."""
    found = ledger(MemoryMode.DUAL)
    assert [term(found, rank, "weights in pp") for rank in (0, 1)] == PP
    # Rank 0 has the embedding and no final norm, rank 1 the head, which is the same matrix, and the norm.
    assert [term(found, rank, "not in pp") for rank in (0, 1)] == [4 * (HALF_LAYER + NORM), 4 * HALF_LAYER]


def test_images_of_gpus_lie_on_the_host() -> None:
    machine = MachineDemand(MemoryMode.IMAGE, PoolBacking.RESIDENT, CONTEXT)
    found = make_ledger(demand(), machine, on_host=False)
    assert not any("image" in term.name for account in found.ranks for term in account.terms)
    assert found.host_bytes(99) == sum(PP) + sum(TP)


def test_workspace_terms_by_hand() -> None:
    found = ledger(MemoryMode.SHARED)
    # Rows x (2 hidden + q + attended + k + v + gate + up), whole heads and FFN in PP, half of them in TP.
    assert term(found, 0, "activations") == 8 * 4 * (2 * 64 + (2 * 32 + 2 * 16 + 2 * 64) * 3 // 2)
    assert term(found, 0, "resident table") == 4 * (64 + 4) * 4
    assert (term(found, 0, "logits"), term(found, 1, "logits")) == (4 * 5 * 4, 4 * (10 + 20) * 4)
    assert term(found, 0, "rotary") == 4 * (2 * 64 * 8 + (3 + 5) * 32)


@pytest.mark.parametrize("mode", list(MemoryMode))
@pytest.mark.parametrize("backing", list(PoolBacking))
@pytest.mark.parametrize("kv_tokens", [None, (3, 1)])
def test_capacity_is_the_most_that_fits(
    mode: MemoryMode, backing: PoolBacking, kv_tokens: tuple[int, ...] | None
) -> None:
    found = ledger(mode, backing, kv_tokens=kv_tokens)
    budgets = [account.fixed_bytes + 40 * BLOCK + 7 * account.rank for account in found.ranks]
    most = found.capacity(budgets).num_blocks
    assert all(found.rank_bytes(account.rank, most) <= budgets[account.rank] for account in found.ranks)
    assert any(found.rank_bytes(account.rank, most + 1) > budgets[account.rank] for account in found.ranks)
    check_id_space(most, found.layout_blocks(budgets, most))
    with pytest.raises(LedgerError, match=rf"below {most + 1}, and rank \d can hold \d+ in layout"):
        check_id_space(most + 1, found.layout_blocks(budgets, most + 1))


def test_p6_5_p6_6_the_poorest_rank_binds_and_is_named() -> None:
    found = ledger(MemoryMode.EXCHANGE)
    room = [found.ranks[0].fixed_bytes + 100 * BLOCK, found.ranks[1].fixed_bytes + 10 * BLOCK]
    capacity = found.capacity(room)
    assert (capacity.binding, capacity.num_blocks) == ("rank 1", 10)
    assert (
        "budget of rank 1" in capacity.remedy and "tp_weights" in capacity.remedy and "exclusively" in capacity.remedy
    )
    # With turns taken, twice as much: each layout's half is alone.
    turns = ledger(MemoryMode.EXCHANGE, PoolBacking.EXCLUSIVE)
    beside = [turns.ranks[rank].fixed_bytes - found.ranks[rank].fixed_bytes for rank in (0, 1)]
    assert turns.capacity([room[rank] + beside[rank] for rank in (0, 1)]).num_blocks == 20
    assert found.capacity([room[0], found.ranks[1].fixed_bytes - 5]).left_bytes == -5


@pytest.mark.parametrize(
    ("backing", "vector", "num_blocks"),
    [
        (PoolBacking.EXCLUSIVE, (3, 1), 400),
        # Of 240 blocks 120 are in PP on either rank: 180 and 60 are left for rows.
        (PoolBacking.RESIDENT, (3, 1), 240),
    ],
)
def test_token_vectors_equalise(backing: PoolBacking, vector: tuple[int, int], num_blocks: int) -> None:
    taken = 120 if backing is PoolBacking.RESIDENT else 0
    rooms = [share * num_blocks // 4 + taken for share in vector]
    # With the buffers in which queries and parts travel, which a cache cut by heads does not need.
    found = ledger(MemoryMode.EXCHANGE, backing, kv_tokens=(1, 1))
    budgets = [account.fixed_bytes + room * BLOCK for account, room in zip(found.ranks, rooms, strict=True)]
    assert found.equalising_tokens(budgets) == vector
    tokens = ledger(MemoryMode.EXCHANGE, backing, kv_tokens=vector)
    assert tokens.layout_blocks(budgets, num_blocks)[LayoutKind.TP] == (num_blocks, num_blocks)
    assert min(found.layout_blocks(budgets, num_blocks)[LayoutKind.TP]) < num_blocks


def test_what_travels_in_token_wise_attention_is_priced_by_hand() -> None:
    """Rows x (q, k, v of all ranks, a part and a log-sum-exp for each head, and from both ranks for the own heads)."""
    by_heads, by_tokens = (ledger(MemoryMode.DUAL, kv_tokens=vector) for vector in (None, (1, 3)))
    assert term(by_tokens, 0, "activations") - term(by_heads, 0, "activations") == 8 * 4 * (8 * 8 + 9 * (4 + 2 * 2))


def test_a_period_that_is_not_whole_is_priced_at_its_worst() -> None:
    cost = PoolCost(10, held=3, period=4)
    assert [cost.num_bytes(count) for count in range(6)] == [0, 10, 20, 30, 30, 40]


def test_of_several_ceilings_the_tightest_binds() -> None:
    found = ledger(MemoryMode.SHARED)
    addressed = found.host_bytes(0, addressed_only=True)
    table_bytes = term(found, 0, "resident table")
    assert found.host_bytes(0) - addressed == 2 * CONTEXT + 77 + 2 * table_bytes
    host = Ceiling("host", found.host_bytes(0) + 20 * BLOCK, "more")
    limit = Ceiling("translation table", addressed + 9 * BLOCK, "raise it", addressed_only=True)
    assert found.capacity(None, [host]).num_blocks == 20
    assert found.capacity(None, [host, limit]).binding == "translation table"
    assert found.capacity(None, [host, limit]).num_blocks == 9
    assert found.capacity([10**9, 10**9], [host, limit]).binding == "translation table"


def test_a_gpus_host_bounds_nothing_until_it_is_full() -> None:
    found = make_ledger(demand(), MachineDemand(MemoryMode.IMAGE, PoolBacking.RESIDENT, CONTEXT), on_host=False)
    budgets = [account.fixed_bytes + 8 * BLOCK for account in found.ranks]
    images = sum(PP) + sum(TP)
    assert found.capacity(budgets, [Ceiling("host", images, "more")]).binding.startswith("rank")
    full = found.capacity(budgets, [Ceiling("host", images - 1, "more")])
    assert (full.binding, full.num_blocks, full.left_bytes) == ("host", 0, -1)


def test_nothing_to_go_by_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        ledger(MemoryMode.SHARED).capacity(None)
    with pytest.raises(ValueError, match="shorter"):
        ledger(MemoryMode.SHARED).capacity([10**9])


def places(kind: GgmlType) -> dict[str, TensorPlace]:
    return {name: TensorPlace(0, 0, kind, *shape) for name, shape in expected_tensors(GEOMETRY).items()}


def test_a_share_within_a_block_is_priced_expanded() -> None:
    """Heads of 8 columns in blocks of 32: the output projection is held as float32."""
    shared = plan_memory(DEPLOYMENT, Model(GEOMETRY, places(GgmlType.Q4_0), 5000))
    expanded = [term.num_bytes for term in shared.host_terms if term.name == "expanded weights"]
    assert expanded == [2 * 4096]
    whole = plan_memory(DEPLOYMENT, Model(GEOMETRY, places(GgmlType.F32), 5000))
    assert not any(term.name == "expanded weights" for term in whole.host_terms)
    private = plan_memory(replace(DEPLOYMENT, mode=MemoryMode.EXCHANGE), Model(GEOMETRY, places(GgmlType.Q4_0), 5000))
    blocks = (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 - 32 * 32 + 10 * 32) // 32 * 18
    # The TP layout is the larger: norms of both layers and the final one.
    assert term(private, 0, "arena") == blocks + 5 * 18 + 32 * 32 * 4


@pytest.mark.parametrize(("num_ranks", "rows", "hidden"), [(1, 8, 64), (2, 512, 576), (4, 2048, 4096)])
def test_the_regions_price_is_the_real_regions_size(num_ranks: int, rows: int, hidden: int) -> None:
    message_bytes = rows * hidden * 4
    shape = RegionShape(num_ranks, message_bytes, 64)
    real = RegionLayout(*_native.collectives_layout(*shape.words()))
    diagonal = num_ranks * shape.num_slots * real.slot_stride
    assert 0 <= real.total_bytes - diagonal - region_bytes(num_ranks, message_bytes) < 128 * 1024


def test_the_log_line_has_every_term_and_the_vector() -> None:
    found = plan_memory(DEPLOYMENT, Model(GEOMETRY, places(GgmlType.F32), 5000))
    line = price_line(found, None, 2 * 10**9, 10)
    assert line["binding"] == "rank 1"
    assert line["left_bytes"] == 2 * 10**9 - found.host_bytes(10)
    assert line["rank_bytes"] == [found.rank_bytes(Rank(rank), 10) for rank in (0, 1)]
    assert set(line["terms"]) >= {term.name for term in (*found.host_terms, *found.ranks[0].terms)}  # type: ignore[call-overload]
    assert line["equalising_kv_tokens"] == "1,1"
    assert "has" in str(price_line(found, [1, 1], 10, 10)["equalising_kv_tokens"])
