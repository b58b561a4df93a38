"""Moves a batch of blocks from one layout's pool to the other's, where both pools share one memory.

A rank packs its own live rows and keeps them; rows go to the ranks that need them, which hold them beside their pools;
sums of both ends are compared. Pages are given up and taken by whoever asks (core.flip.work says when); then rows are
written from what is held here, the ones that came or the ones that were kept, and added up where they lie. Never
switches, and never decides what a failure leads to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kernels.cpu.checksum import WORD_BYTES, checksum, join_checksums
from kernels.cpu.reshard import pack_and_sum, scatter
from services.core.flip.work_table import Answer, Verdict
from services.core.ids import BLOCK_SLOTS, LayoutKind, Rank
from services.core.layout import Span
from services.placement.pair_order import Turn, partners, turns
from services.placement.rows.block_batches import BlockBatch
from services.placement.rows.transfers import Holding, RowPlan, RowTransfer
from services.worker.memory.flip_plan import NotDoneError
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.row_parts import RowPart, row_parts
from services.worker.memory.wire import Wire


@dataclass(frozen=True, slots=True)
class BatchMove:
    """One batch's way, and which blocks each pool has pages for, before it and after."""

    target: LayoutKind
    batch: BlockBatch
    plan: RowPlan
    source: tuple[Span, Span]
    destination: tuple[Span, Span]


@dataclass(frozen=True, slots=True)
class BatchStaging:
    """Memory beside the pools, on their device."""

    rows: Tensor
    """Own live rows of a batch: those under the layout before, which are kept, then those under the layout after."""
    message: Tensor


@dataclass(slots=True)
class _UnderWay:
    """What this rank sends, takes and keeps of one batch."""

    move: BatchMove
    kept: list[tuple[RowPart, Tensor]]
    outgoing: Mapping[Rank, Sequence[RowPart]]
    incoming: dict[Rank, list[tuple[RowPart, Tensor]]]
    kept_sum: int = 0
    sent_sums: list[int] = field(default_factory=list)
    """Of each peer; the own place is what stays here."""
    num_sent: list[int] = field(default_factory=list)
    taken_sums: list[int] = field(default_factory=list)
    num_taken: list[int] = field(default_factory=list)


