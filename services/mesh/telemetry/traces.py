"""Traces of this process: OpenTelemetry's own machinery behind a bounded queue, never in the way of a request.

Sets no global provider and reads none of its environment: the settings say it all. With no collector, or one that
swallows packets, spans are dropped, one warning an interval says so, and the process ends in time.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider, Tracer, format_trace_id

from services.core.errors import ConfigurationError
from services.mesh.identity import Identity
from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import Level, format_line
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import TelemetrySettings

MAX_QUEUED_SPANS = 2048
MAX_BATCH_SPANS = 512
BATCH_INTERVAL_MS = 5_000
"""Spans wait here for the exporter's thread; the queue full, new ones are dropped."""

EXPORT_TIMEOUT_S = 3
"""How long one batch may take, retries included."""

CLOSE_TIMEOUT_S = 0.8
"""How long the end of the process waits for the last spans; then they are lost."""

WARNING_INTERVAL_S = 60.0
"""Of what the exporter has to say, one line in this time."""

INSTRUMENTATION = "flipmesh"
LIBRARY_LOGGER = "opentelemetry"


@dataclass(frozen=True, slots=True)
class Tracing:
    """What starts spans, and what sends the last of them."""

    tracer: Tracer
    close: Callable[[], None]


def open_tracing(settings: TelemetrySettings, identity: Identity, paths: StatePaths, log: Log) -> Tracing:
    """Makes the process's tracer. With `traces = "none"` spans cost next to nothing and no thread runs."""
    if settings.traces == "none":
        return Tracing(NoOpTracerProvider().get_tracer(INSTRUMENTATION), lambda: None)
    _hush_library(log)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        resource=Resource(
            {
                "service.name": f"flipmesh-{identity.service}",
                "service.instance.id": f"{identity.name}-{identity.incarnation}",
            }
        ),
        shutdown_on_exit=False,
    )
    processor = BatchSpanProcessor(
        _exporter(settings, identity, paths),
        max_queue_size=MAX_QUEUED_SPANS,
        schedule_delay_millis=BATCH_INTERVAL_MS,
        max_export_batch_size=MAX_BATCH_SPANS,
        export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
    )
    provider.add_span_processor(processor)
    return Tracing(provider.get_tracer(INSTRUMENTATION), lambda: _close(provider, log))


def _exporter(settings: TelemetrySettings, identity: Identity, paths: StatePaths) -> SpanExporter:
    match settings.traces:
        case "console":
            output = PatientOutput(sys.stderr.fileno())
            return LineExporter(lambda span: output.write(_readable_line(span, identity.name)), lambda: None)
        case "file":
            path = paths.log / f"{identity.name}.traces.jsonl"
            file = RotatedFile(path, settings.max_file_bytes, settings.max_files)
            return LineExporter(lambda span: file.write(_json_line(span)), file.close)
        case "otlp":
            return _otlp_exporter(settings.otlp_endpoint)
        case "none":
            raise AssertionError("no exporter is made where there are no traces")


def _otlp_exporter(endpoint: str | None) -> SpanExporter:
    # Imported only where it is asked for: it brings a second half of grpc.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        raise ConfigurationError("telemetry.otlp_endpoint is absent: give the collector, or another traces")
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=EXPORT_TIMEOUT_S)


class LineExporter(SpanExporter):
    """Writes each finished span as one line; where to is given as a function that never waits."""

    def __init__(self, write: Callable[[ReadableSpan], object], close: Callable[[], None]) -> None:
        self._write, self._close = write, close

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes a batch; called on the exporter's thread."""
        for span in spans:
            self._write(span)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes what is written to."""
        self._close()


def _json_line(span: ReadableSpan) -> bytes:
    text: str = span.to_json(indent=None)
    return (text + "\n").encode()


def _readable_line(span: ReadableSpan, name: str) -> bytes:
    context = span.get_span_context()
    began_ns, ended_ns = span.start_time or 0, span.end_time or 0
    fields: dict[str, object] = {
        "span": span.name,
        "duration_ms": (ended_ns - began_ns) / 1e6,
        "trace": format_trace_id(context.trace_id if context else 0),
        **(span.attributes or {}),
    }
    return (format_line(ended_ns / 1e9, Level.INFO, name, "span", fields) + "\n").encode()


def _close(provider: TracerProvider, log: Log) -> None:
    # The library's own shutdown has waited for minutes on a dead collector; here it may, in a thread nobody joins.
    closing = threading.Thread(target=provider.shutdown, name="traces-close", daemon=True)
    closing.start()
    closing.join(CLOSE_TIMEOUT_S)
    if closing.is_alive():
        log.warning("traces-lost", reason="the exporter did not end in time", waited_s=CLOSE_TIMEOUT_S)


class SparseLines(logging.Handler):
    """Lets one line through in `WARNING_INTERVAL_S`, with the number of those before it that were not."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._log, self._clock = log, clock
        self._next_s = clock()
        self._num_hushed = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record, or counts it."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_hushed += 1
            return
        self._next_s = now_s + WARNING_INTERVAL_S
        self._log.warning("telemetry-trouble", message=record.getMessage(), hushed_before=self._num_hushed)
        self._num_hushed = 0


def _hush_library(log: Log) -> None:
    library = logging.getLogger(LIBRARY_LOGGER)
    library.handlers[:] = [SparseLines(log)]
    library.propagate = False
