import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flipmesh.common.v1 import introspection_pb2 as pb
from opentelemetry import trace

from services.core.ids import Rank
from services.mesh.identity import Identity, identify
from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import TelemetrySettings
from services.mesh.telemetry.introspection import identity_message
from services.mesh.telemetry.metrics import MAX_SERIES_PER_PROCESS, Metrics, MetricsAggregator
from services.mesh.telemetry.traces import (
    CLOSE_TIMEOUT_S,
    LIBRARY_LOGGER,
    WARNING_INTERVAL_S,
    SparseLines,
    open_tracing,
)


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    found = StatePaths(tmp_path)
    found.create()
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with (tmp_path / "out").open("wb") as output:
        found = Log("router", Level.INFO, RotatedFile(tmp_path / "lines", 100_000, 2), PatientOutput(output.fileno()))
        yield found
        found.close()
    # An exporter that was given up may still have a word to say: nobody wants it, and stderr is not the place.
    logging.getLogger(LIBRARY_LOGGER).handlers[:] = [logging.NullHandler()]
    logging.getLogger(LIBRARY_LOGGER).propagate = False


def lines(paths: StatePaths, log: Log) -> list[str]:
    log.close()
    return (paths.root / "lines").read_text().splitlines()


def test_no_traces_cost_no_thread_and_no_spans(paths: StatePaths, log: Log) -> None:
    tracing = open_tracing(TelemetrySettings(), identify("router", None), paths, log)
    with tracing.tracer.start_as_current_span("request") as span:
        assert not span.is_recording()
    tracing.close()
    assert list(paths.log.iterdir()) == []


def test_spans_go_to_a_file_and_no_global_is_set(paths: StatePaths, log: Log) -> None:
    before = trace.get_tracer_provider()
    tracing = open_tracing(TelemetrySettings(traces="file"), identify("worker", Rank(1)), paths, log)
    with tracing.tracer.start_as_current_span("step", attributes={"epoch": 7}):
        pass
    tracing.close()
    (line,) = (paths.log / "worker-1.traces.jsonl").read_text().splitlines()
    span = json.loads(line)
    assert (span["name"], span["attributes"]) == ("step", {"epoch": 7})
    assert span["resource"]["attributes"]["service.name"] == "flipmesh-worker"
    assert trace.get_tracer_provider() is before


def test_spans_go_to_the_console_as_lines(paths: StatePaths, log: Log, capfd: pytest.CaptureFixture[str]) -> None:
    tracing = open_tracing(TelemetrySettings(traces="console"), identify("router", None), paths, log)
    with tracing.tracer.start_as_current_span("request", attributes={"tokens": 3}):
        pass
    tracing.close()
    assert " INFO router span span=request duration_ms=" in capfd.readouterr().err


