"""Makes a rank's memory, by mode: the one place that knows all kinds of weights and of rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.models.geometry import ModelGeometry
from services.models.model_files import ModelFiles
from services.placement.exchange_plan import PAGE_BYTES
from services.placement.ledger import PoolBacking
from services.placement.staging import BATCH_BYTES
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.pages.backing import Backing, FreeBytes
from services.worker.memory.rank_memory import RankMemory, RankWeights
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.rows.pool_pair import PoolPair
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.rows.shared_rows import SharedRows
from services.worker.memory.weights.arena_weights import arena_weights
from services.worker.memory.weights.image_weights import image_weights
from services.worker.memory.weights.kept_weights import KeptWeights, mapped_weights, owned_weights
from services.worker.memory.weights.mapped import WeightStore
from services.worker.memory.wire import MoveBounds, Wire

OwnedMode = Literal["dual", "exchange", "image"]
"""Modes in which ranks own their memory."""


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
    batch_bytes: int = BATCH_BYTES
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
            self.batch_bytes,
            is_host=not self.device.is_cuda,
        )


def shared_memory(
    rank: Rank, store: WeightStore, pool_fd: int, geometry: ModelGeometry, layouts: Mapping[LayoutKind, Layout]
) -> RankMemory:
    """One copy of weights and rows that all ranks of a host map."""
    return RankMemory(mapped_weights(store), SharedRows(rank, pool_fd, geometry, layouts))


def owned_memory(
    files: ModelFiles, layouts: Mapping[LayoutKind, Layout], carrier: Carrier, spec: OwnedMemorySpec
) -> RankMemory:
    """Takes the memory and loads one rank's weights.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        BackingError: there is no memory for the weights.
        ColdImageError: the directory for cold images cannot be used.
    """
    wire = Wire(carrier, spec.bounds)
    rows = spec.row_pools(files, layouts, wire)
    return RankMemory(_weights(files, layouts, wire, spec), rows, wire)


def _weights(files: ModelFiles, layouts: Mapping[LayoutKind, Layout], wire: Wire, spec: OwnedMemorySpec) -> RankWeights:
    match spec.mode:
        case "dual":
            own = owned_weights(files, wire.rank, layouts, spec.device)
            return KeptWeights(own, own.num_bytes)
        case "exchange":
            of_arena = (spec.make_backing, spec.page_bytes, spec.device.kind)
            return arena_weights(files, layouts, wire, spec.kind, *of_arena)
        case "image":
            on_host = replace(spec, device=HOST, free_bytes=HOST.free_bytes) if spec.device.is_cuda else spec
            of_images = (spec.kind, spec.make_backing, on_host.make_backing, spec.cold_directory, spec.device.kind)
            return image_weights(files, layouts, wire.rank, *of_images, wire.tally)
