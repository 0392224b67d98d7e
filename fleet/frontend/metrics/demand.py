"""Metrics of demand: the counters of `WatchDemand`, for planners that read pages of metrics, and for dashboards."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.core.clock import SECOND
from fleet.core.demand_reports import DemandReport

COUNTERS = {
    "arrivals": "Requests that arrived",
    "waited": "Requests that entered the admission queue",
    "refused": "Requests that were refused for load",
    "abandoned": "Requests whose clients left before an answer began",
    "invalid": "Requests that no capacity could have served",
    "prompt_tokens": "Prompt tokens of requests that arrived",
    "uncounted_tokens": "Prompt tokens of abandoned and invalid requests",
    "prompt_squares": "Sum of the squares of the prompts' lengths",
    "cached_tokens": "Prompt tokens that workers had in a cache",
    "finished": "Answers that ended",
    "answer_tokens": "Tokens of answers that ended",
    "answer_squares": "Sum of the squares of the answers' lengths",
    "overflowed": "Refused requests that a hosted endpoint has answered",
    "overflow_dollars": "Cost of the hosted endpoint",
}
HISTOGRAMS = {
    "ttft": "Requests by time to first token",
    "tpot": "Requests by time per output token",
    "queue_wait": "Requests by time until a worker was sent them",
}


class DemandReporter(Protocol):
    """Port to `fleet.frontend.control.demand.DemandWatch`, from which the metrics are read."""

    def report(self, after: int) -> tuple[int, DemandReport]: ...


class DemandMetrics:
    """Collects the metrics of demand for a `CollectorRegistry`.

    Histograms have the label `bucket`, an index into `fleet.core.duration_counts.EDGES`.
    """

    def __init__(self, demand: DemandReporter) -> None:
        self._demand = demand

    def collect(self) -> Iterator[Metric]:
        _, report = self._demand.report(1 << 62)
        uptime = GaugeMetricFamily(
            "fleet_demand_uptime_seconds",
            "Time since the router's counters of demand began",
            labels=["source", "incarnation"],
        )
        uptime.add_metric([report.router, report.incarnation], report.uptime / SECOND)
        yield uptime
        for name, meaning in COUNTERS.items():
            family = CounterMetricFamily(f"fleet_demand_{name}", meaning, labels=["model"])
            for each in report.models:
                family.add_metric([each.model], getattr(each, name))
            yield family
        for name, meaning in HISTOGRAMS.items():
            family = CounterMetricFamily(f"fleet_demand_{name}_seconds", meaning, labels=["model", "bucket"])
            for each in report.models:
                for bucket, count in enumerate(getattr(each, name)):
                    if count:
                        family.add_metric([each.model, str(bucket)], count)
            yield family
        queued = GaugeMetricFamily("fleet_demand_queued", "Requests that wait in the router", labels=["model"])
        oldest = GaugeMetricFamily("fleet_demand_oldest_seconds", "Age of the oldest of them", labels=["model"])
        for each in report.models:
            queued.add_metric([each.model], each.queued)
            oldest.add_metric([each.model], each.oldest_seconds)
        yield queued
        yield oldest
