"""The KV pool: one region that all ranks of a host map, with a view of keys and of values per layer.

Never allocates a block and never moves a row: the scheduler's block ids are places here, the same in both layouts. In
PP a rank touches the planes of its layers, in TP the columns of its heads. Order in memory, outermost first: layer,
keys then values, block, KV head, slot, element; float32. A fresh region reads as zero.
"""

from typing import Protocol

import torch

from services.core.ids import BLOCK_SLOTS
from services.formats.geometry import ModelGeometry
from services.worker.shared_memory import SharedRegion

FLOAT_BYTES = 4


def block_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_layer = geometry.num_kv_heads * BLOCK_SLOTS * geometry.head_dim * FLOAT_BYTES
    return 2 * geometry.num_layers * per_layer


class ByLayer(Protocol):
    """Planes by the model's layer."""

    def __getitem__(self, layer: int, /) -> torch.Tensor:
        """One layer's plane."""


class Pool(Protocol):
    """What a stage writes rows to and reads them from; planes are [num_blocks, heads, 16, head_dim] float32."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each plane; ids are the same in every pool."""

    @property
    def num_bytes(self) -> int:
        """Of addresses; memory is taken when first touched."""

    @property
    def first_kv_head(self) -> int:
        """The model's KV head at place 0 of every plane."""

    @property
    def keys(self) -> ByLayer:
        """Of every layer that the rank computes."""

    @property
    def values(self) -> ByLayer:
        """Of the same layers."""


class KvPool:
    """`keys[layer]` and `values[layer]`: [num_blocks, num_kv_heads, 16, head_dim] float32."""

    def __init__(self, fd: int, geometry: ModelGeometry, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.first_kv_head = 0
        self.num_bytes = num_blocks * block_bytes(geometry)
        region = SharedRegion("KV pool", fd, self.num_bytes)
        shape = (geometry.num_layers, 2, num_blocks, geometry.num_kv_heads, BLOCK_SLOTS, geometry.head_dim)
        planes = region.tensor(torch.float32, shape)
        self.keys: tuple[torch.Tensor, ...] = tuple(layer[0] for layer in planes)
        self.values: tuple[torch.Tensor, ...] = tuple(layer[1] for layer in planes)
