"""Prices a model on its ranks: from layouts, tensors and sizes to the ledger's terms.

Pure: every number comes from the layouts or is given; nothing is measured here. Weights are priced by the shards that
the transfer plans use, so what is priced is what will be held.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.core.blocks import kv_block_bytes
from services.core.ids import BLOCK_SLOTS, LayoutKind, Rank
from services.core.layout import Layout, RankShare, ShardUnits, Span
from services.placement.ledger import Ledger, MemoryMode, PoolBacking, PoolCost, RankAccount, Term
from services.placement.rows.transfers import pooled_heads
from services.placement.shares import CanonicalTensor, TensorShard, held_shards
from services.placement.staging import PAGE_STAGING_BYTES, POOL_PIECE_BYTES, chunk_bytes, row_sizes

FLOAT_BYTES = 4
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What a model asks for under a pair of layouts."""

    layouts: Mapping[LayoutKind, Layout]
    units: ShardUnits
    tensors: tuple[CanonicalTensor, ...]
    """As a rank's own memory would hold them: expanded where a share cuts within a block."""
    file_bytes: int
    """Of all weight files, as ranks of one host map them together."""
    expanded_bytes: int
    """Of the tensors that `shared` mode holds expanded beside the files."""
    hidden_size: int
    head_dim: int
    kv_element_bytes: int
    max_batch_rows: int
    max_resident_requests: int
    context_tokens: int
    """Of the longest request."""
    rotary_tokens: int
    """Positions of the rotary table."""

    @property
    def block_bytes(self) -> int:
        """One block over all layers and heads."""
        units = self.units
        return kv_block_bytes(units.num_layers, units.num_kv_heads, self.head_dim, self.kv_element_bytes)

    @property
    def shared_block_bytes(self) -> int:
        """The same in a pool that all ranks map, where a head that several have in TP has a column for each."""
        pooled = pooled_heads(self.layouts[LayoutKind.TP], self.units.num_kv_heads)
        return self.block_bytes // self.units.num_kv_heads * (self.units.num_kv_heads + len(pooled.copied))


@dataclass(frozen=True, slots=True)
class MachineDemand:
    """What the processes ask for around the model."""

    mode: MemoryMode
    backing: PoolBacking
    rank_context_bytes: int
    """Bytes of a rank's process (or device context) before it holds a model."""
    host_terms: tuple[Term, ...] = ()
    """Services, supervisors, the data plane's region, what others hold."""
    message_bytes: int = 0
    """Largest message that a step sends between ranks."""
    cold_image: bool = False
    """In `image` mode: whether the image that is not needed next lies on disk, so that one takes memory at a time."""


@dataclass(frozen=True, slots=True)
class _OwnWeights:
    """What one rank holds of the model."""

    resident: tuple[Term, ...] = ()
    images: tuple[Term, ...] = ()


