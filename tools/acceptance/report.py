"""What an acceptance run amounts to: its verdict, its figures and its series, as one document and as text. Pure.

The document holds everything that the page shows; the page computes nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from tools.acceptance.figures import (
    GapAtFlip,
    Growth,
    Spread,
    burst_gaps,
    decode_rates,
    gaps_at_flips,
    growths,
    placebo_gaps,
    spread,
    token_gaps_ms,
    tokens_per_s,
    ttft_ms,
)
from tools.acceptance.verdict import DIRECTIONS, Check, Evidence, committed_under_load, crossings, judge_run
from tools.bench.machine_facts import MachineFacts
from tools.load.answer_probe import AnswerProbe, Probed
from tools.load.http_load import Shape, Streamed
from tools.load.observe import FlipSeen, Observer

NS_PER_S = 1e9
NS_PER_MS = 1e6

Document = dict[str, object]
Arrivals = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    minutes: float
    """Under the policy auto."""
    control_s: float
    """Of the same load before that, with no flips."""
    min_flips: int
    """Each way."""
    shape: Shape
    load_statement: str


@dataclass(slots=True)
class Window:
    """Wall-clock bounds of the control and of the time under the policy."""

    control_begin_ns: int
    auto_begin_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a run has left."""

    plan: Plan
    num_ranks: int
    model: str
    window: Window
    offset_ns: int
    """From the monotonic clock to the wall clock."""
    streamed: Sequence[Streamed]
    num_skipped: int
    seed: int
    """Of the prompts."""
    observer: Observer
    probe: AnswerProbe
    verdicts_before: int
    readiness_s: float | None
    """None where the mesh ran already."""
    facts: MachineFacts

    @property
    def arrivals(self) -> list[list[int]]:
        """Of each stream, in wall-clock nanoseconds."""
        return [[at_ns + self.offset_ns for at_ns in stream.arrived_ns] for stream in self.streamed]

    @property
    def flips(self) -> list[FlipSeen]:
        """Under the policy, in order."""
        seen = sorted(self.observer.flips.values(), key=lambda flip: flip.armed_unix_ns)
        return [flip for flip in seen if self.window.auto_begin_ns <= flip.armed_unix_ns < self.window.end_ns]


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; times in milliseconds, rates in tokens per second. None: nothing to measure by."""

    pause: dict[str, Spread | None]
    """By direction."""
    gap_at_flip: dict[str, Spread | None]
    """By direction: a stream's gap over the flip."""
    added_gap: dict[str, Spread | None]
    """By direction: the gap over the flip, less the stream's usual gap around it."""
    control_added_gap: Spread | None
    """The same at instants of the control."""
    longest_gap_by_server: Spread | None
    """As the scheduler saw it, for each flip."""
    burst_gaps: Spread | None
    """Longest gap of a decoding stream while a long prompt is computed."""
    control_burst_gaps: Spread | None
    token_gaps: Spread | None
    control_token_gaps: Spread | None
    ttft: dict[str, Spread]
    control_ttft: dict[str, Spread]
    decode: dict[str, Spread]
    control_decode: dict[str, Spread]
    tokens_per_s: float
    control_tokens_per_s: float
    growths: list[Growth]


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict and what it rests on."""

    run: Run
    checks: list[Check]
    figures: Figures
    gaps: dict[tuple[int, int], list[GapAtFlip]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the promise was kept."""
        return all(check.passed for check in self.checks)

    def document(self) -> Document:
        """Everything, for JSON."""
        run = self.run
        return {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "run": {
                "ranks": run.num_ranks,
                "model": run.model,
                "minutes": run.plan.minutes,
                "control_s": run.plan.control_s,
                "load": run.plan.load_statement,
                "seed": run.seed,
                "readiness_s": run.readiness_s,
                "window": asdict(run.window),
                "machine": asdict(run.facts),
                "statement": run.facts.statement(),
            },
            "summary": self._summary(),
            "figures": asdict(self.figures),
            "flips": [{**asdict(flip), "gaps": self._gaps_of(flip)} for flip in run.flips],
            "layouts": [asdict(span) for _, span in sorted(run.observer.spans.items())],
            "loads": [asdict(load) for load in run.observer.loads],
            "costs": [asdict(cost) for cost in run.observer.costs],
            "free_bytes": run.observer.free_bytes,
            "seconds": seconds_of(run.arrivals, run.window.control_begin_ns, run.window.end_ns),
            "streams": [_stream(stream, run.offset_ns) for stream in run.streamed],
            "probes": [_probe(probe) for probe in run.probe.probed],
            "unanswered": run.observer.unanswered,
        }

    def _gaps_of(self, flip: FlipSeen) -> list[Document]:
        return [asdict(gap) for gap in self.gaps.get((flip.generation, flip.flip_id), [])]

    def _summary(self) -> Document:
        """The few numbers by which runs are compared."""
        run = self.run
        flips, crossed = committed_under_load(run.flips), crossings(run.probe.probed, run.flips)
        return {
            "flips": {f"{source} to {target}": flips[source, target] for source, target in DIRECTIONS},
            "crossings": {f"{source} to {target}": crossed[source, target] for source, target in DIRECTIONS},
            "failed_requests": sum(not stream.is_whole for stream in run.streamed),
        }

    def text(self) -> str:
        """Checks, then figures, then the verdict."""
        run, figures = self.run, self.figures
        lines = [run.facts.statement(), f"{run.num_ranks} ranks, {run.model}, {run.plan.load_statement}", ""]
        lines += [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.statement}" for check in self.checks]
        lines += ["", *(f"pause {way}: {shown(pause)}" for way, pause in figures.pause.items())]
        lines += [f"gap over a flip, {way}: {shown(gap)}" for way, gap in figures.gap_at_flip.items()]
        lines += [f"added by a flip, {way}: {shown(gap)}" for way, gap in figures.added_gap.items()]
        lines.append(f"added by nothing, in the control: {shown(figures.control_added_gap)}")
        lines.append(
            f"longest gap beside a long prompt: {shown(figures.burst_gaps)}; "
            f"control: {shown(figures.control_burst_gaps)}"
        )
        lines.append(f"all token gaps: {shown(figures.token_gaps)}; control: {shown(figures.control_token_gaps)}")
        for kind, found in figures.ttft.items():
            lines.append(f"first token, {kind}: {shown(found)}; control: {shown(figures.control_ttft.get(kind))}")
        for kind, found in figures.decode.items():
            lines.append(
                f"tokens/s of a stream, {kind}: median {found.p50:.1f}, "
                f"control {_median(figures.control_decode.get(kind))}"
            )
        lines.append(f"tokens/s in all: {figures.tokens_per_s:.1f}, control {figures.control_tokens_per_s:.1f}")
        if run.readiness_s is not None:
            lines.append(f"ready {run.readiness_s:.1f} s after the start")
        return "\n".join([*lines, "", "accepted" if self.passed else "not accepted"])


