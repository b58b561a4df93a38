"""Whether an acceptance run kept the promise: each part of it a check with its numbers. Pure.

The run passes if every check does. What could not be observed does not pass: no flip, no probe across a flip and no
sample are failures of the run, not of the mesh, and are told as such.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.acceptance.figures import Growth
from tools.load.answer_probe import Probed
from tools.load.http_load import Streamed
from tools.load.observe import FlipSeen, LoadSample
from tools.oracle.compare import MAX_DIVERGED_SHARE

MAX_PRIVATE_GROWTH_BYTES = 16 * 2**20
"""Of one process from the second to the last quarter: above what allocators keep of a busy moment."""
MAX_PRIVATE_GROWTH_SHARE = 0.10
MAX_DESCRIPTOR_GROWTH = 12
"""A router has one for each open request; medians over a quarter move by fewer than this."""
MIN_FREE_SHARE = 0.02
"""Of the machine's memory: below, the next allocation may be refused."""
DIRECTIONS = (("TP", "PP"), ("PP", "TP"))


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the promise."""

    name: str
    passed: bool
    statement: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run has left."""

    streamed: Sequence[Streamed]
    num_skipped: int
    flips: Sequence[FlipSeen]
    """Of the time under the policy."""
    min_flips: int
    """Committed, with requests resident, in each direction."""
    loads: Sequence[LoadSample]
    at_rest: LoadSample
    """After the last request has ended."""
    control_faults: Sequence[str]
    probed: Sequence[Probed]
    growths: Sequence[Growth]
    free_bytes: Sequence[int]
    machine_bytes: int
    num_verdicts: int
    last_verdict: str
    num_resubmitted: int
    num_restarts: int


def judge_run(evidence: Evidence) -> list[Check]:
    """Every check, in the order in which people read them."""
    return [
        _flips(evidence),
        _requests(evidence),
        _census(evidence),
        _generation(evidence),
        _answers(evidence),
        _sentinel(evidence),
        _memory(evidence),
        _descriptors(evidence),
        _corridor(evidence),
    ]


def committed_under_load(flips: Sequence[FlipSeen]) -> Counter[tuple[str, str]]:
    """How many flips in each direction carried requests and committed."""
    return Counter((flip.source, flip.target) for flip in flips if flip.is_committed and flip.num_carried)


def _flips(evidence: Evidence) -> Check:
    counts = committed_under_load(evidence.flips)
    other = Counter(flip.state for flip in evidence.flips if not flip.is_committed)
    words = [f"{counts[source, target]} {source} to {target}" for source, target in DIRECTIONS]
    words.append(f"at least {evidence.min_flips} each way expected")
    if other:
        words.append("not committed: " + ", ".join(f"{count} {state}" for state, count in other.items()))
    return Check("flips", all(counts[way] >= evidence.min_flips for way in DIRECTIONS), "; ".join(words))


def _requests(evidence: Evidence) -> Check:
    failed = [stream for stream in evidence.streamed if not stream.is_whole]
    total = len(evidence.streamed)
    words = f"{total} requests, {len(failed)} failed, {evidence.num_skipped} not sent for want of a place"
    if failed:
        first = failed[0]
        words += f"; first: {first.kind}, {first.error or f'{first.num_tokens} of {first.max_tokens} tokens'}"
    return Check("requests", total > 0 and not failed and not evidence.num_skipped, words)


def _census(evidence: Evidence) -> Check:
    unsound = max((load.unsound_censuses for load in evidence.loads), default=0)
    lost = max((load.unaccounted_blocks for load in evidence.loads), default=0)
    rest = evidence.at_rest
    sums = rest.free_blocks + rest.cached_blocks + rest.held_blocks == rest.total_blocks
    left = rest.held_blocks or rest.resident or rest.queued
    words = (
        f"{len(evidence.flips)} flips counted, {unsound} unbalanced; at most {lost} blocks without an owner in "
        f"{len(evidence.loads)} samples; at rest {rest.free_blocks} free + {rest.cached_blocks} cached + "
        f"{rest.held_blocks} held of {rest.total_blocks}, {rest.resident} requests"
    )
    return Check("census", bool(evidence.loads) and not unsound and not lost and sums and not left, words)


