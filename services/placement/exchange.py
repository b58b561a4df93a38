"""The order in which two layouts change places within the ranks' arenas, with a bounded number of pages staged.

Pure: pages and ranks are numbers. A plan is a list of rounds, a round two phases with a barrier after each: transfers,
which read arenas and write either pages that were free before the round or the receiver's staging; then writes, each
local to its rank, from staging into place. So all of a round's reads come before what they make room for is written.

How it ends: a page has at most one move into it, so moves form trees, which end in free pages, and cycles, which have
trees hanging on them. Whatever leads into a free page may move at once. A cycle is opened by one move that waits in
staging until its place is free; one staged page therefore always suffices, and more make fewer rounds.

Invariants: within a phase no page is both read and written, and none is written twice; at no instant do a rank's staged
pages exceed the bound; each page that must move moves once. A phase overwrites nothing that it, or the state before it,
needs, but copies that no rank takes (`refill`): one that was interrupted counts as not begun, and the phases before it
can be taken back from there.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from services.core.ids import Rank
from services.placement.arena import Arenas, PageMap
from services.placement.reshard import Link, TransferPlan, stable_hash


class ExchangeError(ValueError):
    """An exchange that cannot be made within its bounds; the message has both numbers."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run of pages begins: in a rank's arena, or in its staging."""

    rank: Rank
    is_staging: bool
    page: int


@dataclass(frozen=True, slots=True)
class PageMove:
    """A run of pages on its way."""

    source: Place
    destination: Place
    num_pages: int

    def reversed(self) -> "PageMove":
        """The way back."""
        return PageMove(self.destination, self.source, self.num_pages)


Phase = tuple[PageMove, ...]
"""Moves in any order, or at once; the next phase begins when all ranks have ended this one."""


@dataclass(frozen=True, slots=True)
class Round:
    """Reads, then writes."""

    transfers: Phase
    writes: Phase
    """Local: from staging into place."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A plan for one direction."""

    staging_pages: int
    """Bound of each rank's staging."""
    least_staging_pages: int
    """With which there would be a plan as well: 1 if some pages wait for each other in a circle, or 0."""
    rounds: tuple[Round, ...]
    undo: tuple[Round, ...]
    """What is to be moved back of each round: a page comes back from one rank, and only if it was overwritten."""
    refill: Phase
    """Copies that no rank took and that were overwritten: taken again from the rank whose copy moved."""
    link_pages: dict[Link, int]
    hash: int
    """64 bits over all rounds; equal on all ranks or not the same plan."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Two for each round, in order."""
        return tuple(phase for step in self.rounds for phase in (step.transfers, step.writes))

    def restoring_phases(self, num_done: int) -> tuple[Phase, ...]:
        """What brings the layout before back after `num_done` whole phases; one that was interrupted is not done.

        A part of the first phase already overwrites copies that no rank takes, so these are refilled in any case.
        """
        done = [phase for step in self.undo for phase in (step.transfers, step.writes)][:num_done]
        back = tuple(tuple(move.reversed() for move in phase) for phase in reversed(done))
        return (*back, self.refill)


def exchange_plans(arenas: Arenas, staging_pages: int) -> tuple[Exchange, Exchange]:
    """From the first layout to the second, and back.

    Raises:
        ExchangeError: fewer staging pages than the least with which it can be done.
    """
    return (
        _exchange(arenas.num_pages, arenas.first, arenas.second, arenas.to_second, staging_pages),
        _exchange(arenas.num_pages, arenas.second, arenas.first, arenas.to_first, staging_pages),
    )


def _exchange(
    num_pages: Sequence[int],
    before: Sequence[PageMap],
    after: Sequence[PageMap],
    plan: TransferPlan,
    staging_pages: int,
) -> Exchange:
    graph = _PageGraph(num_pages)
    for run in plan.runs:
        if run.source != run.destination:
            pages = before[run.source][run.source_shard]
            place = after[run.destination][run.destination_shard]
            graph.add(run.source, pages.begin, run.destination, place.begin, len(pages))
    scheduler = _Scheduler(graph, staging_pages)
    rounds, undo = scheduler.rounds()
    refill = tuple(_refill(before, after, plan))
    digest = stable_hash([rounds, undo, refill])
    least = scheduler.least_staging_pages
    return Exchange(staging_pages, least, rounds, undo, refill, graph.link_pages(), digest)


def _refill(before: Sequence[PageMap], after: Sequence[PageMap], plan: TransferPlan) -> Iterator[PageMove]:
    source_of = {run.source_shard: run.source for run in plan.runs}
    taken = {(run.source, run.source_shard) for run in plan.runs}
    for rank, page_map in enumerate(before):
        for piece, place in page_map.items():
            if piece not in after[rank] and (rank, piece) not in taken:
                source = source_of[piece]
                copy = Place(source, False, before[source][piece].begin)
                yield PageMove(copy, Place(Rank(rank), False, place.begin), len(place))


