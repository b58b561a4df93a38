"""The KV pool: one region that all ranks of a host map, with a view of keys and of values per layer.

Never allocates a block and never moves a row: the scheduler's block ids are places here, the same in both layouts. In
PP a rank touches the planes of its layers, in TP the columns of its heads. A head that several ranks have in TP has a
column for each of them: a rank reads what it wrote itself, or what PP wrote to all of them. Order in memory, outermost
first: layer, keys then values, block, KV head, slot, element; float32. A fresh region reads as zero.
"""

from copy import copy
from mmap import PAGESIZE
from typing import Protocol, Self

import torch

from services.core.blocks import kv_block_bytes
from services.core.ids import BLOCK_SLOTS
from services.core.layout import Span
from services.models.geometry import ModelGeometry
from services.worker.memory.pages.shared_memory import SharedRegion
from services.worker.memory.rows.exclusive_pools import PlaneShape

FLOAT_BYTES = 4


class ByLayer(Protocol):
    """Planes by the model's layer."""

    def __getitem__(self, layer: int, /) -> torch.Tensor:
        """One layer's plane."""


class Pool(Protocol):
    """What a stage writes rows to and reads them from; planes are [blocks, heads, 16, head_dim] float32."""

    @property
    def num_blocks(self) -> int:
        """Ids that blocks have, the same in every pool."""

    @property
    def places(self) -> torch.Tensor | None:
        """[num_blocks] int32: where in a plane each block lies, -1: on another rank. None: all here, at their ids."""

    @property
    def num_bytes(self) -> int:
        """Of addresses; memory is taken when first touched."""

    @property
    def first_kv_head(self) -> int:
        """The model's KV head at place 0 of every plane; below 0 where the place of a rank's heads is above theirs."""

    @property
    def copied_kv_heads(self) -> tuple[int, ...]:
        """Heads to be written once more, in this order behind all others: ranks read them from columns of their own."""

    @property
    def keys(self) -> ByLayer:
        """Of every layer that the rank computes."""

    @property
    def values(self) -> ByLayer:
        """Of the same layers."""


class KvPool:
    """`keys[layer]` and `values[layer]`: [num_blocks, num_kv_heads and copies, 16, head_dim] float32."""

    places = None

    def __init__(self, fd: int, geometry: ModelGeometry, num_blocks: int, num_copies: int = 0) -> None:
        """`num_copies`: columns behind the heads' own, for further ranks that have a head."""
        self.num_blocks = num_blocks
        self.first_kv_head = 0
        self.copied_kv_heads: tuple[int, ...] = ()
        num_columns = geometry.num_kv_heads + num_copies
        self.num_bytes = num_blocks * kv_block_bytes(geometry.num_layers, num_columns, geometry.head_dim, FLOAT_BYTES)
        self._shape = PlaneShape(2 * geometry.num_layers, self.num_bytes // (2 * geometry.num_layers * num_blocks))
        self._region = region = SharedRegion("KV pool", fd, self.num_bytes)
        shape = (geometry.num_layers, 2, num_blocks, num_columns, BLOCK_SLOTS, geometry.head_dim)
        planes = region.tensor(torch.float32, shape)
        self.keys: tuple[torch.Tensor, ...] = tuple(layer[0] for layer in planes)
        self.values: tuple[torch.Tensor, ...] = tuple(layer[1] for layer in planes)

    def release_above(self, num_blocks: int) -> int:
        """Returns pages that have only rows of blocks from `num_blocks` on, for all ranks; the bytes of memory."""
        before, held = self._region.held_bytes(), Span(0, num_blocks)
        for begin, end in self._shape.gaps(held, self.num_blocks, PAGESIZE, self.num_bytes):
            self._region.release(begin, end)
        return max(0, before - self._region.held_bytes())

    def seen(self, first_kv_head: int, copied_kv_heads: tuple[int, ...] = ()) -> Self:
        """The same bytes as one rank reads and writes them under one layout."""
        view = copy(self)
        view.first_kv_head, view.copied_kv_heads = first_kv_head, copied_kv_heads
        return view
