"""Figures of an acceptance run: token gaps at flips and at instants without one, rates, first tokens, growth. Pure.

All times that come in are wall-clock nanoseconds; what goes out is in milliseconds, or in tokens per second.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tools.load.http_load import Streamed
from tools.load.observe import CostSample, FlipSeen

NS_PER_MS = 1e6
NEIGHBOURS = 5
"""Gaps before and after a flip, each, that say what a stream's gap is without one."""
PLACEBO_EVERY_NS = 500_000_000
"""Between the instants of a control at which the same is measured as at a flip."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers; p99 of fewer than 100 values is their largest."""

    count: int
    p50: float
    p99: float
    max: float


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(len(ordered), median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], ordered[-1])


@dataclass(frozen=True, slots=True)
class GapAtFlip:
    """One stream's gap over an instant, and its usual gap around it."""

    gap_ms: float
    usual_ms: float

    @property
    def added_ms(self) -> float:
        """What the instant added."""
        return self.gap_ms - self.usual_ms


def gap_over(arrived_ns: Sequence[int], begin_ns: int, end_ns: int) -> GapAtFlip | None:
    """The longest gap that overlaps [begin, end], beside the median of its neighbours; None where the stream did not
    run across, or was too short around it to say what is usual.
    """
    first = bisect.bisect_right(arrived_ns, begin_ns) - 1
    last = bisect.bisect_left(arrived_ns, end_ns)
    if first < 0 or last >= len(arrived_ns):
        return None
    over = [later - earlier for earlier, later in pairwise(arrived_ns[first : last + 1])]
    before = [later - earlier for earlier, later in pairwise(arrived_ns[max(0, first - NEIGHBOURS) : first + 1])]
    after = [later - earlier for earlier, later in pairwise(arrived_ns[last : last + NEIGHBOURS + 1])]
    if not over or len(before) < 2 or len(after) < 2:
        return None
    return GapAtFlip(max(over) / NS_PER_MS, median([*before, *after]) / NS_PER_MS)


def gaps_at_flips(
    flips: Iterable[FlipSeen], arrivals: Sequence[Sequence[int]]
) -> dict[tuple[int, int], list[GapAtFlip]]:
    """By flip: the gaps of the streams that ran across its pause."""
    found: dict[tuple[int, int], list[GapAtFlip]] = {}
    for flip in flips:
        if flip.pause_begin_unix_ns is None or flip.pause_end_unix_ns is None or not flip.is_committed:
            continue
        gaps = [gap_over(arrived, flip.pause_begin_unix_ns, flip.pause_end_unix_ns) for arrived in arrivals]
        found[flip.generation, flip.flip_id] = [gap for gap in gaps if gap is not None]
    return found


def placebo_gaps(begin_ns: int, end_ns: int, pause_ns: int, arrivals: Sequence[Sequence[int]]) -> list[GapAtFlip]:
    """The same measurement at instants without a flip, as long as a usual pause."""
    instants = range(begin_ns, end_ns - pause_ns, PLACEBO_EVERY_NS)
    gaps = [gap_over(arrived, at_ns, at_ns + pause_ns) for at_ns in instants for arrived in arrivals]
    return [gap for gap in gaps if gap is not None]


def burst_gaps(streamed: Sequence[Streamed]) -> list[float]:
    """For each long prompt and each stream that decoded beside it: the stream's longest gap (ms) from the sending of
    the prompt to its first token. What a flip costs shows here against a control, whatever caused a gap.
    """
    prompts = [stream for stream in streamed if stream.kind == "burst" and stream.arrived_ns]
    others = [stream.arrived_ns for stream in streamed if stream.kind == "decoder"]
    gaps = [gap_over(arrived, prompt.asked_ns, prompt.arrived_ns[0]) for prompt in prompts for arrived in others]
    return [gap.gap_ms for gap in gaps if gap is not None]


def token_gaps_ms(arrivals: Sequence[Sequence[int]], begin_ns: int, end_ns: int) -> list[float]:
    """Every gap between two tokens of a stream that ended in the span."""
    return [
        (later - earlier) / NS_PER_MS
        for arrived in arrivals
        for earlier, later in pairwise(arrived)
        if begin_ns <= later < end_ns
    ]


def ttft_ms(streamed: Iterable[Streamed]) -> dict[str, Spread]:
    """By kind of request: from sending to the first streamed token."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for stream in streamed:
        if stream.ttft_ns is not None:
            kinds[stream.kind].append(stream.ttft_ns / NS_PER_MS)
    return {kind: found for kind, values in sorted(kinds.items()) if (found := spread(values)) is not None}


def decode_rates(streamed: Iterable[Streamed]) -> dict[str, Spread]:
    """By kind of request: tokens per second of one stream after its first token."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for stream in streamed:
        if stream.decode_tokens_per_s is not None:
            kinds[stream.kind].append(stream.decode_tokens_per_s)
    return {kind: found for kind, values in sorted(kinds.items()) if (found := spread(values)) is not None}


def tokens_per_s(arrivals: Sequence[Sequence[int]], begin_ns: int, end_ns: int) -> float:
    """Of all streams together, first tokens left out."""
    num_tokens = sum(begin_ns <= at_ns < end_ns for arrived in arrivals for at_ns in arrived[1:])
    return num_tokens * 1e9 / (end_ns - begin_ns)


@dataclass(frozen=True, slots=True)
class Growth:
    """A process's cost early in the run and at its end: medians over the second and the last quarter of the samples."""

    process: str
    private_before_bytes: float
    private_after_bytes: float
    descriptors_before: float
    descriptors_after: float
    max_rss_bytes: int
    max_pss_bytes: int


def growths(costs: Sequence[CostSample]) -> list[Growth]:
    """By process. The first quarter is left out: memory that is touched for the first time is no leak."""
    by_process: dict[str, list[CostSample]] = defaultdict(list)
    for cost in costs:
        by_process[cost.process].append(cost)
    return [_growth(process, samples) for process, samples in by_process.items() if len(samples) >= 4]


def _growth(process: str, samples: Sequence[CostSample]) -> Growth:
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    return Growth(
        process,
        median(cost.private_bytes for cost in before),
        median(cost.private_bytes for cost in after),
        median(cost.num_descriptors for cost in before),
        median(cost.num_descriptors for cost in after),
        max(cost.rss_bytes for cost in samples),
        max(cost.pss_bytes for cost in samples),
    )