def make_ledger(model: ModelDemand, machine: MachineDemand, *, on_host: bool = True) -> Ledger:
    """Prices a model on its ranks; `on_host`: their memory is the host's (CPU ranks, unified memory).

    Raises:
        LayoutError: a share of the layouts cannot be cut from a tensor.
    """
    num_ranks = model.layouts[LayoutKind.PP].num_ranks
    if machine.mode is MemoryMode.SHARED:
        shared = _shared_terms(model)
        weights = [_OwnWeights()] * num_ranks
    else:
        shared = ()
        weights = list(_private_weights(model, machine))
    charged = -(-sum(term.num_bytes for term in shared) // num_ranks)
    accounts = []
    images: list[Term] = []
    for rank, own in enumerate(weights):
        terms = own.resident + own.images if on_host else own.resident
        images += () if on_host else own.images
        accounts.append(_account(model, machine, Rank(rank), terms, charged))
    # One pool serves both layouts in shared mode, as it would if they took turns.
    backing = PoolBacking.EXCLUSIVE if machine.mode is MemoryMode.SHARED else machine.backing
    host = (*shared, *images, *machine.host_terms)
    block_bytes = model.shared_block_bytes if machine.mode is MemoryMode.SHARED else model.block_bytes
    return Ledger(machine.mode, backing, tuple(accounts), host, block_bytes, on_host)


def _account(
    model: ModelDemand, machine: MachineDemand, rank: Rank, weights: tuple[Term, ...], charged: int
) -> RankAccount:
    context = Term("process context", machine.rank_context_bytes, is_addressed=False)
    terms = (context, *weights, *_workspace(model, rank), *_staging(model, machine, rank))
    return RankAccount(rank, terms, _pool_costs(model, machine.mode, rank), charged)


def _staging(model: ModelDemand, machine: MachineDemand, rank: Rank) -> Iterator[Term]:
    """What a flip's moves are made by, held all the time, and what is taken at the seam of pools that take turns."""
    if machine.mode is MemoryMode.SHARED:
        return
    sizes = row_sizes(model.layouts, model.units.num_kv_heads, model.head_dim, model.kv_element_bytes)
    message_bytes = sizes.message_bytes(chunk_bytes(machine.message_bytes))
    pages = PAGE_STAGING_BYTES if machine.mode is MemoryMode.EXCHANGE else 0
    if machine.backing is PoolBacking.RESIDENT:
        yield Term("flip staging", pages + 2 * message_bytes)
        return
    yield Term("flip staging", pages + message_bytes + sizes.batch_bytes(rank))
    yield Term("pools at the seam", sizes.edge_bytes(rank, POOL_PIECE_BYTES))


def _shared_terms(model: ModelDemand) -> tuple[Term, ...]:
    expanded = (Term("expanded weights", model.expanded_bytes),) if model.expanded_bytes else ()
    return (Term("weights, mapped by all ranks", model.file_bytes), *expanded)


def _private_weights(model: ModelDemand, machine: MachineDemand) -> Iterator[_OwnWeights]:
    by_name = {tensor.name: tensor for tensor in model.tensors}
    shards = {kind: held_shards(layout, model.units, model.tensors) for kind, layout in model.layouts.items()}
    for rank, (pp, tp) in enumerate(zip(shards[LayoutKind.PP], shards[LayoutKind.TP], strict=True)):
        pp_bytes, tp_bytes = _shard_bytes(pp, by_name), _shard_bytes(tp, by_name)
        if machine.mode is MemoryMode.DUAL:
            beside = tp_bytes - _overlap_bytes(pp, tp, by_name)
            yield _OwnWeights((Term("weights in pp", pp_bytes), Term("weights in tp, not in pp", beside)))
            continue
        images: tuple[Term, ...] = (
            Term(f"image of pp, rank {rank}", pp_bytes),
            Term(f"image of tp, rank {rank}", tp_bytes),
        )
        if machine.cold_image:
            images = (Term(f"image of pp or tp, rank {rank}", max(pp_bytes, tp_bytes)),)
        arena = Term("weights arena, the larger layout", max(pp_bytes, tp_bytes))
        yield _OwnWeights((arena,), images if machine.mode is MemoryMode.IMAGE else ())


def _shard_bytes(shards: Sequence[TensorShard], by_name: Mapping[str, CanonicalTensor]) -> int:
    return sum(by_name[shard.tensor].num_bytes(shard.rows, shard.columns) for shard in shards)


def _overlap_bytes(pp: Sequence[TensorShard], tp: Sequence[TensorShard], by_name: Mapping[str, CanonicalTensor]) -> int:
    """Bytes that both layouts hold of the same source on one rank; a rank lists no source's bytes twice."""
    held: dict[str, list[TensorShard]] = {}
    for shard in pp:
        held.setdefault(by_name[shard.tensor].source, []).append(shard)
    total = 0
    for shard in tp:
        tensor = by_name[shard.tensor]
        for other in held.get(tensor.source, ()):
            total += tensor.num_bytes(_meet(shard.rows, other.rows), _meet(shard.columns, other.columns))
    return total


def _meet(one: Span, other: Span) -> Span:
    begin = max(one.begin, other.begin)
    return Span(begin, max(begin, min(one.end, other.end)))


def _workspace(model: ModelDemand, rank: int) -> tuple[Term, ...]:
    """Both layouts' stages are built at start, each with its activations and tables."""
    shares = [layout.shares[rank] for layout in model.layouts.values()]
    sampling = any(layout.sampling_rank == rank for layout in model.layouts.values())
    requests = model.max_resident_requests
    table = requests * (model.context_tokens + -(-model.context_tokens // BLOCK_SLOTS)) * ID_BYTES
    return (
        Term("activations", sum(_activation_bytes(model, layout, rank) for layout in model.layouts.values())),
        Term("rotary tables and norms", sum(_table_bytes(model, share) for share in shares)),
        Term("logits", requests * _logit_columns(model, shares, sampling) * FLOAT_BYTES),
        Term("resident table", table, is_addressed=False),
    )


def _activation_bytes(model: ModelDemand, layout: Layout, rank: int) -> int:
    share = layout.shares[rank]
    heads = 2 * (len(share.heads) + len(share.kv_heads)) * model.head_dim
    exchanged = 0 if layout.kv_tokens is None else _exchanged_columns(model, layout, share)
    return model.max_batch_rows * (2 * model.hidden_size + heads + 2 * len(share.ffn) + exchanged) * FLOAT_BYTES


def _exchanged_columns(model: ModelDemand, layout: Layout, share: RankShare) -> int:
    """Everybody's queries, keys and values, parts for all heads, and all ranks' parts for the own ones."""
    gathered = sum(len(each.heads) + 2 * len(each.kv_heads) for each in layout.shares)
    parts = model.units.num_heads + layout.num_ranks * len(share.heads)
    return gathered * model.head_dim + parts * (model.head_dim + 1)


def _table_bytes(model: ModelDemand, share: RankShare) -> int:
    rotary = model.rotary_tokens * model.head_dim
    return (rotary + (2 * len(share.layers) + 1) * model.hidden_size) * FLOAT_BYTES


def _logit_columns(model: ModelDemand, shares: Sequence[RankShare], sampling: bool) -> int:
    """A rank's own part, and where ids are drawn the whole vocabulary twice: gathered, and as it was for logprobs."""
    return max(len(share.vocab) for share in shares) + (2 * model.units.vocab if sampling else 0)


def _pool_costs(model: ModelDemand, mode: MemoryMode, rank: int) -> dict[LayoutKind, PoolCost]:
    if mode is MemoryMode.SHARED:
        num_ranks = model.layouts[LayoutKind.PP].num_ranks
        return dict.fromkeys(model.layouts, PoolCost(-(-model.shared_block_bytes // num_ranks)))
    return {kind: _layout_cost(model, layout, rank) for kind, layout in model.layouts.items()}


def _layout_cost(model: ModelDemand, layout: Layout, rank: int) -> PoolCost:
    if layout.kv_tokens is not None:
        return PoolCost(model.block_bytes, layout.kv_tokens[rank], sum(layout.kv_tokens))
    share = layout.shares[rank]
    return PoolCost(kv_block_bytes(len(share.layers), len(share.kv_heads), model.head_dim, model.kv_element_bytes))
