"""Moves a window of blocks from one layout's pool to the other's, where both pools share one memory.

The group crosses together, and every step ends in a verdict of all ranks: a rank packs its own live rows and keeps
them; rows go to the ranks that need them, which hold them beside their pools; sums of both ends are compared. Only then
does every rank give the pages of the window up, and when all have, pages for it are taken in the other layout, rows are
scattered and added up where they lie. A verdict against it before that has touched nothing; one after it gives the new
pages back, takes the old ones and writes the kept rows: the layout before is whole again. Never switches.

Reads before writes: no row is written before every row of its window has been read, on all ranks, and rows of other
windows have pages of their own all the while.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kernels.cpu.checksum import WORD_BYTES, checksum, join_checksums
from kernels.cpu.reshard import pack_and_sum, scatter
from services.core.ids import BLOCK_SLOTS, LayoutKind, Rank
from services.core.layout import Span
from services.placement.pair_order import Turn, partners, turns
from services.placement.rows.block_batches import Window
from services.placement.rows.transfers import Holding, RowPlan, RowTransfer
from services.worker.memory.rank_memory import DataPlaneLostError, Moved, RestorableError
from services.worker.memory.rows.exclusive_pools import ExclusivePools
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.memory.rows.row_parts import RowPart, row_parts
from services.worker.memory.wire import Wire


@dataclass(frozen=True, slots=True)
class Passage:
    """One window on its way, and which blocks each pool has pages for, before it and after."""

    target: LayoutKind
    window: Window
    plan: RowPlan
    source: tuple[Span, Span]
    destination: tuple[Span, Span]


@dataclass(frozen=True, slots=True)
class SeamStaging:
    """Memory beside the pools, on their device."""

    rows: Tensor
    """Own live rows of a window: those under the layout before, which are kept, then those under the layout after."""
    message: Tensor


@dataclass(slots=True)
class _Window:
    """What this rank sends, takes and keeps of one window."""

    kept: list[tuple[RowPart, Tensor]]
    outgoing: Mapping[Rank, Sequence[RowPart]]
    incoming: dict[Rank, list[tuple[RowPart, Tensor]]]
    kept_sum: int = 0
    sent_sums: list[int] = field(default_factory=list)
    """Of each peer; the own place is what stays here."""
    num_sent: list[int] = field(default_factory=list)
    taken_sums: list[int] = field(default_factory=list)
    num_taken: list[int] = field(default_factory=list)


class SeamMover:
    """One rank's end. Use from the model thread."""

    def __init__(
        self, wire: Wire, holdings: Mapping[LayoutKind, Sequence[Holding]], head_block_bytes: int, staging: SeamStaging
    ) -> None:
        """`head_block_bytes`: of one block of one head in one layer, keys and values."""
        self._wire, self._head_block_bytes, self._staging = wire, head_block_bytes, staging
        self._rank, self._num_ranks = wire.rank, wire.num_ranks
        self._own = {kind: held[wire.rank] for kind, held in holdings.items()}
        self._durations_ns = {"read": 0, "seam": 0, "write": 0, "verify": 0}

    def move(self, passage: Passage, memory: ExclusivePools, pools: Mapping[LayoutKind, LayoutPool]) -> Moved:
        """Takes part in one passage.

        Raises:
            RestorableError: on every rank; every row is where it was.
            DataPlaneLostError: the exchange broke, or rows are where nobody can have them.
        """
        self._durations_ns = dict.fromkeys(self._durations_ns, 0)
        with self._wire.guarded():
            own: list[_Window] = []
            self._agreed(lambda: own.append(self._prepared(passage, pools)), passage.plan.hash)
            (window,) = own
            for peer in partners(self._rank, self._num_ranks):
                self._meet(peer, window)
            self._compare(window)
            self._cross(passage, memory, window)
        taken = [part for peer, parts in window.incoming.items() if peer != self._rank for part, _ in parts]
        received = [leg for leg in passage.plan.of(self._rank) if leg.source != leg.destination == self._rank]
        return Moved(
            read_ns=self._durations_ns["read"],
            seam_ns=self._durations_ns["seam"],
            write_ns=self._durations_ns["write"],
            verify_ns=self._durations_ns["verify"],
            bytes_moved=sum(part.num_bytes for part in taken),
            rows_moved=sum(leg.num_blocks * BLOCK_SLOTS for leg in received),
        )

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        yield
        self._durations_ns[what] += time.perf_counter_ns() - began_ns

    def _agreed(self, work: Callable[[], object], plan_hash: int = 0) -> None:
        """Does what can fail alone, and hears whether it has on any rank: a barrier as well."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # it is the group's to hear
            failure = error
        with self._timed("verify"):
            self._wire.agree(failure, plan_hash)

    # Reading: the pools are as they were.

    def _prepared(self, passage: Passage, pools: Mapping[LayoutKind, LayoutPool]) -> _Window:
        """Keeps the own rows, and finds what goes where; rows that stay are where rows that come will be."""
        source, destination = pools[passage.target.other], pools[passage.target]
        legs = passage.plan.of(self._rank)
        outgoing = self._parts(source, [(leg.destination, leg) for leg in legs if leg.source == self._rank])
        incoming = self._parts(destination, [(leg.source, leg) for leg in legs if leg.destination == self._rank])
        places = _Places(self._staging.rows)
        window = _Window(
            self._kept_parts(passage, source, places),
            outgoing,
            {peer: [(part, places.take(part.num_bytes)) for part in parts] for peer, parts in incoming.items()},
        )
        window.sent_sums, window.num_sent, window.taken_sums, window.num_taken = (
            [0] * self._num_ranks for _ in range(4)
        )
        with self._timed("read"):
            window.kept_sum = self._packed(window.kept)
            stays = zip(outgoing.get(self._rank, ()), window.incoming.get(self._rank, ()), strict=True)
            for index, (part, (_, place)) in enumerate(stays):
                self._note(window.sent_sums, window.num_sent, self._rank, self._pack(part, place, index))
        window.taken_sums[self._rank], window.num_taken[self._rank] = (
            window.sent_sums[self._rank],
            window.num_sent[self._rank],
        )
        return window

    def _parts(self, pool: LayoutPool, legs: Sequence[tuple[Rank, RowTransfer]]) -> dict[Rank, list[RowPart]]:
        return row_parts(pool, legs, self._head_block_bytes, self._wire.bounds.chunk_bytes)

    def _kept_parts(self, passage: Passage, source: LayoutPool, places: "_Places") -> list[tuple[RowPart, Tensor]]:
        """All that this rank holds of the window, whether anybody takes it or not."""
        held = self._own[passage.target.other]
        runs = tuple(held.blocks.runs(passage.window.live))
        leg = RowTransfer(self._rank, self._rank, held.layers, held.heads, runs)
        parts = self._parts(source, [(self._rank, leg)]).get(self._rank, ())
        return [(part, places.take(part.num_bytes)) for part in parts]

    def _packed(self, parts: Sequence[tuple[RowPart, Tensor]]) -> int:
        return join_checksums(self._pack(part, place, index) for index, (part, place) in enumerate(parts))

    def _pack(self, part: RowPart, into: Tensor, index: int) -> int:
        return pack_and_sum(part.planes, part.heads, part.runs, into, self._word(index))

    def _word(self, index: int) -> int:
        """The first word of the message of this number, for sums that see messages that changed places."""
        return index * (self._staging.message.numel() // WORD_BYTES)

    def _note(self, sums: list[int], counts: list[int], peer: Rank, partial: int) -> None:
        sums[peer] = join_checksums((sums[peer], partial))
        counts[peer] += 1

    # The exchange.

    def _meet(self, peer: Rank, window: _Window) -> None:
        outgoing, incoming = window.outgoing.get(peer, ()), window.incoming.get(peer, ())
        for turn, index in turns(len(outgoing), len(incoming)):
            if turn is Turn.SEND:
                with self._timed("read"):
                    message = self._staging.message[: outgoing[index].num_bytes]
                    self._note(window.sent_sums, window.num_sent, peer, self._pack(outgoing[index], message, index))
                    self._wire.send(message, peer, index)
            else:
                with self._timed("write"):
                    _, place = incoming[index]
                    self._wire.take(place, peer, index)
                    self._note(window.taken_sums, window.num_taken, peer, checksum(place, self._word(index)))

    def _compare(self, window: _Window) -> None:
        """Every rank sees what both ends of every pair have: one verdict, the same everywhere."""
        with self._timed("verify"):
            found = self._wire.gathered([*window.sent_sums, *window.num_sent, *window.taken_sums, *window.num_taken])
        num = self._num_ranks
        for source in range(num):
            for destination in range(num):
                sent = (found[source][destination], found[source][num + destination])
                got = (found[destination][2 * num + source], found[destination][3 * num + source])
                if sent != got:
                    raise RestorableError(
                        f"rows from rank {source} to rank {destination} are not what was sent: {sent[1]} messages with "
                        f"checksum {sent[0]:016x} sent, {got[1]} with {got[0]:016x} received; nothing was given up"
                    )

    # The seam.

    def _cross(self, passage: Passage, memory: ExclusivePools, window: _Window) -> None:
        numbered = [(index, *pair) for parts in window.incoming.values() for index, pair in enumerate(parts)]
        wanted = join_checksums(window.taken_sums)
        try:
            self._agreed(lambda: self._release(memory, passage.target.other, passage.source[1]))
            self._agreed(lambda: self._fill(memory, passage.target, passage.destination[1], numbered, wanted))
        except RestorableError as error:
            self._go_back(passage, memory, window, error)
            raise

    def _go_back(self, passage: Passage, memory: ExclusivePools, window: _Window, cause: RestorableError) -> None:
        """The way back, on all ranks."""
        kept = [(index, *pair) for index, pair in enumerate(window.kept)]
        try:
            self._agreed(lambda: self._release(memory, passage.target, passage.destination[0]))
            self._agreed(lambda: self._fill(memory, passage.target.other, passage.source[0], kept, window.kept_sum))
        except RestorableError as error:
            raise DataPlaneLostError(f"{cause}; and the rows that were kept cannot be written back: {error}") from error

    def _release(self, memory: ExclusivePools, kind: LayoutKind, keeps: Span) -> None:
        with self._timed("seam"):
            memory.keep(kind, keeps)

    def _fill(
        self,
        memory: ExclusivePools,
        kind: LayoutKind,
        blocks: Span,
        parts: Sequence[tuple[int, RowPart, Tensor]],
        wanted_sum: int,
    ) -> None:
        """Takes pages, writes rows and adds them up where they are."""
        with self._timed("seam"):
            memory.back(kind, blocks)
        found = 0
        for index, part, place in parts:
            with self._timed("write"):
                scatter(part.planes, part.heads, part.runs, place)
            with self._timed("verify"):
                partial = self._pack(part, self._staging.message[: part.num_bytes], index)
                found = join_checksums((found, partial))
        if found != wanted_sum:
            raise RestorableError(
                f"rows in the {kind.value} pool of rank {self._rank} have checksum {found:016x}, {wanted_sum:016x} was "
                "written"
            )


class _Places:
    """Hands out a staging buffer from its beginning on."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._begin = memory, 0

    def take(self, num_bytes: int) -> Tensor:
        begin, self._begin = self._begin, self._begin + num_bytes
        assert self._begin <= self._memory.numel(), "a window has as many live blocks as staging is for, or fewer"
        return self._memory[begin : self._begin]
