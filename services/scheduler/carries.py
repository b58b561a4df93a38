"""What flips do to the requests they carry, until it is known: each has its next token, or time is up. Pure."""

from dataclasses import dataclass, replace

from services.core.flip.messages import FlipOutcome
from services.core.request import RequestEvent
from services.core.step import FlipEntry
from services.scheduler.batch.batcher import Batcher
from services.scheduler.inputs import Carry, Fence
from services.scheduler.token_gaps import FlipGaps, TokenGaps

REPORT_WITHIN_NS = 10_000_000_000
"""After an outcome, how long the requests that were decoding may take to get their next token before the flip's record
is closed without them."""


@dataclass(slots=True)
class _Open:
    carry: Carry
    gaps: FlipGaps
    until_ns: int


class OpenCarries:
    """Those of one generation."""

    __slots__ = ("_armed", "_gaps", "_open", "within_ns")

    def __init__(self, within_ns: int = REPORT_WITHIN_NS) -> None:
        self.within_ns = within_ns
        self._gaps = TokenGaps()
        self._armed: Carry | None = None
        self._open: list[_Open] = []

    def arm(self, entry: FlipEntry, fence: Fence, batcher: Batcher) -> None:
        """A flip is armed: counts what it carries."""
        self._armed = Carry(
            flip_id=entry.flip_id,
            fence=fence,
            outcome=FlipOutcome.ABANDONED,
            num_requests=batcher.load().running_requests,
            num_partly_prefilled=batcher.num_partly_prefilled,
            num_live_blocks=sum(length for _, length in entry.live_runs),
            longest_gap_ns=None,
        )

    def begin(self, outcome: FlipOutcome, now_ns: int) -> list[Carry]:
        """Its outcome is written; what is known of it already, where nobody was decoding."""
        assert self._armed is not None
        carry, self._armed = replace(self._armed, outcome=outcome), None
        gaps = self._gaps.begin()
        if gaps.is_closed:
            return [carry]
        self._open.append(_Open(carry, gaps, now_ns + self.within_ns))
        return []

    def note(self, events: list[RequestEvent], now_ns: int) -> list[Carry]:
        """What routers are told; carries that are complete by it."""
        return self._closed() if self._gaps.note(events, now_ns) else []

    def give_up(self, now_ns: int) -> list[Carry]:
        """Carries whose time is up, with the longest gap of the requests that have gone on."""
        late = [one for one in self._open if now_ns >= one.until_ns]
        self._open = [one for one in self._open if now_ns < one.until_ns]
        return [replace(one.carry, longest_gap_ns=one.gaps.longest_ns) for one in late]

    @property
    def clock_ns(self) -> int | None:
        """When the next one is given up."""
        return self._open[0].until_ns if self._open else None

    def _closed(self) -> list[Carry]:
        closed = [one for one in self._open if one.gaps.is_closed]
        self._open = [one for one in self._open if not one.gaps.is_closed]
        return [replace(one.carry, longest_gap_ns=one.gaps.longest_ns) for one in closed]