class _PageGraph:
    """Moves of single pages; a page's number is its place in all arenas laid end to end."""

    def __init__(self, num_pages: Sequence[int]) -> None:
        self.num_ranks = len(num_pages)
        self.base = [0, *accumulate(num_pages)]
        self.rank_of = [Rank(rank) for rank, count in enumerate(num_pages) for _ in range(count)]
        self.source: list[int] = []
        """Of each move."""
        self.destination: list[int] = []
        self.move_into: list[int | None] = [None] * self.base[-1]
        """Of each page."""
        self.num_readers = [0] * self.base[-1]
        """Of each page, moves out of it that are still to come."""

    def add(self, source: Rank, source_page: int, destination: Rank, destination_page: int, count: int) -> None:
        """Moves `count` pages."""
        read, written = self.base[source] + source_page, self.base[destination] + destination_page
        for page in range(count):
            assert self.move_into[written + page] is None, "a page has one piece under one layout"
            self.move_into[written + page] = len(self.source)
            self.num_readers[read + page] += 1
            self.source.append(read + page)
            self.destination.append(written + page)

    def link_pages(self) -> dict[Link, int]:
        """Pages that move over each link."""
        ranks = self.rank_of
        return dict(
            Counter((ranks[read], ranks[into]) for read, into in zip(self.source, self.destination, strict=True))
        )

    def receiver(self, move: int) -> Rank:
        """Whom a move goes to."""
        return self.rank_of[self.destination[move]]

    def cycles(self) -> Iterator[list[int]]:
        """The moves of each cycle, each after the one that its place waits for."""
        seen_by: list[int | None] = [None] * len(self.move_into)
        for start in range(len(self.move_into)):
            page, path = start, list[int]()
            while seen_by[page] is None:
                seen_by[page] = start
                move = self.move_into[page]
                if move is None:
                    break
                path.append(move)
                page = self.source[move]
            else:
                if seen_by[page] == start:
                    yield path[next(i for i, move in enumerate(path) if self.destination[move] == page) :]


_Page = tuple[Rank, bool, int]
"""A `Place` of one page."""

_Demand = tuple[tuple[Rank, int], ...]
"""Staged pages that a cycle takes of each rank if it is gone through in one round."""


class _RoundMoves:
    """What is taken into one round so far."""

    __slots__ = ("freed", "spare", "staged", "transfers", "writes")

    def __init__(self, spare: list[int]) -> None:
        self.spare = spare
        """Staging that is left of each rank."""
        self.freed: deque[int] = deque()
        """Pages that this round reads for the last time and that are to be overwritten."""
        self.transfers: list[int] = []
        self.staged: list[int] = []
        """Those of the transfers that go to staging."""
        self.writes: list[int] = []


