"""What the scheduler begins with: sizes from the settings and the model, generations that only grow."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest

from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind
from services.mesh.settings.deployment import deployment_of
from services.mesh.settings.tables import GroupSettings, ModelSettings, PoolSettings, SchedulerSettings, Settings
from services.models.geometry import Architecture, ModelGeometry, RopePairing
from services.models.ggml_types import GgmlType
from services.models.tensor_places import TensorPlace, expected_tensors
from services.placement.demand import Model, plan_memory
from services.placement.ledger import Ledger
from services.scheduler.generation_counter import GenerationCounter
from services.scheduler.sizing import FLOAT_BYTES, free_memory_bytes, parity_tokens, size_group

GEOMETRY = ModelGeometry(
    architecture=Architecture.LLAMA,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    ffn_size=1536,
    vocab_size=49152,
    max_context_tokens=8192,
    rope_theta=100000.0,
    rope_pairing=RopePairing.INTERLEAVED,
    rope_divisors=(1.0,) * 32,
    norm_epsilon=1e-5,
    tied_embeddings=True,
)
BLOCK_BYTES = 2 * 16 * 30 * 3 * 64 * FLOAT_BYTES


def settings_of(**tables: object) -> Settings:
    return replace(Settings(source=Path("mesh.toml")), **tables)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pool", "free_bytes", "num_blocks", "reason"),
    [
        (PoolSettings(num_blocks=100), 0, 100, "pool.num_blocks"),
        (PoolSettings(kv_bytes=10 * BLOCK_BYTES + 1), 0, 10, "pool.kv_bytes"),
        (PoolSettings(), 40 * BLOCK_BYTES, 10, f"25% of {40 * BLOCK_BYTES} free bytes"),
        (PoolSettings(), 10**15, 64 * 512, f"25% of {10**15} free bytes"),
        (PoolSettings(num_blocks=100, max_total_tokens=330), 0, 20, "pool.max_total_tokens"),
        (PoolSettings(num_blocks=100, max_total_tokens=1600), 0, 100, "pool.num_blocks"),
    ],
)
def test_the_pools_size_and_where_it_comes_from(
    pool: PoolSettings, free_bytes: int, num_blocks: int, reason: str
) -> None:
    size = size_group(settings_of(pool=pool), GEOMETRY, free_bytes)
    assert (size.limits.num_blocks, size.reason, size.block_bytes) == (num_blocks, reason, BLOCK_BYTES)


@pytest.mark.parametrize("mode", ["dual", "exchange"])
def test_where_ranks_own_their_memory_both_pools_count(mode: Literal["dual", "exchange"]) -> None:
    private = settings_of(group=GroupSettings(mode=mode))
    assert size_group(private, GEOMETRY, 80 * BLOCK_BYTES).limits.num_blocks == 10
    assert size_group(settings_of(), GEOMETRY, 80 * BLOCK_BYTES).limits.num_blocks == 20


def test_a_pool_on_devices_is_not_sized_by_the_hosts_memory() -> None:
    group = GroupSettings(mode="dual", carrier="nccl", device="cuda")
    with pytest.raises(ConfigurationError, match=r'device = "cuda" and nothing sizes the KV pool.*set pool.num_blocks'):
        size_group(settings_of(group=group), GEOMETRY, 80 * BLOCK_BYTES)
    sized = size_group(settings_of(group=group, pool=PoolSettings(num_blocks=600)), GEOMETRY, 0)
    assert sized.limits.num_blocks == 600


@pytest.mark.parametrize(
    ("group", "held"),
    [
        # Of 30 layers of 3 heads each rank has 10 layers or a head; 15 layers, or 2 heads and 1, or all heads and none.
        ({"num_ranks": 3}, Fraction(1)),
        ({}, Fraction(60 + 45, 90)),
        ({"tp_weights": (9.0, 1.0)}, Fraction(90 + 45, 90)),
        ({"tp_weights": (9.0, 1.0), "kv_sharding": "tokens", "kv_tokens": (1, 3)}, Fraction(45 * 2 + 135, 180)),
    ],
)
def test_pools_in_turns_count_as_the_larger_one_of_each_rank(group: dict[str, Any], held: Fraction) -> None:
    asked = settings_of(group=GroupSettings(mode="exchange", **group), pool=PoolSettings(backing="exclusive"))
    free_bytes = 80 * BLOCK_BYTES
    assert size_group(asked, GEOMETRY, free_bytes).limits.num_blocks == int(free_bytes / 4 / BLOCK_BYTES / held)


def test_a_pool_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"1 blocks of {BLOCK_BYTES} bytes .* at least 2"):
        size_group(settings_of(), GEOMETRY, free_bytes=4 * BLOCK_BYTES)


def test_the_window_is_the_models_or_what_is_asked_for() -> None:
    pool = PoolSettings(num_blocks=600)
    assert size_group(settings_of(pool=pool), GEOMETRY, 0).limits.context_tokens == 8192
    asked = settings_of(pool=pool, model=ModelSettings(context_tokens=1000))
    assert size_group(asked, GEOMETRY, 0).limits.context_tokens == 1000
    small = settings_of(pool=PoolSettings(num_blocks=10))
    assert size_group(small, GEOMETRY, 0).limits.context_tokens == 160
    with pytest.raises(ConfigurationError, match="9000 is above the 8192 tokens"):
        size_group(settings_of(model=ModelSettings(context_tokens=9000)), GEOMETRY, 0)


def budgeted(memory_bytes: tuple[int, ...] | int, **tables: object) -> tuple[Settings, Ledger]:
    settings = settings_of(group=GroupSettings(memory_bytes=memory_bytes), **tables)
    tensors = {name: TensorPlace(0, 0, GgmlType.F32, *shape) for name, shape in expected_tensors(GEOMETRY).items()}
    return settings, plan_memory(deployment_of(settings), Model(GEOMETRY, tensors, 500_000_000))


def test_a_budget_sizes_the_pool_by_its_poorest_rank() -> None:
    """P6.6"""
    _, ledger = budgeted(2**31)
    fixed = [account.fixed_bytes for account in ledger.ranks]
    settings, ledger = budgeted((fixed[0] + 900 * BLOCK_BYTES, fixed[1] + 300 * BLOCK_BYTES))
    size = size_group(settings, GEOMETRY, 0, ledger)
    # Each of two ranks is charged half of the pool that they share.
    assert (size.limits.num_blocks, size.reason) == (600, "group.memory_bytes, rank 1 binds")


def test_a_token_vector_lets_ranks_with_uneven_memory_fill_up_together() -> None:
    """The same budgets hold more rows by the vector that the log names, and the rank that binds is said."""
    private = GroupSettings(mode="dual", kv_sharding="tokens", memory_bytes=2**31)
    tensors = {name: TensorPlace(0, 0, GgmlType.F32, *shape) for name, shape in expected_tensors(GEOMETRY).items()}
    model = Model(GEOMETRY, tensors, 500_000_000)

    def sized(group: GroupSettings) -> tuple[int, str]:
        settings = settings_of(group=group)
        size = size_group(settings, GEOMETRY, 0, plan_memory(deployment_of(settings), model))
        return size.limits.num_blocks, size.reason

    ledger = plan_memory(deployment_of(settings_of(group=private)), model)
    rooms = (700 * BLOCK_BYTES, 300 * BLOCK_BYTES)
    budgets = tuple(account.fixed_bytes + room for account, room in zip(ledger.ranks, rooms, strict=True))
    even = replace(private, memory_bytes=budgets)
    # Of N blocks each rank has half in PP, by its layers, and its share in TP: 300 = N / 2 + N / 2.
    assert sized(even) == (300, "group.memory_bytes, rank 1 binds")
    # 500 together, of which 250 are in PP on either: 450 and 50 are left, which is 9 to 1.
    assert ledger.equalising_tokens(budgets) == (9, 1)
    num_blocks, _ = sized(replace(even, kv_tokens=(9, 1)))
    assert num_blocks == 500


def test_a_head_that_several_ranks_have_counts_for_each() -> None:
    """Three KV heads on four ranks: one of them is there twice in TP."""
    by_heads = settings_of(group=GroupSettings(num_ranks=4), pool=PoolSettings(kv_bytes=30 * BLOCK_BYTES))
    assert size_group(by_heads, GEOMETRY, 0).block_bytes == BLOCK_BYTES * 4 // 3
    assert size_group(by_heads, GEOMETRY, 0).limits.num_blocks == 30 * 3 // 4


def test_a_budget_too_small_is_refused_with_what_takes_it() -> None:
    settings, ledger = budgeted((2**31, 300_000_000))
    need = ledger.ranks[1].fixed_bytes
    with pytest.raises(
        ConfigurationError, match=rf"rank 1 needs {need} bytes .*process context.* gives it 300000000: "
    ):
        size_group(settings, GEOMETRY, 0, ledger)


def test_a_pool_that_a_layout_cannot_hold_is_refused_with_both_numbers() -> None:
    _, ledger = budgeted(2**31)
    room = ledger.ranks[1].fixed_bytes + 50 * BLOCK_BYTES
    settings, ledger = budgeted((2**31, room), pool=PoolSettings(num_blocks=101))
    message = r"room for 100 blocks: .* ids below 101, and rank 1 can hold 100 in layout pp"
    with pytest.raises(ConfigurationError, match=message):
        size_group(settings, GEOMETRY, 0, ledger)
    settings, ledger = budgeted((2**31, room), pool=PoolSettings(num_blocks=100))
    assert size_group(settings, GEOMETRY, 0, ledger).limits.num_blocks == 100


def test_p3_17_a_window_above_a_sized_pool_is_refused() -> None:
    tables = {"model": ModelSettings(context_tokens=400), "pool": PoolSettings(kv_bytes=20 * BLOCK_BYTES)}
    with pytest.raises(ConfigurationError, match=r"context_tokens = 400 is above the 320 tokens .*pool\.kv_bytes"):
        size_group(settings_of(**tables), GEOMETRY, 0)
    # A pool that follows free memory is no demand: a restart beside dying ranks must not be refused for it.
    free = settings_of(model=ModelSettings(context_tokens=400))
    assert size_group(free, GEOMETRY, 80 * BLOCK_BYTES).limits.context_tokens == 320


def test_settings_become_limits() -> None:
    scheduler = SchedulerSettings(
        max_resident_requests=5, max_queued_requests=6, chunk_tokens=7, max_batch_rows=8, steps_ahead=3
    )
    limits = size_group(settings_of(scheduler=scheduler, pool=PoolSettings(num_blocks=600)), GEOMETRY, 0).limits
    assert (limits.max_resident_requests, limits.max_queued_requests) == (5, 6)
    assert (limits.chunk_tokens, limits.max_batch_tokens, limits.steps_ahead) == (7, 8, 3)
    assert limits.num_vocab == 49152


def test_parity_is_where_attention_costs_what_the_matrices_do() -> None:
    products = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    assert parity_tokens(GEOMETRY) == products // (2 * 576)


def test_layouts_have_the_groups_ranks() -> None:
    size = size_group(settings_of(group=GroupSettings(num_ranks=3), pool=PoolSettings(num_blocks=600)), GEOMETRY, 0)
    assert size.layouts[LayoutKind.PP].num_stages == 3 and size.layouts[LayoutKind.TP].num_stages == 1
    assert all(layout.sampling_rank == 2 for layout in size.layouts.values())
    with pytest.raises(ConfigurationError, match="does not fit this model"):
        size_group(settings_of(group=GroupSettings(num_ranks=31)), GEOMETRY, 10**12)


def test_free_memory_is_measured() -> None:
    assert 2**20 < free_memory_bytes() < 2**50


def test_generations_grow_over_restarts_and_clocks_that_go_back(tmp_path: Path) -> None:
    now_ns = 5_000_000_000
    counter = GenerationCounter(tmp_path / "generation", clock_ns=lambda: now_ns)
    assert [counter.next(), counter.next()] == [5000, 5001]
    now_ns = 1_000_000
    restarted = GenerationCounter(tmp_path / "generation", clock_ns=lambda: now_ns)
    assert restarted.next() == 5002
    now_ns = 9_000_000_000
    assert restarted.next() == 9000


def test_a_damaged_record_of_generations_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("garbage")
    assert GenerationCounter(tmp_path / "generation", clock_ns=lambda: 7_000_000).next() == 7
    assert (tmp_path / "generation").read_text() == "7\n"
