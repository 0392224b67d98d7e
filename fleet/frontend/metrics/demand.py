"""Metrics of demand: the counters of `WatchDemand` for planners that read metrics over HTTP, and for dashboards."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from fleet.core.clock import SECOND
from fleet.core.demand_reports import DemandReport
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition

UPTIME = GaugeDefinition(
    "fleet_demand_uptime_seconds", "Time since the router's counters of demand began", ("source", "incarnation")
)
COUNTERS: Mapping[str, CounterDefinition] = CounterDefinition.by_field(
    "fleet_demand_",
    ("model",),
    (
        ("arrivals", "Requests that arrived", "requests"),
        ("waited", "Requests that entered the admission queue", "requests"),
        ("refused", "Requests that were refused for load", "requests"),
        ("abandoned", "Requests whose clients left before an answer began", "requests"),
        ("invalid", "Requests that no capacity could have served", "requests"),
        ("prompt_tokens", "Prompt tokens of requests that arrived", ""),
        ("uncounted_tokens", "Prompt tokens of abandoned and invalid requests", ""),
        ("prompt_squares", "Sum of the squares of the prompts' lengths", "tokens²"),
        ("cached_tokens", "Prompt tokens that workers had in a cache", ""),
        ("finished", "Answers that ended", "requests"),
        ("answer_tokens", "Tokens of answers that ended", ""),
        ("answer_squares", "Sum of the squares of the answers' lengths", "tokens²"),
        ("overflowed", "Refused requests that a hosted endpoint has answered", "requests"),
        ("overflow_dollars", "Cost of the hosted endpoint", ""),
    ),
)
"""Maps names of fields of `ModelDemand` to the counters that show these fields."""

HISTOGRAMS: Mapping[str, CounterDefinition] = {
    name: CounterDefinition(f"fleet_demand_{name}_seconds", meaning, ("model", "bucket"), "requests")
    for name, meaning in {
        "ttft": "Requests by time to first token",
        "tpot": "Requests by time per output token",
        "queue_wait": "Requests by time until a worker was sent them",
    }.items()
}
"""Maps names of fields of `ModelDemand`, which count durations by bucket, to the counters that show these fields. The label `bucket` is an
index into `fleet.core.duration_counts.EDGES`."""

DEMAND_QUEUED = GaugeDefinition("fleet_demand_queued", "Requests that wait in the router", ("model",), "requests")
OLDEST = GaugeDefinition("fleet_demand_oldest_seconds", "Age of the oldest of them", ("model",))

METRICS: Sequence[MetricDefinition] = (UPTIME, *COUNTERS.values(), *HISTOGRAMS.values(), DEMAND_QUEUED, OLDEST)


class DemandReporter(Protocol):
    """Port to the source of the metrics, `fleet.frontend.control.demand.DemandWatch`."""

    def report(self, after: int) -> tuple[int, DemandReport]: ...


class DemandMetrics:
    """Collects the metrics of demand for a `CollectorRegistry`.

    Histograms have the label `bucket`, an index into `fleet.core.duration_counts.EDGES`.
    """

    def __init__(self, demand: DemandReporter) -> None:
        self._demand = demand

    def collect(self) -> Iterator[Metric]:
        _, report = self._demand.report(1 << 62)
        yield UPTIME.samples({(report.router, report.incarnation): report.uptime / SECOND})
        for name, definition in COUNTERS.items():
            yield definition.samples({(each.model,): getattr(each, name) for each in report.models})
        for name, definition in HISTOGRAMS.items():
            yield definition.samples(
                {
                    (each.model, str(bucket)): count
                    for each in report.models
                    for bucket, count in enumerate(getattr(each, name))
                    if count
                }
            )
        yield DEMAND_QUEUED.samples({(each.model,): each.queued for each in report.models})
        yield OLDEST.samples({(each.model,): each.oldest_seconds for each in report.models})
