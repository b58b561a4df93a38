"""Where every piece of the weights lies in every rank's arena, and the two exchanges between the layouts.

Pure but for the files' directory, and the same on every rank. Vectors are no part of it: norms are small, and every
rank keeps those of both layouts beside its arena.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.ids import LayoutKind
from services.core.layout import Layout
from services.models.model_files import ModelFiles
from services.placement.arena import Arenas, PageMap, place_pieces
from services.placement.compatibility import Device, expanded_by
from services.placement.exchange import Exchange, exchange_plans
from services.placement.layouts import cut_within_blocks, shard_units
from services.placement.pieces import canonical_tensors, matrices
from services.placement.shares import CanonicalTensor, held_shards
from services.placement.staging import PAGE_STAGING_BYTES

PAGE_BYTES = 16 * 1024
"""Pieces are padded to it: 1.5% of a model of 90 MB, and a plan of a few thousand pages takes 0.2 s."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Both layouts in one arena a rank."""

    arenas: Arenas
    exchanges: Mapping[LayoutKind, Exchange]
    """By target."""
    tensors: Mapping[str, CanonicalTensor]
    expanded: frozenset[str]
    staging_pages: int

    def page_map(self, kind: LayoutKind, rank: int) -> PageMap:
        """Pages of each piece that a rank holds under a layout."""
        return (self.arenas.first if kind is LayoutKind.PP else self.arenas.second)[rank]


def exchange_plan(
    files: ModelFiles, layouts: Mapping[LayoutKind, Layout], page_bytes: int = PAGE_BYTES, kind: Device = Device.CPU
) -> ExchangePlan:
    """Plans both directions, for ranks on devices of one kind.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
    """
    units = shard_units(files.geometry, files.tensors)
    expanded = cut_within_blocks(files.geometry, files.tensors, layouts.values()) | expanded_by(kind, files.tensors)
    tensors = matrices(canonical_tensors(files.tensors, expanded, is_tied=files.geometry.tied_embeddings))
    pp, tp = (held_shards(layouts[kind], units, tensors) for kind in (LayoutKind.PP, LayoutKind.TP))
    arenas = place_pieces(tensors, pp, tp, page_bytes)
    staging_pages = max(1, PAGE_STAGING_BYTES // page_bytes)
    to_tp, to_pp = exchange_plans(arenas, staging_pages)
    by_name = {tensor.name: tensor for tensor in tensors}
    exchanges = {LayoutKind.TP: to_tp, LayoutKind.PP: to_pp}
    return ExchangePlan(arenas, exchanges, by_name, expanded, staging_pages)
