"""Damages rows of running requests on this rank, so that an instrument can show that it sees damage.

Runs on the model thread, between two steps, and only where `[debug] enabled` allows it. Touches rows that are written
and that this rank reads in the layout in force; never a block table, never a request that is not running.

Shapes: R places of the request table, C tokens, planes [blocks here, heads here, 16, head dim].
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from services.core.ids import BLOCK_SLOTS
from services.core.layout import Layout, Span
from services.mesh.debug.damage import DamageKind, NothingToDamageError
from services.worker.memory.rows.kv_cache import Pool
from services.worker.steps.table import RequestTable


@dataclass(frozen=True, slots=True)
class RowsHere:
    """The rows of one rank in the layout in force."""

    pool: Pool
    table: RequestTable
    layers: Span
    heads: Span
    """Places in a plane."""

    def whole_blocks(self, index: int) -> list[int]:
        """Places in a plane of one request's blocks that are full and lie here, in the order of its tokens."""
        num_full = max(int(self.table.num_tokens[index]) - 1, 0) // BLOCK_SLOTS
        blocks = self.table.blocks_RB[index, :num_full].tolist()
        places = self.pool.places
        here = blocks if places is None else [int(places[block]) for block in blocks]
        return [place for place in here if place >= 0]

    def planes(self, layers: Span) -> Iterator[Tensor]:
        """Views of this rank's heads of these layers, keys and values."""
        for layer in range(layers.begin, layers.end):
            for side in (self.pool.keys, self.pool.values):
                yield side[layer][:, self.heads.begin : self.heads.end]


def rows_here(pool: Pool, table: RequestTable, layout: Layout, rank: int) -> RowsHere:
    """What `rank` reads of the cache in this layout."""
    share = layout.shares[rank]
    heads = share.kv_heads
    if layout.kv_tokens is not None:
        heads = Span(0, max(each.kv_heads.end for each in layout.shares))
    first = pool.first_kv_head
    return RowsHere(pool, table, share.layers, Span(heads.begin - first, heads.end - first))


def damage(rows: RowsHere, kind: DamageKind, seed: int) -> str:
    """Does one damage; says what was damaged.

    Raises:
        NothingToDamageError: no running request has a full block here, or this rank has no layers or heads.
    """
    draw = random.Random(seed)
    running = [index for index in rows.table.running() if rows.whole_blocks(index)]
    least = 2 if kind is DamageKind.FOREIGN_BLOCK else 1
    if len(running) < least or not len(rows.layers) or not len(rows.heads):
        raise NothingToDamageError(
            f"{kind.name}: {least} running requests with a full block on this rank expected, found {len(running)}, in "
            f"{len(rows.layers)} layers and {len(rows.heads)} heads"
        )
    victim, *others = draw.sample(running, least)
    blocks = rows.whole_blocks(victim)
    foreign = draw.choice(rows.whole_blocks(others[0])) if others else None
    layer, head = draw.randrange(rows.layers.begin, rows.layers.end), draw.randrange(len(rows.heads))
    target = _Target(victim, blocks, draw.choice(blocks), layer, head, draw.randrange(BLOCK_SLOTS), foreign)
    _change(rows, kind, target)
    return f"{kind.name} of request {victim}: {target}"


@dataclass(frozen=True, slots=True)
class _Target:
    """What was drawn; each kind changes some of it."""

    request: int
    blocks: list[int]
    block: int
    layer: int
    head: int
    slot: int
    foreign: int | None
    """A block of another request."""

    def __str__(self) -> str:
        return f"block {self.block}, layer {self.layer}, head {self.head}, slot {self.slot} were drawn"


def _change(rows: RowsHere, kind: DamageKind, target: _Target) -> None:
    """Writes to planes: [blocks, heads, 16, head dim]."""
    is_one_layer = kind in (DamageKind.HEAD, DamageKind.LAYER)
    layers = Span(target.layer, target.layer + 1) if is_one_layer else rows.layers
    for plane in rows.planes(layers):
        match kind:
            case DamageKind.BLOCK:
                plane[target.block] = 0
            case DamageKind.HEAD:
                plane[target.blocks, target.head] = 0
            case DamageKind.LAYER:
                plane[target.blocks] = 0
            case DamageKind.ROW:
                plane[target.block, :, target.slot] = 0
            case DamageKind.FOREIGN_BLOCK:
                plane[target.block] = plane[target.foreign]
            case DamageKind.STALE_BLOCK:
                plane[target.block, :, 1:] = plane[target.block, :, :-1].clone()