def report_of(run: Run) -> Report:
    """Judges and measures."""
    window, observer, arrivals, flips = run.window, run.observer, run.arrivals, run.flips
    gaps = gaps_at_flips(flips, arrivals)
    evidence = Evidence(
        streamed=run.streamed,
        num_skipped=run.num_skipped,
        flips=flips,
        min_flips=run.plan.min_flips,
        loads=observer.loads,
        at_rest=observer.loads[-1],
        control_faults=run.probe.control_faults,
        probed=run.probe.probed,
        growths=growths([cost for cost in observer.costs if cost.unix_ns >= window.auto_begin_ns]),
        free_bytes=[free for _, free in observer.free_bytes],
        machine_bytes=run.facts.memory_bytes,
        num_verdicts=observer.num_verdicts - run.verdicts_before,
        last_verdict=observer.last_verdict,
        num_resubmitted=observer.num_resubmitted,
        num_restarts=observer.num_restarts,
    )
    return Report(run, judge_run(evidence), _figures(run, evidence, gaps, arrivals), gaps)


def _figures(run: Run, evidence: Evidence, gaps: dict[tuple[int, int], list[GapAtFlip]], arrivals: Arrivals) -> Figures:
    window, flips = run.window, [flip for flip in evidence.flips if flip.is_committed]
    pauses = [flip.pause_ns for flip in flips if flip.pause_ns is not None]
    usual_pause_ns = int(median(pauses)) if pauses else 0
    over = {
        f"{source} to {target}": [
            gap
            for flip in flips
            if (flip.source, flip.target) == (source, target)
            for gap in gaps.get((flip.generation, flip.flip_id), [])
        ]
        for source, target in DIRECTIONS
    }
    placebo = placebo_gaps(window.control_begin_ns, window.auto_begin_ns, usual_pause_ns, arrivals)
    asked = [(stream.asked_ns + run.offset_ns, stream) for stream in run.streamed]
    control = [stream for at_ns, stream in asked if at_ns < window.auto_begin_ns]
    under_policy = [stream for at_ns, stream in asked if at_ns >= window.auto_begin_ns]
    return Figures(
        pause={f"{source} to {target}": _pause(flips, source, target) for source, target in DIRECTIONS},
        gap_at_flip={way: spread(gap.gap_ms for gap in found) for way, found in over.items()},
        added_gap={way: spread(gap.added_ms for gap in found) for way, found in over.items()},
        control_added_gap=spread(gap.added_ms for gap in placebo),
        longest_gap_by_server=spread(
            flip.longest_token_gap_ns / NS_PER_MS for flip in flips if flip.longest_token_gap_ns is not None
        ),
        burst_gaps=spread(burst_gaps(under_policy)),
        control_burst_gaps=spread(burst_gaps(control)),
        token_gaps=spread(token_gaps_ms(arrivals, window.auto_begin_ns, window.end_ns)),
        control_token_gaps=spread(token_gaps_ms(arrivals, window.control_begin_ns, window.auto_begin_ns)),
        ttft=ttft_ms(under_policy),
        control_ttft=ttft_ms(control),
        decode=decode_rates(under_policy),
        control_decode=decode_rates(control),
        tokens_per_s=tokens_per_s(arrivals, window.auto_begin_ns, window.end_ns),
        control_tokens_per_s=tokens_per_s(arrivals, window.control_begin_ns, window.auto_begin_ns),
        growths=list(evidence.growths),
    )


