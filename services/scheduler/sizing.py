"""From the settings and the model's geometry to the batch's limits and the group's layouts: once, at start.

Shares are the ranks' matter: here a layout only says how many stages and ranks there are. Refuses what could never
serve, with both numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.core.blocks import kv_block_bytes
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.core.layout import Layout, LayoutError, ShardUnits, pp_layout, tp_layout
from services.formats.geometry import ModelGeometry
from services.mesh.errors import ConfigurationError
from services.mesh.settings import PoolSettings, SchedulerSettings, Settings
from services.scheduler.limits import BatchLimits

FLOAT_BYTES = 4
POOL_SHARE = 0.25
"""Of the memory that is free at boot, where the pool's size is not configured: ranks' activations and other processes
come later."""
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""(limit, use) of this process's control group, versions 2 and 1."""
MEMORY_STATS = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the group is started with."""

    limits: BatchLimits
    layouts: Mapping[LayoutKind, Layout]
    block_bytes: int
    reason: str
    """Where the pool's size comes from, for the log."""


def size_group(settings: Settings, geometry: ModelGeometry, free_bytes: int) -> GroupSize:
    """Limits and layouts of this deployment; `free_bytes` is what a pool without a configured size takes its share of.

    Raises:
        ConfigurationError: the pool could not hold one short request, or a layout does not fit the model.
    """
    block_bytes = kv_block_bytes(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, FLOAT_BYTES)
    context = settings.model.context_tokens or geometry.max_context_tokens
    if context > geometry.max_context_tokens:
        raise ConfigurationError(
            f"model.context_tokens = {context} is above the {geometry.max_context_tokens} tokens that the model was "
            "trained for: lower it, or leave it out"
        )
    num_blocks, reason = _num_blocks(settings.pool, settings.scheduler, block_bytes, context, free_bytes)
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
    return GroupSize(limits, _layouts(settings, geometry), block_bytes, reason)


def parity_tokens(geometry: ModelGeometry) -> int:
    """Context length at which a token's attention needs as many multiplications as its matrix products do."""
    heads = geometry.num_heads * geometry.head_dim
    kv_heads = geometry.num_kv_heads * geometry.head_dim
    per_layer = geometry.hidden_size * (2 * heads + 2 * kv_heads + 3 * geometry.ffn_size)
    return max(BLOCK_SLOTS, per_layer // (2 * heads))


def free_memory_bytes() -> int:
    """Memory that this process's control group, or else the machine, has left."""
    left = [_machine_left_bytes()]
    for limit_path, use_path in CGROUPS:
        try:
            limit, use = limit_path.read_text("ascii").strip(), int(use_path.read_text("ascii"))
        except (OSError, ValueError):
            continue
        if limit.isdecimal():
            left.append(max(0, int(limit) - use))
    return min(left)


def _machine_left_bytes() -> int:
    for line in MEMORY_STATS.read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"{MEMORY_STATS} has no MemAvailable: set pool.num_blocks or pool.kv_bytes")


def _num_blocks(
    pool: PoolSettings, scheduler: SchedulerSettings, block_bytes: int, context_tokens: int, free_bytes: int
) -> tuple[int, str]:
    if pool.num_blocks is not None:
        num_blocks, reason = pool.num_blocks, "pool.num_blocks"
    elif pool.kv_bytes is not None:
        num_blocks, reason = pool.kv_bytes // block_bytes, "pool.kv_bytes"
    else:
        # More than every resident request at full length could never be used.
        num_useful = scheduler.max_resident_requests * -(-context_tokens // BLOCK_SLOTS)
        num_blocks = min(num_useful, int(free_bytes * POOL_SHARE) // block_bytes)
        reason = f"{POOL_SHARE:.0%} of {free_bytes} free bytes"
    if pool.max_total_tokens is not None and num_blocks * BLOCK_SLOTS > pool.max_total_tokens:
        num_blocks, reason = pool.max_total_tokens // BLOCK_SLOTS, "pool.max_total_tokens"
    if num_blocks < 2:
        raise ConfigurationError(
            f"the KV pool would have {num_blocks} blocks of {block_bytes} bytes ({reason}); at least 2 are needed: "
            "raise pool.kv_bytes, or free memory"
        )
    return num_blocks, reason


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
    try:
        return {
            LayoutKind.PP: pp_layout(units, group.num_ranks, group.pp_layers),
            LayoutKind.TP: tp_layout(units, group.num_ranks),
        }
    except LayoutError as error:
        raise ConfigurationError(f"[group] does not fit this model: {error}") from error
