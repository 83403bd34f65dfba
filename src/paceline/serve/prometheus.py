"""The engine's metrics in Prometheus' text format. Names are runtime/metrics.py's; knows only how to export them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from paceline.runtime.metrics import Family, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector:
    def __init__(self, families: Iterable[Family]):
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def exposition(families: Iterable[Family]) -> bytes:
    """The families as a scrape reads them; counters get their `_total`."""
    registry = CollectorRegistry()
    registry.register(_Collector(families))
    return generate_latest(registry)


def _metric(family: Family) -> Metric:
    if isinstance(family.values, Histogram):
        histogram, seen, buckets = family.values, 0, []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return HistogramMetricFamily(family.name, family.help, buckets=buckets, sum_value=histogram.sum)
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    labels = [] if family.label is None else [family.label]
    metric = kind(family.name, family.help, labels=labels)
    for label, value in family.values.items():
        metric.add_metric([label] if labels else [], value)
    return metric