class BatchMover:
    """One rank's end; one batch at a time. Use from the model thread."""

    def __init__(
        self, wire: Wire, holdings: Mapping[LayoutKind, Sequence[Holding]], head_block_bytes: int, staging: BatchStaging
    ) -> None:
        """`head_block_bytes`: of one block of one head in one layer, keys and values."""
        self._wire, self._head_block_bytes, self._staging = wire, head_block_bytes, staging
        self._rank, self._num_ranks, self._tally = wire.rank, wire.num_ranks, wire.tally
        self._own = {kind: held[wire.rank] for kind, held in holdings.items()}
        self._under_way: _UnderWay | None = None

    # Reading: the pools are as they were.

    def read(self, move: BatchMove, pools: Mapping[LayoutKind, LayoutPool]) -> None:
        """Keeps the own rows, and finds what goes where; rows that stay are where rows that come will be."""
        source, destination = pools[move.target.other], pools[move.target]
        transfers = move.plan.of(self._rank)
        outgoing = self._parts(source, [(each.destination, each) for each in transfers if each.source == self._rank])
        incoming = self._parts(
            destination, [(each.source, each) for each in transfers if each.destination == self._rank]
        )
        staging = _StagingCursor(self._staging.rows)
        batch = _UnderWay(
            move,
            self._kept_parts(move, source, staging),
            outgoing,
            {peer: [(part, staging.take(part.num_bytes)) for part in parts] for peer, parts in incoming.items()},
            0,
            *([0] * self._num_ranks for _ in range(4)),
        )
        with self._tally.timed("read_ns"):
            batch.kept_sum = self._packed(batch.kept)
            stays = zip(outgoing.get(self._rank, ()), batch.incoming.get(self._rank, ()), strict=True)
            for index, (part, (_, memory)) in enumerate(stays):
                self._note(batch.sent_sums, batch.num_sent, self._rank, self._pack(part, memory, index))
        batch.taken_sums[self._rank] = batch.sent_sums[self._rank]
        batch.num_taken[self._rank] = batch.num_sent[self._rank]
        self._under_way = batch

    def _parts(self, pool: LayoutPool, transfers: Sequence[tuple[Rank, RowTransfer]]) -> dict[Rank, list[RowPart]]:
        return row_parts(pool, transfers, self._head_block_bytes, self._wire.bounds.chunk_bytes)

    def _kept_parts(
        self, move: BatchMove, source: LayoutPool, staging: "_StagingCursor"
    ) -> list[tuple[RowPart, Tensor]]:
        """All that this rank has of the batch, whether anybody takes it or not."""
        own = self._own[move.target.other]
        runs = tuple(own.blocks.runs(move.batch.live))
        transfer = RowTransfer(self._rank, self._rank, own.layers, own.heads, runs)
        parts = self._parts(source, [(self._rank, transfer)]).get(self._rank, ())
        return [(part, staging.take(part.num_bytes)) for part in parts]

    def _packed(self, parts: Sequence[tuple[RowPart, Tensor]]) -> int:
        return join_checksums(self._pack(part, memory, index) for index, (part, memory) in enumerate(parts))

    def _pack(self, part: RowPart, into: Tensor, index: int) -> int:
        return pack_and_sum(part.planes, part.heads, part.runs, into, self._word(index))

    def _word(self, index: int) -> int:
        """The first word of the message of this number, for sums that see messages that changed places."""
        return index * (self._staging.message.numel() // WORD_BYTES)

    def _note(self, sums: list[int], counts: list[int], peer: Rank, partial: int) -> None:
        sums[peer] = join_checksums((sums[peer], partial))
        counts[peer] += 1

    # The exchange.

    def pass_rows(self) -> None:
        """All transfers of this rank, into memory beside the pools. Raises CollectiveError."""
        for peer in partners(self._rank, self._num_ranks):
            self._meet(peer, self._batch)

    @property
    def _batch(self) -> _UnderWay:
        assert self._under_way is not None, "a batch is read first"
        return self._under_way

    def _meet(self, peer: Rank, batch: _UnderWay) -> None:
        outgoing, incoming = batch.outgoing.get(peer, ()), batch.incoming.get(peer, ())
        for turn, index in turns(len(outgoing), len(incoming)):
            if turn is Turn.SEND:
                with self._tally.timed("read_ns"):
                    message = self._staging.message[: outgoing[index].num_bytes]
                    self._note(batch.sent_sums, batch.num_sent, peer, self._pack(outgoing[index], message, index))
                    self._wire.send(message, peer, index)
            else:
                with self._tally.timed("write_ns"):
                    _, memory = incoming[index]
                    self._wire.take(memory, peer, index)
                    self._note(batch.taken_sums, batch.num_taken, peer, checksum(memory, self._word(index)))

    def compare(self) -> Answer | None:
        """Every rank sees what both ends of every pair have: the same verdict everywhere. Raises CollectiveError."""
        batch = self._batch
        with self._tally.timed("verify_ns"):
            found = self._wire.gathered([*batch.sent_sums, *batch.num_sent, *batch.taken_sums, *batch.num_taken])
        num = self._num_ranks
        for source in range(num):
            for destination in range(num):
                sent = (found[source][destination], found[source][num + destination])
                got = (found[destination][2 * num + source], found[destination][3 * num + source])
                if sent != got:
                    return Answer(
                        Verdict.FAILED_HERE,
                        f"rows from rank {source} to rank {destination} are not what was sent: {sent[1]} messages with "
                        f"checksum {sent[0]:016x} sent, {got[1]} with {got[0]:016x} received; nothing was given up",
                    )
        return None

    # Behind the seam.

    def write(self) -> None:
        """What came, where the layout after has it. Raises NotDoneError where it does not lie as it came."""
        batch = self._batch
        parts = [(index, *pair) for parts in batch.incoming.values() for index, pair in enumerate(parts)]
        self._write(batch.move.target, parts, join_checksums(batch.taken_sums))
        taken = [part for peer, parts in batch.incoming.items() if peer != self._rank for part, _ in parts]
        received = [each for each in batch.move.plan.of(self._rank) if each.source != each.destination == self._rank]
        self._tally.bytes_moved += sum(part.num_bytes for part in taken)
        self._tally.rows_moved += sum(each.num_blocks * BLOCK_SLOTS for each in received)

    def write_kept(self) -> None:
        """What was kept, where the layout before had it. Raises NotDoneError where it does not lie so."""
        batch = self._batch
        kept = [(index, *pair) for index, pair in enumerate(batch.kept)]
        try:
            self._write(batch.move.target.other, kept, batch.kept_sum)
        except NotDoneError as error:
            raise NotDoneError(f"rows that were kept cannot be written back: {error}") from error

    def _write(self, kind: LayoutKind, parts: Sequence[tuple[int, RowPart, Tensor]], wanted_sum: int) -> None:
        """Writes rows and adds them up where they are."""
        found = 0
        for index, part, memory in parts:
            with self._tally.timed("write_ns"):
                scatter(part.planes, part.heads, part.runs, memory)
            with self._tally.timed("verify_ns"):
                partial = self._pack(part, self._staging.message[: part.num_bytes], index)
                found = join_checksums((found, partial))
        if found != wanted_sum:
            raise NotDoneError(
                f"rows in the {kind.value} pool of rank {self._rank} have checksum {found:016x}, {wanted_sum:016x} was "
                "written"
            )


class _StagingCursor:
    """Hands out a staging buffer from its beginning on."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._begin = memory, 0

    def take(self, num_bytes: int) -> Tensor:
        begin, self._begin = self._begin, self._begin + num_bytes
        assert self._begin <= self._memory.numel(), "a batch has as many live blocks as staging is for, or fewer"
        return self._memory[begin : self._begin]