def _pause(flips: Sequence[FlipSeen], source: str, target: str) -> Spread | None:
    return spread(
        flip.pause_ns / NS_PER_MS
        for flip in flips
        if flip.pause_ns is not None and (flip.source, flip.target) == (source, target)
    )


def seconds_of(arrivals: Arrivals, begin_ns: int, end_ns: int) -> list[dict[str, float]]:
    """For each second: its tokens, the longest gap that ended in it (ms), and how many streams were between their
    first token and their last at its middle.
    """
    count = max(0, int((end_ns - begin_ns) // NS_PER_S))
    seconds = [{"tokens": 0.0, "longest_gap_ms": 0.0, "decoding": 0.0} for _ in range(count)]
    for arrived in arrivals:
        for previous_ns, at_ns in zip([None, *arrived], arrived, strict=False):
            place = int((at_ns - begin_ns) // NS_PER_S)
            if 0 <= place < count:
                seconds[place]["tokens"] += 1
                gap_ms = 0.0 if previous_ns is None else (at_ns - previous_ns) / NS_PER_MS
                seconds[place]["longest_gap_ms"] = max(seconds[place]["longest_gap_ms"], gap_ms)
        if arrived:
            first, last = (round((at_ns - begin_ns) / NS_PER_S) for at_ns in (arrived[0], arrived[-1]))
            for second in seconds[max(first, 0) : max(last, 0)]:
                second["decoding"] += 1
    return seconds


def shown(found: Spread | None) -> str:
    """A distribution in one line, in milliseconds."""
    if found is None:
        return "nothing measured"
    return f"p50 {found.p50:.1f}, p99 {found.p99:.1f}, max {found.max:.1f} ms ({found.count})"


def _median(found: Spread | None) -> str:
    return "unknown" if found is None else f"{found.p50:.1f}"


def _stream(stream: Streamed, offset_ns: int) -> Document:
    return {
        "kind": stream.kind,
        "asked_unix_ns": stream.asked_ns + offset_ns,
        "first_unix_ns": stream.arrived_ns[0] + offset_ns if stream.arrived_ns else None,
        "ended_unix_ns": None if stream.ended_ns is None else stream.ended_ns + offset_ns,
        "prompt_tokens": stream.prompt_tokens,
        "tokens": stream.num_tokens,
        "finish": stream.finish,
        "error": stream.error,
    }


def _probe(probe: Probed) -> Document:
    return {**asdict(probe), "is_wrong": probe.is_wrong}
