"""Moves a flip's live KV rows from one pool to the other, between ranks over the carrier and within the rank.

Each pair of ranks meets once (tournament) and exchanges parts of bounded size (row_chunks), both ways in step: a rank
sends one part ahead of what it takes, so that two messages a direction are in flight at most and neither of two
partners waits for room while the other does. The source pool is read and never written, the destination is nobody's
until COMMIT: a flip that fails has lost nothing. Sums of both ends are compared over the group afterwards, counts of
messages as well.

Never decides which rows, and never switches. No memory is taken while a flip runs but small objects for each part.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from kernels.cpu.checksum import WORD_BYTES, join_checksums
from kernels.cpu.reshard import pack_and_sum, scatter
from services.core.ids import BLOCK_SLOTS, Rank
from services.placement.pair_order import Turn, partners, turns
from services.placement.rows.transfers import RowPlan, RowTransfer
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.rank_memory import Moved, RestorableError
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.row_parts import RowPart, row_parts
from services.worker.memory.wire import Wire


@dataclass(slots=True)
class _Ends:
    """What this rank saw of the payloads, by peer; its own place is the local leg."""

    sent_sum: list[int]
    received_sum: list[int]
    num_sent: list[int]
    num_received: list[int]
    durations_ns: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0, "verify": 0})

    @classmethod
    def none(cls, num_ranks: int) -> "_Ends":
        """Before anything was moved."""
        return cls([0] * num_ranks, [0] * num_ranks, [0] * num_ranks, [0] * num_ranks)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds what the block takes."""
        began_ns = time.perf_counter_ns()
        yield
        self.durations_ns[what] += time.perf_counter_ns() - began_ns


class RowMover:
    """One rank's end of every flip of a generation. Use from the model thread."""

    def __init__(self, wire: Wire, head_block_bytes: int, num_kv_heads: int, device: RankDevice = HOST) -> None:
        """`head_block_bytes`: of one block of one head in one layer, keys and values."""
        self._wire, self._head_block_bytes = wire, head_block_bytes
        self._rank, self._num_ranks = wire.rank, wire.num_ranks
        size = max(wire.bounds.chunk_bytes, num_kv_heads * head_block_bytes)
        self._outgoing, self._incoming = (device.zeros(size) for _ in range(2))

    def move(self, plan: RowPlan, source: LayoutPool, destination: LayoutPool) -> Moved:
        """All legs of this rank; see RankMemory.move for what it raises."""
        ends = _Ends.none(self._num_ranks)
        with self._wire.guarded(), ends.timed("verify"):
            # What can fail alone fails here, before anybody waits for anybody.
            outgoing, incoming, failure = self._prepared(plan, source, destination)
            self._wire.agree(failure, plan.hash)
        with self._wire.guarded():
            self._move_within(outgoing.get(self._rank, []), incoming.get(self._rank, []), ends)
            for peer in partners(self._rank, self._num_ranks):
                self._meet(peer, outgoing.get(peer, []), incoming.get(peer, []), ends)
        with self._wire.guarded(), ends.timed("verify"):
            theirs = self._others_ends(ends)
        self._verify(theirs, ends)
        received = [leg for leg in plan.of(self._rank) if leg.source != leg.destination == self._rank]
        return Moved(
            read_ns=ends.durations_ns["read"],
            write_ns=ends.durations_ns["write"],
            verify_ns=ends.durations_ns["verify"],
            bytes_moved=sum(leg.num_bytes(self._head_block_bytes) for leg in received),
            rows_moved=sum(leg.num_blocks * BLOCK_SLOTS for leg in received),
        )

    # Before the exchange.

    def refuse(self, failure: Exception) -> NoReturn:
        """Takes this rank's part in the group's verdict where it has nothing to move by; raises RestorableError."""
        with self._wire.guarded():
            self._wire.agree(failure, 0)
        raise AssertionError("a failure is the group's verdict")

    def _prepared(
        self, plan: RowPlan, source: LayoutPool, destination: LayoutPool
    ) -> tuple[Mapping[Rank, Sequence[RowPart]], Mapping[Rank, Sequence[RowPart]], Exception | None]:
        """Parts to send and to take, by peer; or why there are none."""
        legs = plan.of(self._rank)
        try:
            sent = [(leg.destination, leg) for leg in legs if leg.source == self._rank]
            taken = [(leg.source, leg) for leg in legs if leg.destination == self._rank]
            return self._parts(source, sent), self._parts(destination, taken), None
        except Exception as error:  # it is the group's to hear
            return {}, {}, error

    def _parts(self, pool: LayoutPool, legs: Iterable[tuple[Rank, RowTransfer]]) -> dict[Rank, list[RowPart]]:
        return row_parts(pool, legs, self._head_block_bytes, self._wire.bounds.chunk_bytes)

    # The exchange.

    def _move_within(self, outgoing: Sequence[RowPart], incoming: Sequence[RowPart], ends: _Ends) -> None:
        for source, destination in zip(outgoing, incoming, strict=True):
            staging = self._outgoing[: source.num_bytes]
            self._pack(source, staging, self._rank, ends)
            self._scatter(destination, staging, self._rank, ends)

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
        with ends.timed("read"):
            self._wire.send(staging, peer, number)

    def _take(self, peer: Rank, part: RowPart, ends: _Ends) -> None:
        staging, number = self._incoming[: part.num_bytes], ends.num_received[peer]
        with ends.timed("write"):
            self._wire.take(staging, peer, number)
        self._scatter(part, staging, peer, ends)

    def _pack(self, part: RowPart, staging: Tensor, peer: Rank, ends: _Ends) -> None:
        with ends.timed("read"):
            partial = pack_and_sum(part.planes, part.heads, part.runs, staging, self._place(ends.num_sent[peer]))
        ends.sent_sum[peer] = join_checksums((ends.sent_sum[peer], partial))
        ends.num_sent[peer] += 1

    def _scatter(self, part: RowPart, staging: Tensor, peer: Rank, ends: _Ends) -> None:
        """What is added up is what lies in the pool then, so that the scattering is checked with the sending."""
        with ends.timed("write"):
            scatter(part.planes, part.heads, part.runs, staging)
        with ends.timed("verify"):
            first_word = self._place(ends.num_received[peer])
            partial = pack_and_sum(part.planes, part.heads, part.runs, staging, first_word)
        ends.received_sum[peer] = join_checksums((ends.received_sum[peer], partial))
        ends.num_received[peer] += 1

    def _place(self, index: int) -> int:
        """The first word of the message of this number, for sums that see messages that changed places."""
        return index * (self._outgoing.numel() // WORD_BYTES)

    # After the exchange.

    def _others_ends(self, ends: _Ends) -> list[tuple[int, int]]:
        """By rank: the sum and the number of the messages that it sent to this one."""
        found = self._wire.gathered([*ends.sent_sum, *ends.num_sent])
        return [(values[self._rank], values[self._num_ranks + self._rank]) for values in found]

    def _verify(self, theirs: Sequence[tuple[int, int]], ends: _Ends) -> None:
        for peer, (sent_sum, num_sent) in enumerate(theirs):
            got = (ends.received_sum[peer], ends.num_received[peer])
            if got != (sent_sum, num_sent):
                raise RestorableError(
                    f"rows from rank {peer} to rank {self._rank} are not what was sent: {num_sent} messages with "
                    f"checksum {sent_sum:016x} sent, {got[1]} with {got[0]:016x} received; the layout before goes on"
                )
