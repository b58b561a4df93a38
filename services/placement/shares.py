"""Which rank holds which rows and columns of each tensor, as values computed from a layout.

Never knows an address, a file or a model: a tensor is a matrix of some class of cut, and a vector is a matrix of one
row. Rows and columns are those of the tensor as the files have it, half-open.

Invariants: the shards of a layout cover every tensor; a rank lists no bytes twice (a tied head that lies within the
embedding it holds is a view of that).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from services.core.layout import Layout, LayoutError, RankShare, ShardUnits, Span


class Cut(Enum):
    """What a tensor's rows or columns are shared by."""

    HEAD_ROWS = auto()
    HEAD_COLUMNS = auto()
    KV_HEAD_ROWS = auto()
    FFN_ROWS = auto()
    FFN_COLUMNS = auto()
    VOCAB_ROWS = auto()
    """The head: where logits are computed."""
    EMBEDDING = auto()
    """Whole or by rows of the vocabulary, as the layout says: where the residual stream begins."""
    HEAD_NORM = auto()
    """Whole: where logits are computed."""
    WHOLE = auto()
    """Whole on every rank that has the layer."""


CANONICAL_CUTS: Mapping[str, Cut] = MappingProxyType(
    {
        "token_embd": Cut.EMBEDDING,
        "output_norm": Cut.HEAD_NORM,
        "output": Cut.VOCAB_ROWS,
        "attn_norm": Cut.WHOLE,
        "attn_q": Cut.HEAD_ROWS,
        "attn_k": Cut.KV_HEAD_ROWS,
        "attn_v": Cut.KV_HEAD_ROWS,
        "attn_output": Cut.HEAD_COLUMNS,
        "ffn_norm": Cut.WHOLE,
        "ffn_gate": Cut.FFN_ROWS,
        "ffn_up": Cut.FFN_ROWS,
        "ffn_down": Cut.FFN_COLUMNS,
    }
)
"""By the last part of a canonical name."""


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """One tensor of the model, and how its bytes lie: each row in blocks of `block_columns` elements."""

    name: str
    rows: int
    columns: int
    cut: Cut
    layer: int | None
    block_columns: int
    block_bytes: int
    source: str
    """The tensor whose bytes these are: its own name, or that of the one it is tied to."""
    num_padded_rows: int = 0
    """Rows of zeros after the last, in no file."""

    def num_bytes(self, rows: Span, columns: Span) -> int:
        """Bytes of a part of whole blocks; padded rows belong to the last row's part."""
        padded = self.num_padded_rows if len(rows) and rows.end == self.rows else 0
        return (len(rows) + padded) * (-(-len(columns) // self.block_columns)) * self.block_bytes


def canonical_tensor(
    name: str,
    rows: int,
    columns: int,
    *,
    block_columns: int = 1,
    block_bytes: int = 4,
    source: str | None = None,
    num_padded_rows: int = 0,
) -> CanonicalTensor:
    """A tensor by its canonical name, such as `layers.3.attn_q`; float32 by default, its own source by default.

    Raises:
        LayoutError: nobody says how a tensor of this name is cut.
    """
    scope, _, part = name.rpartition(".")
    if part not in CANONICAL_CUTS:
        raise LayoutError(f"tensor {name!r}: {part!r} has no cut; these have: {', '.join(CANONICAL_CUTS)}")
    return CanonicalTensor(
        name=name,
        rows=rows,
        columns=columns,
        cut=CANONICAL_CUTS[part],
        layer=int(scope.removeprefix("layers.")) if scope else None,
        block_columns=block_columns,
        block_bytes=block_bytes,
        source=source or name,
        num_padded_rows=num_padded_rows,
    )


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The part of a tensor that a rank holds."""

    tensor: str
    rows: Span
    columns: Span

    def covers(self, other: "TensorShard") -> bool:
        """Whether `other`'s part lies within this one; whose names they have is the caller's matter."""
        return self.rows.covers(other.rows) and self.columns.covers(other.columns)


RankShards = tuple[tuple[TensorShard, ...], ...]
"""`[rank]`: what it holds, in the order of the model's tensors."""


def held_shards(layout: Layout, units: ShardUnits, tensors: Sequence[CanonicalTensor]) -> RankShards:
    """What each rank holds under a layout.

    Raises:
        LayoutError: a cut falls within a quantisation block, or a tensor is not a whole number of its units.
    """
    return tuple(_rank_shards(layout, share, units, tensors) for share in layout.shares)


def _rank_shards(
    layout: Layout, share: RankShare, units: ShardUnits, tensors: Sequence[CanonicalTensor]
) -> tuple[TensorShard, ...]:
    held: dict[str, list[TensorShard]] = {}
    shards = []
    for tensor in tensors:
        shard = _shard(layout, share, units, tensor)
        same_source = held.setdefault(tensor.source, [])
        if shard is not None and not any(other.covers(shard) for other in same_source):
            same_source.append(shard)
            shards.append(shard)
    return tuple(shards)


def _shard(layout: Layout, share: RankShare, units: ShardUnits, tensor: CanonicalTensor) -> TensorShard | None:
    rows, columns = Span(0, tensor.rows), Span(0, tensor.columns)
    if tensor.layer is not None and tensor.layer not in share.layers:
        return None
    match tensor.cut:
        case Cut.HEAD_ROWS:
            rows = _in_units(tensor, share.heads, tensor.rows, units.num_heads)
        case Cut.HEAD_COLUMNS:
            columns = _in_units(tensor, share.heads, tensor.columns, units.num_heads)
        case Cut.KV_HEAD_ROWS:
            rows = _in_units(tensor, share.kv_heads, tensor.rows, units.num_kv_heads)
        case Cut.FFN_ROWS:
            rows = _in_units(tensor, share.ffn, tensor.rows, units.ffn)
        case Cut.FFN_COLUMNS:
            columns = _in_units(tensor, share.ffn, tensor.columns, units.ffn)
        case Cut.VOCAB_ROWS:
            rows = _in_units(tensor, share.vocab, tensor.rows, units.vocab)
        case Cut.EMBEDDING if share.layers.begin > 0:
            return None
        case Cut.EMBEDDING if layout.embedding_by_rows:
            rows = _in_units(tensor, share.vocab, tensor.rows, units.vocab)
        case Cut.HEAD_NORM if not share.has_head:
            return None
        case Cut.EMBEDDING | Cut.HEAD_NORM | Cut.WHOLE:
            pass
    return _checked(tensor, rows, columns) if len(rows) and len(columns) else None


def _in_units(tensor: CanonicalTensor, span: Span, length: int, num_units: int) -> Span:
    unit, rest = divmod(length, num_units)
    if rest:
        raise LayoutError(
            f"tensor {tensor.name!r}: {length} rows or columns are not a whole number for each of {num_units} units; "
            "its shape and the model's geometry contradict each other"
        )
    return span.times(unit)


def _checked(tensor: CanonicalTensor, rows: Span, columns: Span) -> TensorShard:
    for end in (columns.begin, columns.end):
        if end % tensor.block_columns and end != tensor.columns:
            raise LayoutError(
                f"tensor {tensor.name!r}: a share ends at column {end}, within a block of {tensor.block_columns} "
                "columns; choose shares that end on blocks, or hold this tensor expanded"
            )
    return TensorShard(tensor.name, rows, columns)
