"""The KV pool: one region that all ranks of a host map, with a view of keys and of values per layer.

Never allocates a block and never moves a row: the scheduler's block ids are places here, the same in both layouts. In
PP a rank touches the planes of its layers, in TP the columns of its heads. Order in memory, outermost first: layer,
keys then values, block, KV head, slot, element; float32. A fresh region reads as zero.
"""

import torch

from services.core.ids import BLOCK_SLOTS
from services.formats.geometry import ModelGeometry
from services.worker.shared_memory import SharedRegion

FLOAT_BYTES = 4


def block_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one block over all layers, keys and values."""
    per_layer = geometry.num_kv_heads * BLOCK_SLOTS * geometry.head_dim * FLOAT_BYTES
    return 2 * geometry.num_layers * per_layer


class KvPool:
    """`keys[layer]` and `values[layer]`: [num_blocks, num_kv_heads, 16, head_dim] float32."""

    def __init__(self, fd: int, geometry: ModelGeometry, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * block_bytes(geometry)
        region = SharedRegion("KV pool", fd, self.num_bytes)
        shape = (geometry.num_layers, 2, num_blocks, geometry.num_kv_heads, BLOCK_SLOTS, geometry.head_dim)
        planes = region.tensor(torch.float32, shape)
        self.keys: tuple[torch.Tensor, ...] = tuple(layer[0] for layer in planes)
        self.values: tuple[torch.Tensor, ...] = tuple(layer[1] for layer in planes)
