"""Small models as tensors, with bytes of their own, for tests of what moves in a flip."""

import random
from dataclasses import dataclass, field

from services.core.layout import Layout, ShardUnits, Span
from services.placement.cuts import pp_layout, tp_layout
from services.placement.shares import CanonicalTensor, RankShards, TensorShard, canonical_tensor, held_shards

BLOCK_COLUMNS, BLOCK_BYTES = 2, 3


@dataclass(frozen=True)
class ShardModel:
    units: ShardUnits
    head_dim: int = 2
    hidden: int = 4
    tied: bool = False
    contents: dict[str, bytes] = field(default_factory=dict)

    def tensors(self) -> list[CanonicalTensor]:
        units, hidden = self.units, self.hidden
        q, kv = units.num_heads * self.head_dim, units.num_kv_heads * self.head_dim
        layer = {
            "attn_norm": (1, hidden),
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_norm": (1, hidden),
            "ffn_gate": (units.ffn, hidden),
            "ffn_up": (units.ffn, hidden),
            "ffn_down": (hidden, units.ffn),
        }
        shapes = {"token_embd": (units.vocab, hidden)}
        for index in range(units.num_layers):
            shapes |= {f"layers.{index}.{part}": shape for part, shape in layer.items()}
        shapes |= {"output_norm": (1, hidden), "output": (units.vocab, hidden)}
        return [
            canonical_tensor(
                name,
                *shape,
                block_columns=BLOCK_COLUMNS,
                block_bytes=BLOCK_BYTES,
                source="token_embd" if self.tied and name == "output" else None,
                num_padded_rows=units.num_padded_vocab if name in ("token_embd", "output") else 0,
            )
            for name, shape in shapes.items()
        ]

    def held(self, layout: Layout) -> RankShards:
        return held_shards(layout, self.units, self.tensors())

    def piece_bytes(self, tensor: CanonicalTensor, rows: Span, columns: Span) -> bytes:
        """A rectangle's blocks, packed by rows, then its padded rows of zeros."""
        row_blocks = tensor.columns // BLOCK_COLUMNS
        num_bytes = tensor.rows * row_blocks * BLOCK_BYTES
        whole = self.contents.setdefault(tensor.source, random.Random(tensor.source).randbytes(num_bytes))
        first, last = columns.begin // BLOCK_COLUMNS, columns.end // BLOCK_COLUMNS
        packed = b"".join(
            whole[(row * row_blocks + first) * BLOCK_BYTES : (row * row_blocks + last) * BLOCK_BYTES]
            for row in range(rows.begin, rows.end)
        )
        return packed.ljust(tensor.num_bytes(rows, columns), b"\0")


def cells(shard: TensorShard) -> set[tuple[int, int]]:
    return {
        (row, column)
        for row in range(shard.rows.begin, shard.rows.end)
        for column in range(shard.columns.begin, shard.columns.end)
    }


SMALL = ShardModel(ShardUnits(num_layers=5, num_heads=6, num_kv_heads=3, ffn=14, ffn_unit=4, vocab=11))
TIED = ShardModel(
    ShardUnits(num_layers=5, num_heads=6, num_kv_heads=3, ffn=14, ffn_unit=4, vocab=11, vocab_unit=4), tied=True
)
TWO_KV_HEADS = ShardModel(ShardUnits(num_layers=5, num_heads=8, num_kv_heads=2, ffn=16, ffn_unit=2, vocab=9), tied=True)
HEADS_48 = ShardModel(ShardUnits(num_layers=4, num_heads=48, num_kv_heads=48, ffn=64, ffn_unit=2, vocab=64))
GROUPS_48 = ShardModel(ShardUnits(num_layers=4, num_heads=48, num_kv_heads=4, ffn=64, ffn_unit=2, vocab=64))


def _case(
    model: ShardModel,
    pp_layers: tuple[int, ...],
    tp_weights: tuple[int, ...],
    *,
    replicate: bool = False,
    by_rows: bool = False,
) -> tuple[ShardModel, Layout, Layout]:
    num_ranks = len(pp_layers)
    tp = tp_layout(model.units, num_ranks, tp_weights, replicate_kv_heads=replicate, embedding_by_rows=by_rows)
    return model, pp_layout(model.units, num_ranks, pp_layers), tp


CASES = {
    "one rank": _case(TIED, (5,), (1,)),
    "two even": _case(HEADS_48, (2, 2), (1, 1)),
    "two, (2, 1)": _case(SMALL, (3, 2), (2, 1)),
    "two, tied, padded": _case(TIED, (1, 4), (2, 1)),
    "two, tied, embedding by rows": _case(TIED, (4, 1), (1, 1), by_rows=True),
    "three, 48 heads": _case(HEADS_48, (2, 1, 1), (30, 17, 17)),
    "three, 48 heads in 4 groups": _case(GROUPS_48, (1, 1, 2), (30, 17, 17)),
    "three, two KV heads": _case(TWO_KV_HEADS, (1, 3, 1), (1, 1, 1), replicate=True),
    "four, (1, 1, 1, 5), a rank without heads": _case(SMALL, (2, 1, 1, 1), (1, 1, 1, 5)),
    "four, (1, 1, 1, 5), replicated": _case(TWO_KV_HEADS, (1, 1, 1, 2), (1, 1, 1, 5), replicate=True),
    "four, one KV head each by two": _case(TWO_KV_HEADS, (2, 1, 1, 1), (1, 1, 1, 1), replicate=True, by_rows=True),
}
