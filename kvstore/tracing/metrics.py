"""Metrics of a process's trace exporter: how many spans the collector took, and how many were dropped.

All processes export these metrics under the same names.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition
from kvstore.tracing.exporter import TraceExporter

SPANS = CounterDefinition(
    "fleet_trace_spans", "Spans that were sent to the collector, by whether it took them", ("result",), "spans"
)
DROPPED = CounterDefinition("fleet_traces_dropped", "Traces whose spans found the export queue full", unit="traces")
WAITING = GaugeDefinition("fleet_traces_waiting", "Traces whose spans wait for the collector", unit="traces")

METRICS: Sequence[MetricDefinition] = (SPANS, DROPPED, WAITING)


class ExportMetrics:
    """Collects the metrics of an exporter for a `CollectorRegistry`. Any thread may call `collect`."""

    def __init__(self, exporter: TraceExporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        exporter = self._exporter
        yield SPANS.samples({("taken",): exporter.exported, ("dropped",): exporter.failed})
        yield DROPPED.value(exporter.overflowed)
        yield WAITING.value(exporter.waiting)
