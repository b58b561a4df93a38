"""The verdict of an acceptance run: every check is shown to fire and to stay quiet; its figures; its page."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.mesh.settings.tables import load_settings
from tools.acceptance.figures import Growth, gap_over, growths, placebo_gaps, spread, tokens_per_s
from tools.acceptance.page import page_of
from tools.acceptance.report import Plan, Run, Window, report_of, seconds_of
from tools.acceptance.verdict import Evidence, judge_run
from tools.bench.machine_facts import machine_facts
from tools.load.answer_probe import AnswerProbe, Probed, compare
from tools.load.http_load import Shape, Streamed
from tools.load.load import Heard
from tools.load.observe import CostSample, FlipSeen, LoadSample, Observer, Span, cost_of, cpu_s
from tools.load.own_mesh import ROOT, as_toml, tables_of
from tools.mesh_client import MeshClient
from tools.oracle.compare import Difference

MS = 1_000_000
S = 1000 * MS


def flip(number: int, target: str, at_ns: int, **changes: object) -> FlipSeen:
    source = "TP" if target == "PP" else "PP"
    made = FlipSeen(
        1, number, source, target, "committed", "", at_ns, at_ns + MS, at_ns + 9 * MS, 8 * MS, 50 * MS, 12, 1
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def sample(at_ns: int = 0, **changes: int) -> LoadSample:
    return replace(LoadSample(at_ns, "TP", 1, 3, 12, 0, 2000, 50, 30, 20, 100, 0, 0), **changes)


def stream(begin_ns: int = 0, count: int = 40, every_ns: int = 50 * MS, **changes: object) -> Streamed:
    arrived = [begin_ns + place * every_ns for place in range(1, count + 1)]
    made = Streamed("decoder", 32, count, begin_ns, arrived, count, "text", "length", "", arrived[-1])
    return replace(made, **changes)  # type: ignore[arg-type]


def probed(begin_ns: int, end_ns: int, difference: Difference | None = None, error: str = "") -> Probed:
    return Probed(0, begin_ns, end_ns, difference, error)


GROWTH = Growth("worker-0", 100.0 * 2**20, 101.0 * 2**20, 30, 31, 2**28, 2**27)
GOOD = Evidence(
    streamed=[stream()],
    num_skipped=0,
    flips=[flip(1, "PP", 1 * S), flip(2, "TP", 2 * S)],
    min_flips=1,
    loads=[sample()],
    at_rest=sample(resident=0, held_blocks=0, cached_blocks=50),
    control_faults=[],
    probed=[probed(0, 3 * S)],
    growths=[GROWTH],
    free_bytes=[2**33],
    machine_bytes=2**34,
    num_verdicts=0,
    last_verdict="",
    num_resubmitted=0,
    num_restarts=0,
)


def test_a_good_run_passes_every_check() -> None:
    checks = judge_run(GOOD)
    assert [check.name for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) == 9


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flips", {"flips": GOOD.flips[:1], "probed": [probed(0, 3 * S)]}),
        ("flips", {"min_flips": 2}),
        ("flips", {"flips": [flip(1, "PP", S, num_carried=0), GOOD.flips[1]]}),
        ("flips", {"flips": [flip(1, "PP", S, state="abandoned"), GOOD.flips[1]]}),
        ("requests", {"streamed": []}),
        ("requests", {"streamed": [stream(error="HTTP 500")]}),
        ("requests", {"streamed": [stream(finish="stop")]}),
        ("requests", {"streamed": [stream(num_tokens=39)]}),
        ("requests", {"num_skipped": 1}),
        ("census", {"loads": [sample(unsound_censuses=1)]}),
        ("census", {"loads": [sample(unaccounted_blocks=1)]}),
        ("census", {"loads": []}),
        ("census", {"at_rest": sample(resident=0)}),
        ("census", {"at_rest": sample(resident=0, held_blocks=0)}),
        ("generation", {"loads": [sample(), sample(generation=2)]}),
        ("generation", {"num_restarts": 1}),
        ("generation", {"num_resubmitted": 1}),
        ("answers", {"control_faults": ["stream 0 differs from itself at token 3"]}),
        ("answers", {"probed": [probed(0, 3 * S, Difference(0, 5, 1.0))]}),
        ("answers", {"probed": [probed(0, 3 * S, error="UNAVAILABLE")]}),
        ("answers", {"probed": [probed(0, 3 * S, Difference(0, 5, 1e-5))] * 4}),
        ("answers", {"probed": [probed(0, S + 5 * MS), probed(S + 5 * MS, 3 * S)]}),
        ("sentinel", {"num_verdicts": 1, "last_verdict": "stall: rank 1"}),
        ("memory", {"growths": [replace(GROWTH, private_after_bytes=130.0 * 2**20)]}),
        ("memory", {"growths": []}),
        ("descriptors", {"growths": [replace(GROWTH, descriptors_after=60)]}),
        ("corridor", {"free_bytes": [2**33, 2**24]}),
        ("corridor", {"free_bytes": []}),
    ],
)
def test_each_check_fires(name: str, changes: dict[str, object]) -> None:
    failed = [check.name for check in judge_run(replace(GOOD, **changes)) if not check.passed]  # type: ignore[arg-type]
    assert name in failed


def test_a_near_tie_is_counted_and_tolerated() -> None:
    [check] = [
        check
        for check in judge_run(replace(GOOD, probed=[probed(0, 3 * S, Difference(0, 5, 1e-5))]))
        if check.name == "answers"
    ]
    assert check.passed
    assert "1 parted at near ties" in check.statement


def test_a_probe_is_held_against_its_control() -> None:
    control = Heard(token_ids=[1, 2, 3], margins=[9.0, 0.5, 9.0], arrived_ns=[10, 20, 30])
    same = compare(0, control, replace(control, arrived_ns=[40, 50, 60]), 1000)
    assert (same.begin_unix_ns, same.end_unix_ns, same.is_wrong) == (1040, 1060, False)
    other = compare(0, control, replace(control, token_ids=[1, 7, 3]), 0)
    assert other.is_wrong
    assert other.difference == Difference(0, 1, 0.5)
    assert compare(0, control, replace(control, token_ids=[1, 2]), 0).is_wrong
    assert compare(0, control, Heard(error="gone"), 0).is_wrong


def test_a_gap_over_a_flip_is_told_from_the_usual_one() -> None:
    arrived = [*range(0, 1000 * MS, 50 * MS), *range(1200 * MS, 2000 * MS, 50 * MS)]
    found = gap_over(arrived, 960 * MS, 1100 * MS)
    assert found is not None
    assert (found.gap_ms, found.usual_ms, found.added_ms) == (250.0, 50.0, 200.0)
    usual = gap_over(arrived, 510 * MS, 520 * MS)
    assert usual is not None
    assert usual.added_ms == 0.0


@pytest.mark.parametrize(("begin", "end"), [(-5, 10), (1960, 3000), (3000, 3100), (60, 80)])
def test_a_stream_that_did_not_run_across_has_no_gap(begin: int, end: int) -> None:
    arrived = list(range(0, 2000 * MS, 50 * MS))
    assert gap_over(arrived, begin * MS, end * MS) is None
    assert gap_over([], begin * MS, end * MS) is None


def test_placebos_find_nothing_where_nothing_is() -> None:
    gaps = placebo_gaps(0, 4 * S, 10 * MS, [list(range(0, 4 * S, 50 * MS))])
    assert len(gaps) > 4
    assert {gap.added_ms for gap in gaps} == {0.0}


def test_spreads_and_rates() -> None:
    assert spread([]) is None
    found = spread([float(value) for value in range(1, 201)])
    assert found is not None
    assert (found.count, found.p50, found.p99, found.max) == (200, 100.5, 199.0, 200.0)
    assert tokens_per_s([[0, 1 * S, 2 * S], [500 * MS]], 0, 2 * S) == 0.5


def test_growth_leaves_the_first_quarter_out() -> None:
    costs = [CostSample(at, "router", 7, 1, 1, private, 9) for at, private in enumerate([900, 100, 100, 140])]
    [growth] = growths(costs)
    assert (growth.private_before_bytes, growth.private_after_bytes) == (100, 140)
    assert growths(costs[:3]) == []


def test_costs_of_this_process_are_read() -> None:
    cost = cost_of("me", os.getpid(), 0)
    assert cost.rss_bytes >= cost.pss_bytes >= cost.private_bytes > 2**20
    assert cost.num_descriptors >= 3
    assert cpu_s(os.getpid()) > 0.0


def test_seconds_hold_tokens_gaps_and_streams() -> None:
    seconds = seconds_of([[100 * MS, 200 * MS, 1300 * MS], [1600 * MS]], 0, 2 * S)
    assert [second["tokens"] for second in seconds] == [2, 2]
    assert [second["longest_gap_ms"] for second in seconds] == [100.0, 1100.0]
    assert [second["decoding"] for second in seconds] == [1, 0]


@pytest.fixture
def run() -> Run:
    client = MeshClient(load_settings(ROOT / "deploy" / "mesh.toml"))
    observer = Observer(client)
    for at_ns in range(0, 20 * S, S // 2):
        observer.loads.append(sample(at_ns))
    observer.loads.append(sample(20 * S, resident=0, held_blocks=0, cached_blocks=50))
    for at_ns in range(0, 20 * S, 2 * S):
        observer.costs.append(CostSample(at_ns, "worker-0", 9, 2**27, 2**26, 2**25, 20))
        observer.free_bytes.append((at_ns, 2**33))
    flips = [flip(1, "PP", 12 * S), flip(2, "TP", 14 * S), flip(3, "PP", 16 * S, state="abandoned", reason="<late>")]
    observer.flips.update({(seen.generation, seen.flip_id): seen for seen in flips})
    observer.spans.update(
        {0: Span("TP", 0, "start"), 12 * S: Span("PP", 12 * S, "prefill"), 14 * S: Span("TP", 14 * S, "x")}
    )
    probe = AnswerProbe(client, probed=[probed(11 * S, 15 * S)])
    streams = [stream(11 * S, 100), stream(1 * S, 120), stream(12 * S, 3, every_ns=S, kind="burst")]
    plan = Plan(0.2, 8.0, 1, Shape(), "twelve <decoders>")
    facts = machine_facts(ROOT)
    return Run(plan, 2, "some", Window(0, 8 * S, 20 * S), 0, streams, 0, 1, observer, probe, 0, 5.0, facts)


def test_a_report_holds_the_run_and_says_so(run: Run) -> None:
    report = report_of(run)
    document = json.loads(json.dumps(report.document()))
    assert report.passed, report.text()
    assert document["passed"] is True
    assert document["summary"]["flips"] == {"TP to PP": 1, "PP to TP": 1}
    assert document["figures"]["pause"]["TP to PP"]["p50"] == 8.0
    assert [len(seen["gaps"]) for seen in document["flips"]] == [1, 1, 0]
    assert document["figures"]["control_token_gaps"]["p50"] == 50.0
    assert report.text().endswith("\naccepted")
    assert report_of(replace(run, num_skipped=1)).text().endswith("\nnot accepted")


class Tags(HTMLParser):
    """Follows nesting; void and self-closed elements aside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_by_itself(run: Run) -> None:
    page = page_of(json.loads(json.dumps(report_of(run).document())))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.seen}
    assert not re.search(r"(src|href|url|@import)\s*[=(]", page)
    assert sum(tag == "svg" for tag, _ in tags.seen) == 9
    assert "twelve &lt;decoders&gt;" in page
    assert "&lt;late&gt;" in page
    numbers = [value for _, found in tags.seen for value in found.values() if value]
    assert not any("nan" in value or "inf" in value for value in numbers)


def test_a_page_of_a_run_that_saw_nothing(run: Run) -> None:
    document = json.loads(json.dumps(report_of(run).document()))
    document.update(flips=[], costs=[], free_bytes=[], layouts=[], streams=[], loads=[], seconds=[])
    assert "No stream ran across a flip" in page_of(document)


def test_the_configuration_of_an_own_mesh_is_read_back(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(
        '[group]\nnum_ranks = 2\npp_layers = [10, 20]\n[pool]\nnum_blocks = 77\n[model]\npath = "/m/x.gguf"\n'
    )
    settings = load_settings(base)
    for ranks, layers in ((None, (10, 20)), (3, None)):
        own = tmp_path / "own.toml"
        own.write_text(as_toml(tables_of(settings, num_ranks=ranks, state=tmp_path / "s", policy={"mode": "manual"})))
        read = load_settings(own)
        assert (read.group.num_ranks, read.group.pp_layers) == (ranks or 2, layers)
        assert (read.pool.num_blocks, read.router.http_port, read.policy.mode) == (77, 0, "manual")
        assert str(read.model.path) == "/m/x.gguf"
