"""The two layouts of this deployment, from the model's geometry, its weight types and the configured vectors.

Pure. Both are computed at start by every rank from the same numbers, so that no rank needs to be told its share.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind
from services.core.layout import Layout, LayoutError, ShardUnits
from services.models.geometry import ModelGeometry
from services.models.ggml_types import block_length
from services.models.tensor_places import TensorPlace
from services.placement.cuts import pp_layout, tp_layout

WEIGHT_STEPS = 1 << 20
"""Whole steps of the smallest `tp_weights` entry: shares are compared as whole numbers, equal ones stay equal."""


def shard_units(geometry: ModelGeometry, tensors: Mapping[str, TensorPlace]) -> ShardUnits:
    """What is cut, and how finely: the FFN's unit is what every layer's block length along that axis divides."""
    ffn_blocks = {block_length(place.ggml_type) for name, place in tensors.items() if name.endswith(".ffn_down")}
    return ShardUnits(
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        ffn=geometry.ffn_size,
        ffn_unit=math.lcm(*ffn_blocks),
        vocab=geometry.vocab_size,
    )


def both_layouts(
    units: ShardUnits,
    num_ranks: int,
    pp_layers: Sequence[int] | None,
    tp_weights: Sequence[float] | None,
    kv_tokens: Sequence[int] | None = None,
) -> dict[LayoutKind, Layout]:
    """The PP and the TP layout of the group; where ranks outnumber KV heads, several have the same one in TP.

    `kv_tokens`: the TP layout's cache is cut by tokens in these proportions, not by heads; one rank has all of it.

    Raises:
        ConfigurationError: a vector does not fit the model; it names the vector and both numbers.
    """
    try:
        return {
            LayoutKind.PP: pp_layout(units, num_ranks, pp_layers),
            LayoutKind.TP: tp_layout(
                units,
                num_ranks,
                None if tp_weights is None else whole_shares(tp_weights),
                kv_tokens=kv_tokens if num_ranks > 1 else None,
                replicate_kv_heads=True,
            ),
        }
    except LayoutError as error:
        raise ConfigurationError(f"[group] does not fit this model: {error}") from error


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Configured shares as whole numbers in the same proportion."""
    smallest = min(weights)
    return [round(weight / smallest * WEIGHT_STEPS) for weight in weights]


def cut_within_blocks(
    geometry: ModelGeometry, tensors: Mapping[str, TensorPlace], layouts: Collection[Layout]
) -> frozenset[str]:
    """The output projections whose columns some share cuts within a quantisation block.

    Heads are the unit there, and a head need not be a whole number of blocks; the FFN is cut on blocks by its unit.
    """
    ends = {share.heads.end * geometry.head_dim for layout in layouts for share in layout.shares}
    return frozenset(
        name
        for name, place in tensors.items()
        if name.endswith(".attn_output") and any(end % block_length(place.ggml_type) for end in ends)
    )
