"""Moves a flip's live KV rows from one pool to the other, between ranks over the carrier and within the rank.

Each pair of ranks meets once (pair_order) and exchanges parts of bounded size (row_chunks), both ways in step: a rank
sends one part ahead of what it takes, so that two messages a direction are in flight at most and neither of two
partners waits for room while the other does. The source pool is read and never written, the destination is nobody's
until COMMIT: a flip that fails has lost nothing. Sums of both ends are compared over the group afterwards, counts of
messages as well.

Never decides which rows, and never switches. No memory is taken while a flip runs but small objects for each part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.checksum import WORD_BYTES, join_checksums
from kernels.cpu.reshard import pack_and_sum, scatter
from services.core.flip.work_table import Answer, Verdict
from services.core.ids import BLOCK_SLOTS, Rank
from services.placement.pair_order import Turn, partners, turns
from services.placement.rows.transfers import RowPlan, RowTransfer
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.row_parts import RowPart, row_parts
from services.worker.memory.wire import Wire


@dataclass(frozen=True, slots=True)
class _Ends:
    """What this rank sends and takes, and what it saw of it, by peer; its own place is what stays here."""

    outgoing: Mapping[Rank, Sequence[RowPart]]
    incoming: Mapping[Rank, Sequence[RowPart]]
    received: Sequence[RowTransfer]
    """From other ranks."""
    sent_sum: list[int]
    received_sum: list[int]
    num_sent: list[int]
    num_received: list[int]


class RowMover:
    """One rank's end of every flip of a generation. Use from the model thread."""

    def __init__(self, wire: Wire, head_block_bytes: int, num_kv_heads: int, device: RankDevice = HOST) -> None:
        """`head_block_bytes`: of one block of one head in one layer, keys and values."""
        self._wire, self._head_block_bytes = wire, head_block_bytes
        self._rank, self._num_ranks, self._tally = wire.rank, wire.num_ranks, wire.tally
        size = max(wire.bounds.chunk_bytes, num_kv_heads * head_block_bytes)
        self._outgoing, self._incoming = (device.zeros(size) for _ in range(2))
        self._ends: _Ends | None = None

    # Before anybody waits for anybody.

    def prepare(self, plan: RowPlan, source: LayoutPool, destination: LayoutPool) -> None:
        """Finds what this rank sends and takes; raises whatever is wrong with that."""
        transfers = plan.of(self._rank)
        sent = [(each.destination, each) for each in transfers if each.source == self._rank]
        taken = [(each.source, each) for each in transfers if each.destination == self._rank]
        received = [each for each in transfers if each.source != each.destination == self._rank]
        sums = ([0] * self._num_ranks for _ in range(4))
        self._ends = _Ends(self._parts(source, sent), self._parts(destination, taken), received, *sums)

    def _parts(self, pool: LayoutPool, transfers: Iterable[tuple[Rank, RowTransfer]]) -> dict[Rank, list[RowPart]]:
        return row_parts(pool, transfers, self._head_block_bytes, self._wire.bounds.chunk_bytes)

    # The exchange.

    def pass_rows(self) -> None:
        """All transfers of this rank. Raises CollectiveError; the source has lost nothing even so."""
        ends = self._ends
        assert ends is not None, "prepared first"
        stays = zip(ends.outgoing.get(self._rank, ()), ends.incoming.get(self._rank, ()), strict=True)
        for source, destination in stays:
            staging = self._outgoing[: source.num_bytes]
            self._pack(source, staging, self._rank, ends)
            self._scatter(destination, staging, self._rank, ends)
        for peer in partners(self._rank, self._num_ranks):
            self._meet(peer, ends.outgoing.get(peer, ()), ends.incoming.get(peer, ()), ends)

    def _meet(self, peer: Rank, outgoing: Sequence[RowPart], incoming: Sequence[RowPart], ends: _Ends) -> None:
        """All parts to and from one partner."""
        for turn, index in turns(len(outgoing), len(incoming)):
            if turn is Turn.SEND:
                self._send(peer, outgoing[index], ends)
            else:
                self._take(peer, incoming[index], ends)

    def _send(self, peer: Rank, part: RowPart, ends: _Ends) -> None:
        staging, number = self._outgoing[: part.num_bytes], ends.num_sent[peer]
        self._pack(part, staging, peer, ends)
        with self._tally.timed("read_ns"):
            self._wire.send(staging, peer, number)

    def _take(self, peer: Rank, part: RowPart, ends: _Ends) -> None:
        staging, number = self._incoming[: part.num_bytes], ends.num_received[peer]
        with self._tally.timed("write_ns"):
            self._wire.take(staging, peer, number)
        self._scatter(part, staging, peer, ends)

    def _pack(self, part: RowPart, staging: Tensor, peer: Rank, ends: _Ends) -> None:
        with self._tally.timed("read_ns"):
            partial = pack_and_sum(part.planes, part.heads, part.runs, staging, self._place(ends.num_sent[peer]))
        ends.sent_sum[peer] = join_checksums((ends.sent_sum[peer], partial))
        ends.num_sent[peer] += 1

    def _scatter(self, part: RowPart, staging: Tensor, peer: Rank, ends: _Ends) -> None:
        """What is added up is what lies in the pool then, so that the scattering is checked with the sending."""
        with self._tally.timed("write_ns"):
            scatter(part.planes, part.heads, part.runs, staging)
        with self._tally.timed("verify_ns"):
            first_word = self._place(ends.num_received[peer])
            partial = pack_and_sum(part.planes, part.heads, part.runs, staging, first_word)
        ends.received_sum[peer] = join_checksums((ends.received_sum[peer], partial))
        ends.num_received[peer] += 1

    def _place(self, index: int) -> int:
        """The first word of the message of this number, for sums that see messages that changed places."""
        return index * (self._outgoing.numel() // WORD_BYTES)

    # After the exchange.

    def compare(self) -> Answer | None:
        """Whether every message to this rank is what was sent; a verdict of its own. Raises CollectiveError."""
        ends, self._ends = self._ends, None
        assert ends is not None, "passed first"
        with self._tally.timed("verify_ns"):
            found = self._wire.gathered([*ends.sent_sum, *ends.num_sent])
        for peer, values in enumerate(found):
            sent_sum, num_sent = values[self._rank], values[self._num_ranks + self._rank]
            got = (ends.received_sum[peer], ends.num_received[peer])
            if got != (sent_sum, num_sent):
                return Answer(
                    Verdict.FAILED_HERE,
                    f"rows from rank {peer} to rank {self._rank} are not what was sent: {num_sent} messages with "
                    f"checksum {sent_sum:016x} sent, {got[1]} with {got[0]:016x} received",
                )
        self._tally.bytes_moved += sum(each.num_bytes(self._head_block_bytes) for each in ends.received)
        self._tally.rows_moved += sum(each.num_blocks * BLOCK_SLOTS for each in ends.received)
        return None
