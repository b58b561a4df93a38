"""One layout's KV pool of one rank: the layers, heads and blocks that it holds, and nothing of other ranks'.

Block ids are the scheduler's, so that a row has the same id in both layouts' pools; where a rank holds only some blocks
they lie side by side, at places that follow from the id and the token vector. Order in memory, outermost first: layer,
keys then values, block, KV head, slot, element; float32. A fresh pool reads as zero and, on a host, takes memory when
it is first touched, but where its memory is given: then whoever gives it says when it is there. A share without heads,
layers or blocks has no bytes.
"""

from mmap import PAGESIZE

import torch
from torch import Tensor

from kernels.backend import NOT_HERE
from kernels.cpu.reshard import Planes
from services.core.ids import BLOCK_SLOTS, BlockId
from services.core.layout import Span
from services.placement.rows.transfers import ALL_BLOCKS, BlockRuns, BlockShare, Holding
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.pages.private_bytes import return_pages
from services.worker.memory.rows.exclusive_pools import PlaneShape

FLOAT_BYTES = 4


class LayoutPool:
    """`keys[layer]` and `values[layer]` by the model's layer: [own blocks, own heads, 16, head_dim] float32."""

    copied_kv_heads = ()

    def __init__(
        self,
        holding: Holding,
        head_dim: int,
        num_blocks: int,
        memory: Tensor | None = None,
        device: RankDevice = HOST,
    ) -> None:
        """`memory`: uint8, as much as the planes take or more, whether it is backed or not; None: its own, there."""
        self.holding, self.num_blocks = holding, num_blocks
        self.layers, self.kv_heads = holding.layers, holding.heads
        layers, blocks = holding.layers, holding.blocks
        self.num_own_blocks = blocks.count(num_blocks)
        self.places = None if blocks == ALL_BLOCKS else _places(blocks, num_blocks).to(device.place)
        shape = (len(layers), 2, self.num_own_blocks, len(self.kv_heads), BLOCK_SLOTS, head_dim)
        self.num_bytes = torch.Size(shape).numel() * FLOAT_BYTES
        if memory is None:
            memory = device.zeros(self.num_bytes)
        self._memory = memory
        planes = memory[: self.num_bytes].view(torch.float32).view(shape)
        own = range(layers.begin, layers.end)
        self.keys = {layer: planes[layer - layers.begin, 0] for layer in own}
        self.values = {layer: planes[layer - layers.begin, 1] for layer in own}

    @property
    def first_kv_head(self) -> int:
        """The model's head at place 0 of a plane."""
        return self.kv_heads.begin

    def release_above(self, num_blocks: int) -> int:
        """Returns pages of private host memory that have only rows of blocks from `num_blocks` on; their bytes."""
        num_planes = 2 * len(self.layers)
        shape = PlaneShape(num_planes, self.num_bytes // max(num_planes * self.num_own_blocks, 1), self.holding.blocks)
        gaps = shape.gaps(Span(0, num_blocks), self.num_blocks, PAGESIZE, self.num_bytes)
        return sum(return_pages(self._memory, begin, end) for begin, end in gaps)

    def planes(self, layers: Span) -> Planes:
        """Keys and values of these layers, in the order in which both ends of a transfer name them."""
        own = range(layers.begin, layers.end)
        return Planes.of([side[layer] for layer in own for side in (self.keys, self.values)])

    def own_heads(self, heads: Span) -> Span:
        """The model's heads as places in a plane."""
        return Span(heads.begin - self.kv_heads.begin, heads.end - self.kv_heads.begin)

    def own_runs(self, runs: BlockRuns) -> BlockRuns:
        """Runs of own blocks as places in a plane."""
        blocks = self.holding.blocks
        return tuple((BlockId(blocks.local(begin)), length) for begin, length in runs)


def _places(blocks: BlockShare, num_blocks: int) -> Tensor:
    ids = map(BlockId, range(num_blocks))
    return torch.tensor([blocks.local(block) if block in blocks else NOT_HERE for block in ids], dtype=torch.int32)
