"""From the settings and the model's geometry to the batch's limits and the group's layouts: once, at start.

Shares are the ranks' matter: here a layout only says how many stages and ranks there are. Refuses what could never
serve, with both numbers: a budget below what a rank needs, a pool that a layout cannot hold, a window above the pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.core.blocks import kv_block_bytes
from services.core.errors import ConfigurationError
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.core.layout import Layout, ShardUnits
from services.mesh.host_memory import HostMemoryReader
from services.mesh.settings.tables import Settings
from services.models.geometry import ModelGeometry
from services.placement.layouts import both_layouts
from services.placement.ledger import Ledger, LedgerError, check_id_space
from services.placement.rows.transfers import pooled_heads
from services.scheduler.batch.limits import BatchLimits

FLOAT_BYTES = 4
POOL_SHARE = 0.25
"""Of the memory that is free at boot, where the pool's size is not configured: ranks' activations and other processes
come later."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the group is started with."""

    limits: BatchLimits
    layouts: Mapping[LayoutKind, Layout]
    block_bytes: int
    reason: str
    """Where the pool's size comes from, for the log."""


def size_group(settings: Settings, geometry: ModelGeometry, free_bytes: int, ledger: Ledger | None = None) -> GroupSize:
    """Limits and layouts of this deployment; `free_bytes` is what a pool without a configured size takes its share of.

    `ledger`: prices the ranks where the settings give them budgets; then the pool fills those instead.

    Raises:
        ConfigurationError: the pool could not hold one short request, a rank's budget is too small, a layout cannot
            hold every block, or a layout does not fit the model.
    """
    layouts = _layouts(settings, geometry)
    block_bytes = _block_bytes(geometry, layouts)
    context = settings.model.context_tokens or geometry.max_context_tokens
    if context > geometry.max_context_tokens:
        raise ConfigurationError(
            f"model.context_tokens = {context} is above the {geometry.max_context_tokens} tokens that the model was "
            "trained for: lower it, or leave it out"
        )
    held_bytes = _held_bytes(settings, geometry, layouts, block_bytes)
    num_blocks, reason = _num_blocks(settings, block_bytes, held_bytes, context, free_bytes, ledger)
    _check_window(settings, num_blocks, reason)
    limits = BatchLimits(
        num_blocks=num_blocks,
        max_resident_requests=settings.scheduler.max_resident_requests,
        max_queued_requests=settings.scheduler.max_queued_requests,
        max_context_tokens=context,
        chunk_tokens=settings.scheduler.chunk_tokens,
        max_batch_tokens=settings.scheduler.max_batch_rows,
        steps_ahead=settings.scheduler.steps_ahead,
        num_vocab=geometry.vocab_size,
        attention_parity_tokens=parity_tokens(geometry),
    )
    return GroupSize(limits, layouts, block_bytes, reason)


