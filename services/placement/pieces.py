"""Which parts of the model's tensors one rank holds in memory of its own, so that both layouts are views of them.

Pure: places are byte offsets into a range, never addresses. A part that lies within another one that the rank holds
anyway is not held twice: its TP shards of its own PP layers, and a tied head within the embedding.

Invariants: every shard of the rank, under either layout, lies within one piece; no piece lies within another.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.core.layout import Layout, ShardUnits
from services.models.ggml_types import block_bytes, block_length
from services.models.tensor_places import TensorPlace
from services.placement.shares import CanonicalTensor, Cut, TensorShard, canonical_tensor, held_shards

ALIGN_BYTES = 64
"""Pieces begin at cache lines."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, named after the tensor whose bytes it is, at its place in the rank's range."""

    shard: TensorShard
    is_expanded: bool
    """Float32, because some share cuts it within a quantisation block."""
    offset: int
    num_bytes: int


def canonical_tensors(
    tensors: Mapping[str, TensorPlace], expanded: Collection[str], *, is_tied: bool
) -> tuple[CanonicalTensor, ...]:
    """The model's tensors as ranks hold them: as stored, but for those that are `expanded`."""
    found = []
    for name, place in tensors.items():
        tensor = canonical_tensor(
            name,
            place.rows,
            place.columns,
            block_columns=block_length(place.ggml_type),
            block_bytes=block_bytes(place.ggml_type),
            source="token_embd" if is_tied and name == "output" else None,
        )
        found.append(replace(tensor, block_columns=1, block_bytes=FLOAT_BYTES) if name in expanded else tensor)
    return tuple(found)


def matrices(tensors: Iterable[CanonicalTensor]) -> tuple[CanonicalTensor, ...]:
    """All but norms, which are small: every rank keeps those of both layouts beside its pieces."""
    return tuple(tensor for tensor in tensors if tensor.cut not in (Cut.WHOLE, Cut.HEAD_NORM))


def resident_pieces(
    rank: int,
    layouts: Sequence[Layout],
    units: ShardUnits,
    tensors: Sequence[CanonicalTensor],
    expanded: Collection[str],
) -> tuple[Piece, ...]:
    """What a rank holds so that all `layouts` are views, each piece at its place, in the order of the model's tensors.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    wanted: dict[str, list[TensorShard]] = {tensor.name: [] for tensor in tensors}
    for layout in layouts:
        for shard in held_shards(layout, units, tensors)[rank]:
            source = by_name[shard.tensor].source
            wanted[source].append(replace(shard, tensor=source))
    pieces, offset = [], 0
    for source, shards in wanted.items():
        for shard in _outermost(shards):
            num_bytes = by_name[source].num_bytes(shard.rows, shard.columns)
            pieces.append(Piece(shard, source in expanded, offset, num_bytes))
            offset += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(pieces)


def _outermost(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Those that lie within no other, each once."""
    distinct = list(dict.fromkeys(shards))
    return [one for one in distinct if not any(other is not one and other.covers(one) for other in distinct)]


def total_bytes(pieces: Sequence[Piece]) -> int:
    """Of the range that holds them all."""
    return max((piece.offset + piece.num_bytes for piece in pieces), default=0)
