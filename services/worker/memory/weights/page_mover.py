"""Carries out an exchange of pages between arenas, phase by phase, over the wire.

A rank reads and writes its own memory alone, in the plan's order; what a peer is to have goes in messages, of bounded
size and in the same order at both ends. So no barrier is needed between phases: a page is sent before the phase that
overwrites it begins here, and is written where it goes when that rank is at the same phase.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from services.core.ids import Rank
from services.placement.exchange import PageMove, Phase
from services.placement.pair_order import Turn, partners, turns
from services.worker.memory.weights.arena import Arena
from services.worker.memory.wire import Wire


class PageMover:
    """One rank's end. Use from the model thread."""

    def __init__(self, wire: Wire, arena: Arena) -> None:
        self._wire, self._arena = wire, arena

    def trade(self, phases: Iterable[Phase]) -> None:
        """All of this rank's moves.

        Raises:
            CollectiveError: a wait for a peer ended without it; the arena holds neither layout.
        """
        numbers = [[0, 0] for _ in range(self._wire.num_ranks)]
        for phase in phases:
            with self._wire.tally.timed("write_ns"):
                self._arena.move_within(phase)
            for peer in partners(self._wire.rank, self._wire.num_ranks):
                self._meet(peer, phase, numbers[peer])

    def _meet(self, peer: Rank, phase: Phase, numbers: list[int]) -> None:
        """`numbers`: messages sent to and taken from the peer so far."""
        own, tally = self._wire.rank, self._wire.tally
        outgoing = list(self._messages(move for move in phase if _is(move, own, peer)))
        incoming = list(self._messages(move for move in phase if _is(move, peer, own)))
        for turn, index in turns(len(outgoing), len(incoming)):
            if turn is Turn.SEND:
                with tally.timed("read_ns"):
                    self._wire.send(outgoing[index], peer, numbers[0])
                numbers[0] += 1
            else:
                with tally.timed("write_ns"):
                    self._wire.take(incoming[index], peer, numbers[1])
                numbers[1] += 1
                tally.bytes_moved += incoming[index].numel()

    def _messages(self, moves: Iterable[PageMove]) -> Iterator[Tensor]:
        """This rank's end of the moves in messages; both ends cut them alike."""
        size = max(self._wire.bounds.chunk_bytes // self._arena.page_bytes, 1) * self._arena.page_bytes
        for move in moves:
            place = move.source if move.source.rank == self._wire.rank else move.destination
            pages = self._arena.pages_of(place, move.num_pages)
            for begin in range(0, pages.numel(), size):
                yield pages[begin : begin + size]


def _is(move: PageMove, source: Rank, destination: Rank) -> bool:
    return move.source.rank == source and move.destination.rank == destination