def _generation(evidence: Evidence) -> Check:
    generations = {load.generation for load in evidence.loads}
    words = (
        f"{len(generations)} generation, {evidence.num_restarts} restarts, "
        f"{evidence.num_resubmitted} requests submitted again"
    )
    return Check("generation", len(generations) == 1 and not evidence.num_restarts + evidence.num_resubmitted, words)


def crossings(probed: Sequence[Probed], flips: Sequence[FlipSeen]) -> Counter[tuple[str, str]]:
    """How often a probing stream ran across a flip, by direction."""
    return Counter((flip.source, flip.target) for flip in flips for probe in probed if probe.crosses(flip))


def _answers(evidence: Evidence) -> Check:
    crossed = crossings(evidence.probed, evidence.flips)
    wrong = [probe for probe in evidence.probed if probe.is_wrong]
    ties = sum(probe.difference is not None and probe.difference.is_near_tie for probe in evidence.probed)
    allowed = max(1, int(len(evidence.probed) * MAX_DIVERGED_SHARE))
    words = [*evidence.control_faults, f"{len(evidence.probed)} probing streams"]
    words += [f"{crossed[way]} across {way[0]} to {way[1]}" for way in DIRECTIONS]
    words += [f"{len(wrong)} wrong", f"{ties} parted at near ties, at most {allowed} may"]
    if wrong:
        first = wrong[0]
        where = first.difference
        words.append(first.error or (f"first at token {where.position}, margin {where.margin:.4f}" if where else ""))
    passed = not evidence.control_faults and not wrong and ties <= allowed and all(crossed[way] for way in DIRECTIONS)
    return Check("answers", passed, "; ".join(words))


def _sentinel(evidence: Evidence) -> Check:
    last = f"; last: {evidence.last_verdict}" if evidence.num_verdicts else ""
    return Check("sentinel", evidence.num_verdicts == 0, f"{evidence.num_verdicts} verdicts{last}")


def _memory(evidence: Evidence) -> Check:
    grown = [growth for growth in evidence.growths if not is_flat(growth)]
    worst = max(
        evidence.growths, key=lambda growth: growth.private_after_bytes - growth.private_before_bytes, default=None
    )
    words = "no samples" if worst is None else f"most in {worst.process}: {_megabytes(worst)}"
    if grown:
        words += "; too much in " + ", ".join(growth.process for growth in grown)
    return Check("memory", worst is not None and not grown, words)


def is_flat(growth: Growth) -> bool:
    """Whether a process keeps as much memory of its own at the end as early on, within what allocators keep."""
    allowed = max(MAX_PRIVATE_GROWTH_BYTES, growth.private_before_bytes * MAX_PRIVATE_GROWTH_SHARE)
    return growth.private_after_bytes - growth.private_before_bytes <= allowed


def _megabytes(growth: Growth) -> str:
    return f"{growth.private_before_bytes / 2**20:.1f} to {growth.private_after_bytes / 2**20:.1f} MB of its own"


def _descriptors(evidence: Evidence) -> Check:
    worst = max(evidence.growths, key=lambda growth: growth.descriptors_after - growth.descriptors_before, default=None)
    if worst is None:
        return Check("descriptors", False, "no samples")
    words = f"most in {worst.process}: {worst.descriptors_before:g} to {worst.descriptors_after:g}"
    return Check("descriptors", worst.descriptors_after - worst.descriptors_before <= MAX_DESCRIPTOR_GROWTH, words)


def _corridor(evidence: Evidence) -> Check:
    if not evidence.free_bytes:
        return Check("corridor", False, "no samples")
    least, most = min(evidence.free_bytes), max(evidence.free_bytes)
    words = f"the machine had {least / 2**20:.0f} to {most / 2**20:.0f} MB free of {evidence.machine_bytes / 2**20:.0f}"
    blocks = [load.free_blocks + load.cached_blocks for load in evidence.loads]
    if blocks:
        words += f"; the pool {min(blocks)} to {max(blocks)} blocks of {evidence.at_rest.total_blocks}"
    return Check("corridor", least >= MIN_FREE_SHARE * evidence.machine_bytes, words)
