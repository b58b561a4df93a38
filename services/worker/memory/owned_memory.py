"""Makes the memory of a rank that owns what it holds, by mode: the one place that knows all of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.core.ids import LayoutKind
from services.core.layout import Layout
from services.models.model_files import ModelFiles
from services.placement.exchange_plan import PAGE_BYTES
from services.placement.ledger import PoolBacking
from services.placement.staging import WINDOW_BYTES
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.dual_memory import DualMemory, owned_weights
from services.worker.memory.exchange_memory import ExchangeMemory, exchange_memory
from services.worker.memory.image_memory import ImageMemory, image_memory
from services.worker.memory.pages.backing import Backing, FreeBytes
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.rows.pool_pair import PoolPair
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.wire import MoveBounds, Wire

OwnedMode = Literal["dual", "exchange", "image"]
"""Modes in which ranks own their memory."""
PrivateMemory = DualMemory | ExchangeMemory | ImageMemory


@dataclass(frozen=True, slots=True)
class OwnedMemorySpec:
    """How a rank keeps what it owns."""

    mode: OwnedMode
    kind: LayoutKind
    """The layout that is loaded at start."""
    bounds: MoveBounds
    free_bytes: FreeBytes
    page_bytes: int = PAGE_BYTES
    """Of an arena whose pages are exchanged."""
    cold_directory: Path | None = None
    """Where the image that is not needed next may lie; None: it stays in memory."""
    device: RankDevice = HOST
    backing: PoolBacking = PoolBacking.RESIDENT
    margin_bytes: int = 0
    """Free memory that a flip between pools that share one leaves."""
    window_bytes: int = WINDOW_BYTES
    """Of rows that are on their way at a time there."""

    def make_backing(self, name: str, num_bytes: int) -> Backing:
        """A range of this rank's memory."""
        return Backing(name, self.device.pages(name, num_bytes), self.free_bytes, margin_bytes=0)

    def make_pool_backing(self, name: str, num_bytes: int) -> Backing:
        """A range for a pool that takes turns: small pieces, since each plane has a border between two of them."""
        return Backing(name, self.device.fine_pages(name, num_bytes), self.free_bytes, margin_bytes=0)

    def row_pools(self, files: ModelFiles, layouts: Mapping[LayoutKind, Layout], wire: Wire) -> RowPools:
        """Both layouts' pools, both resident or in turns."""
        if self.backing is PoolBacking.RESIDENT:
            return PoolPair(files.geometry, layouts, wire, self.device)
        return ExclusiveRows(
            files.geometry,
            layouts,
            wire,
            self.make_pool_backing,
            self.margin_bytes,
            self.window_bytes,
            is_host=not self.device.is_cuda,
        )


def owned_memory(
    files: ModelFiles, layouts: Mapping[LayoutKind, Layout], carrier: Carrier, spec: OwnedMemorySpec
) -> PrivateMemory:
    """Takes the memory and loads one rank's weights.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        BackingError: there is no memory for the weights.
        ColdImageError: the directory for cold images cannot be used.
    """
    wire = Wire(carrier, spec.bounds)
    rows = spec.row_pools(files, layouts, wire)
    match spec.mode:
        case "dual":
            return DualMemory(owned_weights(files, wire.rank, layouts, spec.device), rows)
        case "exchange":
            of_arena = (spec.make_backing, spec.page_bytes, spec.device.kind)
            return exchange_memory(files, layouts, wire, rows, spec.kind, *of_arena)
        case "image":
            on_host = replace(spec, device=HOST, free_bytes=HOST.free_bytes) if spec.device.is_cuda else spec
            of_images = (spec.kind, spec.make_backing, on_host.make_backing, spec.cold_directory, spec.device.kind)
            return image_memory(files, layouts, wire, rows, *of_images)
