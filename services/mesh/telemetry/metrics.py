"""A process's own metrics, and one place where the metrics of all processes come together.

Each process counts in a registry of its own and hands out typed samples over `GetMetrics`; the router folds the samples
of all into one page. No shared directory, no files: nothing to set before an import, nothing left by the dead.

What a scraper sees of a counter never falls while the router lives: when a process comes back as another incarnation,
what its earlier lives counted is kept as a base and added. Gauges of a process that is gone are gone with it. A
restart of the router itself begins from the living processes' own counts, an ordinary reset to Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flipmesh.common.v1 import introspection_pb2 as pb
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

MAX_SERIES_PER_PROCESS = 5_000
"""Samples taken from one process; what is above is left out, so that a label gone wild cannot fill the router."""

_KINDS = {
    "counter": pb.METRIC_KIND_COUNTER,
    "gauge": pb.METRIC_KIND_GAUGE,
    "histogram": pb.METRIC_KIND_HISTOGRAM,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

SeriesKey = tuple[str, str, tuple[tuple[str, str], ...]]


class Metrics:
    """The metrics of this process. Names begin with `flipmesh_` and end with their unit."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only grows; `name` without `_total`."""
        return Counter(name, help_text, labels, registry=self._registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that comes and goes."""
        return Gauge(name, help_text, labels, registry=self._registry)

    def histogram(self, name: str, help_text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """A distribution; `buckets` are upper bounds, rising, without infinity."""
        return Histogram(name, help_text, labels, buckets=buckets, registry=self._registry)

    def families(self) -> Iterator[pb.MetricFamily]:
        """Yields everything counted so far, as sent in `GetMetricsResponse`."""
        for metric in self._registry.collect():
            if metric.type not in _KINDS:
                continue
            family = pb.MetricFamily(name=metric.name, help=metric.documentation, kind=_KINDS[metric.type])
            for sample in metric.samples:
                suffix = sample.name.removeprefix(metric.name)
                if suffix != "_created":
                    labels = [pb.MetricLabel(name=name, value=value) for name, value in sample.labels.items()]
                    family.samples.append(pb.MetricSample(suffix=suffix, labels=labels, value=sample.value))
            yield family


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is said of a family once, whatever its samples."""

    kind: pb.MetricKind.ValueType
    help_text: str


@dataclass(slots=True)
class _Life:
    """One process: what its present incarnation counts, and what the earlier ones counted.

    `base` never shrinks and holds no gauges; `samples` are replaced as a whole.
    """

    incarnation: str
    samples: dict[SeriesKey, float] = field(default_factory=dict)
    base: dict[SeriesKey, float] = field(default_factory=dict)


class MetricsAggregator:
    """Folds the samples of many processes into one page; held by the router."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, str], _Life] = {}
        self._shapes: dict[str, _Shape] = {}

    def fold(self, response: pb.GetMetricsResponse) -> None:
        """Takes what a process reports now in place of what it reported before."""
        identity = response.identity
        place = (identity.service, str(identity.rank) if identity.HasField("rank") else "")
        life = self._lives.setdefault(place, _Life(identity.incarnation))
        if life.incarnation != identity.incarnation:
            self._retire(life)
            life.incarnation = identity.incarnation
        life.samples = {}
        for family in _bounded(response.families):
            self._shapes[family.name] = _Shape(family.kind, family.help)
            for sample in family.samples:
                life.samples[_key(family, sample)] = sample.value

    def lose(self, service: str, rank: int | None) -> None:
        """Drops the gauges of a process that does not answer; its counters stay where they were."""
        life = self._lives.get((service, "" if rank is None else str(rank)))
        if life is not None:
            life.samples = {key: value for key, value in life.samples.items() if self._counts(key)}

    def render(self) -> bytes:
        """The page in Prometheus's text format, with `service` and `rank` on every series."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the merged families; what `prometheus_client` calls a collector."""
        merged: dict[str, Metric] = {}
        for (service, rank), life in self._lives.items():
            own = {"service": service, **({"rank": rank} if rank else {})}
            for key in {**life.base, **life.samples}:
                name, suffix, labels = key
                shape = self._shapes[name]
                metric = merged.setdefault(name, Metric(name, shape.help_text, _NAMES[shape.kind]))
                value = life.base.get(key, 0.0) + life.samples.get(key, 0.0)
                metric.add_sample(name + suffix, own | dict(labels), value)
        yield from merged.values()

    def _retire(self, life: _Life) -> None:
        for key, value in life.samples.items():
            if self._counts(key):
                life.base[key] = life.base.get(key, 0.0) + value

    def _counts(self, key: SeriesKey) -> bool:
        return self._shapes[key[0]].kind != pb.METRIC_KIND_GAUGE


def _key(family: pb.MetricFamily, sample: pb.MetricSample) -> SeriesKey:
    return family.name, sample.suffix, tuple((label.name, label.value) for label in sample.labels)


def _bounded(families: Iterable[pb.MetricFamily]) -> Iterator[pb.MetricFamily]:
    num_series = 0
    for family in families:
        num_series += len(family.samples)
        if num_series > MAX_SERIES_PER_PROCESS:
            return
        if family.kind in _NAMES:
            yield family
