"""Transfer plans for weights: from any layout to any other, which part of which shard goes from which rank to which.

Address-free and pure: every rank computes the same plan from the same layouts and binds its own part of it to its own
memory; the plan's hash says that they did. A plan is a list of rectangles, never of cells.

Invariants of a plan: the runs of a destination shard cover it once; a rank that holds a rectangle is its own source
(a local leg); among replicas elsewhere the source is the one whose link has carried the least so far.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from services.core.ids import Rank
from services.core.layout import LayoutError, Span
from services.placement.shares import CanonicalTensor, RankShards, TensorShard

HASH_BYTES = 8

Link = tuple[Rank, Rank]
"""(source, destination); equal: a local leg."""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """A rectangle of a tensor on its way. The shards' names may differ where tensors are tied."""

    source: Rank
    source_shard: TensorShard
    destination: Rank
    destination_shard: TensorShard
    rows: Span
    columns: Span
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All runs, in the order of destinations and of the model's tensors."""

    num_ranks: int
    runs: tuple[WeightTransfer, ...]
    hash: int
    """64 bits over the whole plan: equal on all ranks or not the same plan."""

    def of(self, rank: Rank) -> tuple[WeightTransfer, ...]:
        """The part that a rank sends, receives or copies."""
        return tuple(run for run in self.runs if rank in (run.source, run.destination))

    def link_bytes(self) -> dict[Link, int]:
        """Bytes per link, local legs included; links that carry nothing are absent."""
        carried: dict[Link, int] = defaultdict(int)
        for run in self.runs:
            carried[run.source, run.destination] += run.num_bytes
        return dict(carried)

    def received_bytes(self, rank: Rank) -> int:
        """Bytes that come to a rank from others."""
        links = self.link_bytes().items()
        return sum(count for (source, destination), count in links if rank == destination != source)


def stable_hash(values: Iterable[object]) -> int:
    """64 bits over the `repr`s of values that print all they are."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for value in values:
        digest.update(repr(value).encode() + b"\n")
    return int.from_bytes(digest.digest(), "little")


class SourceChoice:
    """Chooses among ranks that hold the same bytes, so that no link carries much more than the others."""

    __slots__ = ("_link_bytes", "_sent_bytes")

    def __init__(self) -> None:
        self._link_bytes: dict[Link, int] = defaultdict(int)
        self._sent_bytes: dict[Rank, int] = defaultdict(int)

    def choose(self, sources: Iterable[Rank], destination: Rank, num_bytes: int) -> Rank:
        """The destination itself if it is a source; `sources` has at least one."""
        chosen = min(
            sources,
            key=lambda rank: (
                rank != destination,
                self._link_bytes[rank, destination],
                self._sent_bytes[rank],
                rank,
            ),
        )
        if chosen != destination:
            self._link_bytes[chosen, destination] += num_bytes
            self._sent_bytes[chosen] += num_bytes
        return chosen


def transfer_plan(tensors: Sequence[CanonicalTensor], source: RankShards, destination: RankShards) -> TransferPlan:
    """How the shards of `destination` are filled from those of `source`.

    Raises:
        LayoutError: the source layout lacks a part that the destination needs.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    held = _by_source(by_name, source)
    choice = SourceChoice()
    runs = tuple(
        run
        for rank, shards in enumerate(destination)
        for shard in shards
        for run in _runs_into(by_name[shard.tensor], shard, Rank(rank), held[by_name[shard.tensor].source], choice)
    )
    digest = stable_hash(
        (
            (run.source, run.source_shard.tensor, run.destination, run.destination_shard.tensor),
            (run.rows.begin, run.rows.end, run.columns.begin, run.columns.end),
        )
        for run in runs
    )
    return TransferPlan(len(destination), runs, digest)


def _by_source(by_name: Mapping[str, CanonicalTensor], layout: RankShards) -> dict[str, list[tuple[Rank, TensorShard]]]:
    held: dict[str, list[tuple[Rank, TensorShard]]] = defaultdict(list)
    for rank, shards in enumerate(layout):
        for shard in shards:
            held[by_name[shard.tensor].source].append((Rank(rank), shard))
    return held


def _runs_into(
    tensor: CanonicalTensor,
    shard: TensorShard,
    destination: Rank,
    held: Sequence[tuple[Rank, TensorShard]],
    choice: SourceChoice,
) -> Iterator[WeightTransfer]:
    """The runs of one destination shard: its part, cut wherever a source shard begins or ends."""
    sources = [other for _, other in held]
    for rows, columns in product(
        cut_at(shard.rows, (other.rows for other in sources)),
        cut_at(shard.columns, (other.columns for other in sources)),
    ):
        part = TensorShard(shard.tensor, rows, columns)
        holders = {rank: other for rank, other in reversed(held) if other.covers(part)}
        if not holders:
            raise LayoutError(
                f"tensor {shard.tensor!r}: rank {destination} needs rows [{rows.begin}, {rows.end}), columns "
                f"[{columns.begin}, {columns.end}), which no rank of the layout before holds; compute both layouts "
                "from the same model"
            )
        num_bytes = tensor.num_bytes(rows, columns)
        chosen = choice.choose(holders, destination, num_bytes)
        yield WeightTransfer(chosen, holders[chosen], destination, shard, rows, columns, num_bytes)


def cut_at(whole: Span, others: Iterable[Span]) -> list[Span]:
    """`whole` in consecutive parts, cut at every end of the others that lies within."""
    ends = {end for other in others for end in (other.begin, other.end) if whole.begin < end < whole.end}
    return [Span(begin, end) for begin, end in pairwise(sorted({whole.begin, whole.end} | ends))]