class _Scheduler:
    """Takes every move of a graph into some round, once."""

    def __init__(self, graph: _PageGraph, staging_pages: int) -> None:
        self._graph = graph
        self._num_readers = list(graph.num_readers)
        self._ready = [m for m, page in enumerate(graph.destination) if not graph.num_readers[page]]
        """Their places are free."""
        self._fitting: dict[_Demand, deque[list[int]]] = defaultdict(deque)
        self._long: deque[list[int]] = deque()
        """Cycles that need more of a rank than all of its staging."""
        for cycle in graph.cycles():
            demand = tuple(sorted(Counter(graph.receiver(move) for move in cycle).items()))
            fits = max(count for _, count in demand) <= staging_pages
            (self._fitting[demand] if fits else self._long).append(cycle)
        self.least_staging_pages = 1 if self._fitting or self._long else 0
        if staging_pages < self.least_staging_pages:
            raise ExchangeError(
                f"staging of {staging_pages} pages a rank, at least {self.least_staging_pages} is needed: pages of "
                f"{len(self._long)} circles wait for each other; raise the staging"
            )
        self._slots = [list(range(staging_pages)) for _ in range(graph.num_ranks)]
        """Free staging of each rank, as heaps: the lowest is taken first."""
        self._slot_of: dict[int, int] = {}
        """Of each staged move."""
        self._held: set[int] = set()
        """Staged moves whose place is not free yet."""
        self._restores: set[int] = set()
        """Moves that are to be taken back: the last to read a page that is overwritten."""

    def rounds(self) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
        """All rounds, and what is to be taken back of each."""
        rounds, undo = [], []
        while self._ready or self._held or self._long or any(self._fitting.values()):
            taken = _RoundMoves([len(slots) for slots in self._slots])
            self._fill(taken)
            assert taken.transfers, "a free page or a cycle is left while moves are"
            self._assign_slots(taken)
            rounds.append(self._round(taken.transfers, taken.writes))
            undo.append(
                self._round(
                    [move for move in taken.transfers if move in self._restores],
                    [move for move in taken.writes if move in self._restores],
                )
            )
            self._release_slots(taken)
        return tuple(rounds), tuple(undo)

    def _fill(self, taken: "_RoundMoves") -> None:
        direct, self._ready = self._ready, []
        for move in direct:
            self._read(move, taken)
        freed, taken.freed = taken.freed, deque()
        self._open_fitting(taken)
        taken.freed = freed
        self._follow(taken)
        if self._long and not self._held:
            self._open_long(taken)

    def _read(self, move: int, taken: "_RoundMoves") -> None:
        page = self._graph.source[move]
        taken.transfers.append(move)
        self._num_readers[page] -= 1
        if not self._num_readers[page] and self._graph.move_into[page] is not None:
            self._restores.add(move)
            taken.freed.append(page)

    def _stage(self, move: int, taken: "_RoundMoves") -> None:
        taken.spare[self._graph.receiver(move)] -= 1
        taken.staged.append(move)
        self._read(move, taken)

    def _follow(self, taken: "_RoundMoves") -> None:
        """What leads into pages that were read in this round: staged while there is room, direct in the next round."""
        while taken.freed:
            move = self._graph.move_into[taken.freed.popleft()]
            assert move is not None
            if move in self._held:
                self._held.remove(move)
                taken.writes.append(move)
            elif taken.spare[self._graph.receiver(move)]:
                taken.writes.append(move)
                self._stage(move, taken)
            else:
                self._ready.append(move)

    def _open(self, move: int, taken: "_RoundMoves") -> None:
        self._held.add(move)
        self._stage(move, taken)
        self._follow(taken)

    def _open_fitting(self, taken: "_RoundMoves") -> None:
        """One of each kind in turn, those first of which most are left, so that all links are at work."""
        demands = sorted(self._fitting, key=lambda demand: -len(self._fitting[demand]))
        while demands:
            demands = [
                demand
                for demand in demands
                if self._fitting[demand] and all(taken.spare[rank] >= count for rank, count in demand)
            ]
            for demand in demands:
                if self._fitting[demand] and all(taken.spare[rank] >= count for rank, count in demand):
                    self._open(self._fitting[demand].popleft()[0], taken)

    def _open_long(self, taken: "_RoundMoves") -> None:
        opening = max(self._long[0], key=lambda move: taken.spare[self._graph.receiver(move)])
        if taken.spare[self._graph.receiver(opening)]:
            self._long.popleft()
            self._open(opening, taken)

    def _assign_slots(self, taken: "_RoundMoves") -> None:
        for move in sorted(taken.staged, key=self._graph.destination.__getitem__):
            self._slot_of[move] = heappop(self._slots[self._graph.receiver(move)])

    def _release_slots(self, taken: "_RoundMoves") -> None:
        for move in taken.writes:
            heappush(self._slots[self._graph.receiver(move)], self._slot_of.pop(move))

    def _round(self, transfers: Iterable[int], writes: Iterable[int]) -> Round:
        return Round(_in_runs(map(self._transfer, transfers)), _in_runs(map(self._write, writes)))

    def _transfer(self, move: int) -> tuple[_Page, _Page]:
        slot = self._slot_of.get(move)
        into = self._page(self._graph.destination[move]) if slot is None else (self._graph.receiver(move), True, slot)
        return self._page(self._graph.source[move]), into

    def _write(self, move: int) -> tuple[_Page, _Page]:
        into = self._page(self._graph.destination[move])
        return (into[0], True, self._slot_of[move]), into

    def _page(self, page: int) -> _Page:
        rank = self._graph.rank_of[page]
        return rank, False, page - self._graph.base[rank]


def _in_runs(pairs: Iterable[tuple[_Page, _Page]]) -> Phase:
    """Pages side by side at both ends as one move."""
    runs: list[tuple[_Page, _Page, int]] = []
    for source, destination in sorted(pairs, key=lambda pair: (pair[0][:2], pair[1][:2], pair[0][2])):
        if runs:
            first, into, count = runs[-1]
            if source == (*first[:2], first[2] + count) and destination == (*into[:2], into[2] + count):
                runs[-1] = (first, into, count + 1)
                continue
        runs.append((source, destination, 1))
    return tuple(PageMove(Place(*first), Place(*into), count) for first, into, count in runs)
