"""Metrics of a router's traces: for how many requests spans were kept for export. `kvstore.tracing.metrics` has those of the exporter."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from prometheus_client.core import Metric

from kvstore.metric_definitions import CounterDefinition, MetricDefinition

KEPT = CounterDefinition(
    "fleet_traces_kept", "Requests whose spans were queued for export, by why", ("why",), "requests"
)
IGNORED = CounterDefinition(
    "fleet_traceparents_ignored",
    "Headers traceparent that are invalid; their requests begin traces of their own",
    unit="headers",
)

METRICS: Sequence[MetricDefinition] = (KEPT, IGNORED)


class TracingCounts(Struct, frozen=True, kw_only=True):
    """Counters of tracing since the start of the process."""

    kept: Mapping[str, int]  # number of requests whose spans were queued for export, by the reason to keep the trace
    ignored_headers: int  # number of requests with an invalid header `traceparent`


class TracingMetrics:
    """Collects the metrics of tracing for a `CollectorRegistry`."""

    def __init__(self, counts: Callable[[], TracingCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        yield KEPT.samples({(why,): number for why, number in counts.kept.items()})
        yield IGNORED.value(counts.ignored_headers)