def parity_tokens(geometry: ModelGeometry) -> int:
    """Context length at which a token's attention needs as many multiplications as its matrix products do."""
    heads = geometry.num_heads * geometry.head_dim
    kv_heads = geometry.num_kv_heads * geometry.head_dim
    per_layer = geometry.hidden_size * (2 * heads + 2 * kv_heads + 3 * geometry.ffn_size)
    return max(BLOCK_SLOTS, per_layer // (2 * heads))


def free_memory_bytes() -> int:
    """Memory that this process's control groups, or else the machine, have left."""
    return HostMemoryReader().read().left_bytes


def _num_blocks(
    settings: Settings,
    block_bytes: int,
    held_bytes: int,
    context_tokens: int,
    free_bytes: int,
    ledger: Ledger | None,
) -> tuple[int, str]:
    pool, budgets = settings.pool, settings.group.budgets
    # More than every resident request at full length could never be used.
    num_useful = settings.scheduler.max_resident_requests * -(-context_tokens // BLOCK_SLOTS)
    if pool.num_blocks is not None:
        num_blocks, reason = pool.num_blocks, "pool.num_blocks"
    elif pool.kv_bytes is not None:
        num_blocks, reason = pool.kv_bytes // block_bytes, "pool.kv_bytes"
    elif ledger is not None and budgets is not None:
        num_blocks, reason = _budgeted_blocks(ledger, budgets)
        num_blocks = min(num_useful, num_blocks)
    elif settings.group.device != "cpu":
        raise ConfigurationError(
            f'group.device = "{settings.group.device}" and nothing sizes the KV pool: the memory that is free here is '
            "not the devices'; set pool.num_blocks, pool.kv_bytes or group.memory_bytes"
        )
    else:
        num_blocks = min(num_useful, int(free_bytes * POOL_SHARE) // held_bytes)
        reason = f"{POOL_SHARE:.0%} of {free_bytes} free bytes"
    if pool.max_total_tokens is not None and num_blocks * BLOCK_SLOTS > pool.max_total_tokens:
        num_blocks, reason = pool.max_total_tokens // BLOCK_SLOTS, "pool.max_total_tokens"
    if num_blocks < 2:
        raise ConfigurationError(
            f"the KV pool would have {num_blocks} blocks of {block_bytes} bytes ({reason}); at least 2 are needed: "
            "raise pool.kv_bytes, or free memory"
        )
    if ledger is not None and budgets is not None:
        _check_ids(ledger, budgets, num_blocks)
    return num_blocks, reason


def _budgeted_blocks(ledger: Ledger, budgets: Sequence[int]) -> tuple[int, str]:
    _check_budgets(ledger, budgets)
    capacity = ledger.capacity(budgets)
    return capacity.num_blocks, f"group.memory_bytes, {capacity.binding} binds"


def _check_budgets(ledger: Ledger, budgets: Sequence[int]) -> None:
    """Raises ConfigurationError where a rank could not even hold what comes before its pool."""
    for account, budget in zip(ledger.ranks, budgets, strict=True):
        if account.fixed_bytes > budget:
            largest = max(account.terms, key=lambda term: term.num_bytes)
            raise ConfigurationError(
                f"rank {account.rank} needs {account.fixed_bytes} bytes before its KV pool (most of them for "
                f"{largest.name}: {largest.num_bytes}) and group.memory_bytes gives it {budget}: raise it, lower "
                "scheduler.max_batch_rows, or use more ranks; `flipmesh budget` lists every term"
            )


def _check_ids(ledger: Ledger, budgets: Sequence[int], num_blocks: int) -> None:
    """Raises ConfigurationError unless each layout has room for every id that the allocator may issue."""
    _check_budgets(ledger, budgets)
    try:
        check_id_space(num_blocks, ledger.layout_blocks(budgets, num_blocks))
    except LedgerError as error:
        most = ledger.capacity(budgets).num_blocks
        raise ConfigurationError(f"group.memory_bytes has room for {most} blocks: {error}") from error


def _check_window(settings: Settings, num_blocks: int, reason: str) -> None:
    """A window that was asked for must fit a pool that was sized.

    The model's own window, or a pool that follows free memory, is no demand: the window is cut, and the log says so.
    """
    context, pool = settings.model.context_tokens, settings.pool
    is_sized = pool.num_blocks is not None or pool.kv_bytes is not None or settings.group.budgets is not None
    if context is not None and is_sized and context > num_blocks * BLOCK_SLOTS:
        raise ConfigurationError(
            f"model.context_tokens = {context} is above the {num_blocks * BLOCK_SLOTS} tokens of the KV pool "
            f"({reason}): lower context_tokens, or raise the pool"
        )


def _layouts(settings: Settings, geometry: ModelGeometry) -> dict[LayoutKind, Layout]:
    units = ShardUnits(
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        ffn=geometry.ffn_size,
        ffn_unit=1,
        vocab=geometry.vocab_size,
    )
    group = settings.group
    return both_layouts(units, group.num_ranks, group.pp_layers, group.tp_weights, group.token_vector)


def _held_bytes(
    settings: Settings, geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout], block_bytes: int
) -> int:
    """What a block takes of the host: once in a pool that all map, once a layout in two that are resident, and on each
    rank in its larger one where the two take turns."""
    if settings.group.mode == "shared":
        return block_bytes
    by_rank = list(zip(*(_rank_bytes(layout, geometry) for layout in layouts.values()), strict=True))
    return sum(max(costs) if settings.pool.backing == "exclusive" else sum(costs) for costs in by_rank)


def _rank_bytes(layout: Layout, geometry: ModelGeometry) -> list[int]:
    """Of one block on each rank; by tokens, its part of all."""
    if layout.kv_tokens is not None:
        whole = kv_block_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, FLOAT_BYTES)
        return [-(-whole * part // sum(layout.kv_tokens)) for part in layout.kv_tokens]
    shares = layout.shares
    return [kv_block_bytes(len(own.layers), len(own.kv_heads), geometry.head_dim, FLOAT_BYTES) for own in shares]


def _block_bytes(geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout]) -> int:
    """One block over all ranks, in the layout where it takes more: a KV head that several have is there for each."""
    copied = pooled_heads(layouts[LayoutKind.TP], geometry.num_kv_heads).copied
    return kv_block_bytes(geometry.num_layers, geometry.num_kv_heads + len(copied), geometry.head_dim, FLOAT_BYTES)