@pytest.mark.parametrize("answers", [False, True], ids=["closed port", "black hole"])
def test_p5_13_a_dead_collector_costs_nothing(paths: StatePaths, log: Log, answers: bool) -> None:
    """A closed port refuses; the black hole takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not answers:
            listener.close()
        settings = TelemetrySettings(traces="otlp", otlp_endpoint=f"http://127.0.0.1:{port}")
        tracing = open_tracing(settings, identify("router", None), paths, log)
        for _ in range(5000):
            with tracing.tracer.start_as_current_span("request"):
                pass
        asked_s = time.monotonic()
        tracing.close()
        closed_s = time.monotonic()
    # The library by itself would wait for ten seconds, and then again.
    assert closed_s - asked_s < CLOSE_TIMEOUT_S + 5.0
    found = lines(paths, log)
    assert sum("telemetry-trouble" in line for line in found) <= 1
    assert any("telemetry-trouble" in line or "traces-lost" in line for line in found)


def test_the_librarys_complaints_are_one_line_an_interval(paths: StatePaths, log: Log) -> None:
    now_s = [0.0]
    sparse = SparseLines(log, lambda: now_s[0])
    record = logging.LogRecord("opentelemetry.x", logging.WARNING, "", 0, "no collector", (), None)
    for _ in range(50):
        sparse.handle(record)
    now_s[0] = WARNING_INTERVAL_S
    sparse.handle(record)
    found = [line.partition("telemetry-trouble ")[2] for line in lines(paths, log)]
    assert found == ['message="no collector" hushed_before=0', 'message="no collector" hushed_before=49']


def report(identity: Identity, metrics: Metrics) -> pb.GetMetricsResponse:
    sent = pb.GetMetricsResponse(identity=identity_message(identity), families=metrics.families())
    return pb.GetMetricsResponse.FromString(sent.SerializeToString())


def page(aggregator: MetricsAggregator) -> dict[str, float]:
    rows = [line.rsplit(" ", 1) for line in aggregator.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_p5_14_counters_never_fall_when_a_worker_restarts() -> None:
    aggregator = MetricsAggregator()
    series = 'flipmesh_steps_total{kind="tp",rank="1",service="worker"}'
    seen = []
    for life in range(3):
        identity, metrics = identify("worker", Rank(1)), Metrics()
        steps = metrics.counter("flipmesh_steps", "Steps.", ["kind"])
        aggregator.fold(report(identity, metrics))
        seen.append(page(aggregator).get(series, 0.0))
        for _ in range(2):
            steps.labels("tp").inc(10 + life)
            aggregator.fold(report(identity, metrics))
            seen.append(page(aggregator)[series])
    assert seen == sorted(seen)
    assert seen[-1] == 2 * (10 + 11 + 12)


def test_histograms_keep_their_counts_over_a_restart() -> None:
    aggregator = MetricsAggregator()
    for _ in range(2):
        metrics = Metrics()
        metrics.histogram("flipmesh_step_seconds", "Time.", [0.1, 1.0]).observe(0.5)
        aggregator.fold(report(identify("worker", Rank(0)), metrics))
    found = page(aggregator)
    own = 'rank="0",service="worker"'
    assert found[f"flipmesh_step_seconds_count{{{own}}}"] == 2.0
    assert found[f"flipmesh_step_seconds_sum{{{own}}}"] == 1.0
    assert found[f'flipmesh_step_seconds_bucket{{le="0.1",{own}}}'] == 0.0
    assert found[f'flipmesh_step_seconds_bucket{{le="1.0",{own}}}'] == 2.0
    assert not any("_created" in name for name in found)


def test_gauges_go_with_their_process_and_processes_do_not_mix() -> None:
    aggregator = MetricsAggregator()
    for service, rank in (("worker", Rank(0)), ("worker", Rank(1)), ("scheduler", None)):
        metrics = Metrics()
        metrics.gauge("flipmesh_resident_requests", "Now.").set(5)
        metrics.counter("flipmesh_errors", "So far.").inc(2)
        aggregator.fold(report(identify(service, rank), metrics))
    aggregator.lose("worker", 1)
    assert page(aggregator) == {
        'flipmesh_resident_requests{rank="0",service="worker"}': 5.0,
        'flipmesh_resident_requests{service="scheduler"}': 5.0,
        'flipmesh_errors_total{rank="0",service="worker"}': 2.0,
        'flipmesh_errors_total{rank="1",service="worker"}': 2.0,
        'flipmesh_errors_total{service="scheduler"}': 2.0,
    }
    aggregator.fold(report(identify("worker", Rank(0)), Metrics()))
    assert 'flipmesh_resident_requests{rank="0",service="worker"}' not in page(aggregator)


def test_a_label_gone_wild_is_bounded() -> None:
    metrics = Metrics()
    metrics.counter("flipmesh_good", "First.").inc()
    wild = metrics.counter("flipmesh_wild", "Second.", ["path"])
    for index in range(MAX_SERIES_PER_PROCESS):
        wild.labels(str(index)).inc()
    aggregator = MetricsAggregator()
    aggregator.fold(report(identify("router", None), metrics))
    assert page(aggregator) == {'flipmesh_good_total{service="router"}': 1.0}
