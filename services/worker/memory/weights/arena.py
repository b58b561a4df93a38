"""One rank's weights: pages at a fixed address that hold the active layout's pieces, and a bounded staging beside.

Views are handed out once, for each layout, and stay valid across flips: a flip changes the bytes under them. Which
piece lies on which pages, and which page moves when, is decided elsewhere (core.arena, core.exchange); here pages have
addresses. Transfers to and from peers read and write `run`s of pages; only moves within the rank are done here.

Invariants: within a layout no page is handed out twice; of a set of local moves all reads come before what they would
have lost to a write.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from kernels.weights import Matrix
from services.core.ids import LayoutKind, Rank
from services.core.layout import Span
from services.models.ggml_types import GgmlType, row_bytes
from services.placement.exchange import PageMove, Place
from services.worker.memory.pages.backing import Backing

_Extent = tuple[bool, int, int]
"""(in staging, first page, end)."""


class ArenaError(ValueError):
    """Pages that cannot be had or moved as asked; the message has both numbers."""


class Arena:
    """`num_pages` pages of `page_bytes`, then staging; all of it backed while the arena lives."""

    def __init__(self, rank: Rank, backing: Backing, staging: Backing, page_bytes: int) -> None:
        """Backs both ranges whole: the arena is never smaller than the larger layout, whichever is active.

        Raises:
            ArenaError: a page cannot hold aligned elements.
            MissingMemoryError: there is no memory for it; nothing is held.
        """
        if page_bytes < 1 or page_bytes % torch.float64.itemsize:
            raise ArenaError(f"pages of {page_bytes} bytes are not whole words of {torch.float64.itemsize}")
        self.rank, self.page_bytes = rank, page_bytes
        self._backing, self._staging = backing, staging
        self._handed_out: dict[LayoutKind, list[_Extent]] = {kind: [] for kind in LayoutKind}
        backing.back(0, backing.num_bytes)
        try:
            staging.back(0, staging.num_bytes)
        except Exception:
            backing.release(0, backing.num_bytes)
            raise

    @property
    def num_pages(self) -> int:
        """Whole pages of the arena."""
        return self._backing.num_bytes // self.page_bytes

    @property
    def num_staging_pages(self) -> int:
        """Whole pages of the staging."""
        return self._staging.num_bytes // self.page_bytes

    @property
    def flat(self) -> Tensor:
        """[num_pages * page_bytes] uint8."""
        return self._backing.flat[: self.num_pages * self.page_bytes]

    def tensor(self, layout: LayoutKind, pages: Span, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Hands `pages` out as a tensor of one layout, from their first byte on; once.

        Raises:
            ArenaError: they are not the arena's, too few, or handed out already in this layout.
        """
        self._hand_out(layout, pages, prod(shape) * dtype.itemsize)
        return self._backing.tensor(dtype, shape, pages.begin * self.page_bytes)

    def matrix(self, layout: LayoutKind, pages: Span, ggml_type: GgmlType, num_rows: int, num_columns: int) -> Matrix:
        """Hands `pages` out as a packed matrix of one layout; once. Raises ArenaError like `tensor`."""
        stride = row_bytes(ggml_type, num_columns)
        self._hand_out(layout, pages, num_rows * stride)
        owner = self._backing.tensor(torch.uint8, (num_rows * stride,), pages.begin * self.page_bytes)
        return Matrix(owner.data_ptr(), ggml_type, num_rows, num_columns, stride, owner)

    def run(self, first_page: int, num_pages: int, *, in_staging: bool = False) -> Tensor:
        """[num_pages * page_bytes] uint8: a run of pages for a transfer, from or to a peer; not copied.

        Raises:
            ArenaError: they are not all pages of the arena, or of the staging.
        """
        place, count = (self._staging, self.num_staging_pages) if in_staging else (self._backing, self.num_pages)
        end = first_page + num_pages
        if not 0 <= first_page <= end <= count:
            name = "staging" if in_staging else "arena"
            raise ArenaError(f"pages [{first_page}, {end}) are not within the {count} of the {name}: not its plan")
        return place.flat[first_page * self.page_bytes : end * self.page_bytes]

    def pages_of(self, place: Place, num_pages: int) -> Tensor:
        """A run of pages as a plan names it: what this rank reads or writes of a move.

        Raises:
            ArenaError: it is another rank's, or not within its place.
        """
        if place.rank != self.rank:
            raise ArenaError(f"pages of rank {place.rank} are not on rank {self.rank}: move them over the link")
        return self.run(place.page, num_pages, in_staging=place.is_staging)

    def move_within(self, moves: Iterable[PageMove]) -> int:
        """Makes those moves whose both ends are this rank, as if all were read before any is written; returns bytes.

        Where reads and writes overlap, all moves go through staging that none of them names.

        Raises:
            ArenaError: a page is written twice, or staging has no room; nothing was moved.
        """
        local = [move for move in moves if move.source.rank == move.destination.rank == self.rank]
        pairs = [
            (self.pages_of(move.source, move.num_pages), self.pages_of(move.destination, move.num_pages))
            for move in local
        ]
        written: list[_Extent] = []
        for move in local:
            extent = _extent(move.destination, move.num_pages)
            if not _add(written, extent):
                raise ArenaError(f"pages {extent[1:]} of rank {self.rank} would be written twice at once: not a plan")
        if any(_meets(written, _extent(move.source, move.num_pages)) for move in local):
            pairs = self._through_staging(local, pairs)
        for source, destination in pairs:
            destination.copy_(source)
        return sum(destination.numel() for _, destination in pairs)

    def _through_staging(
        self, local: Sequence[PageMove], pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Copies all sources aside; returns the pairs that are left to be copied."""
        ends = (_extent(place, move.num_pages) for move in local for place in (move.source, move.destination))
        page = max((end for is_staging, _, end in ends if is_staging), default=0)
        needed = page + sum(move.num_pages for move in local)
        if needed > self.num_staging_pages:
            raise ArenaError(
                f"moves of rank {self.rank} that overlap need {needed} staging pages, it has {self.num_staging_pages}: "
                "raise the staging, or make them in smaller rounds"
            )
        aside = []
        for source, destination in pairs:
            num_pages = source.numel() // self.page_bytes
            kept = self.run(page, num_pages, in_staging=True)
            kept.copy_(source)
            aside.append((kept, destination))
            page += num_pages
        return aside

    def close(self) -> None:
        """Returns all memory; views must not be touched from here on."""
        self._backing.close()
        self._staging.close()

    def _hand_out(self, layout: LayoutKind, pages: Span, num_bytes: int) -> None:
        room = self.run(pages.begin, len(pages)).numel()
        if num_bytes > room:
            raise ArenaError(f"pages [{pages.begin}, {pages.end}) have {room} bytes, the view needs {num_bytes}")
        if not _add(self._handed_out[layout], (False, pages.begin, pages.end)):
            raise ArenaError(
                f"of pages [{pages.begin}, {pages.end}) some are handed out already in {layout.name}: keep the view, "
                "it stays valid across flips"
            )


def _extent(place: Place, num_pages: int) -> _Extent:
    return place.is_staging, place.page, place.page + num_pages


def _meets(disjoint: Sequence[_Extent], extent: _Extent) -> bool:
    """Whether an extent has pages in common with any of those, which are sorted and have none in common."""
    place, begin, end = extent
    at = bisect_left(disjoint, extent)
    before = at > 0 and disjoint[at - 1][0] == place and disjoint[at - 1][2] > begin
    after = at < len(disjoint) and disjoint[at][0] == place and disjoint[at][1] < end
    return begin < end and (before or after)


def _add(disjoint: list[_Extent], extent: _Extent) -> bool:
    """Adds an extent to those, unless it has pages in common with one; says whether. Empty ones are left out."""
    if _meets(disjoint, extent):
        return False
    if extent[1] < extent[2]:
        insort(disjoint, extent)
    return True
