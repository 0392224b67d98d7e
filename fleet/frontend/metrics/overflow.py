"""Metrics of hosted endpoints that take the overflow of a model, read on each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.frontend.overflow import OverflowReports

GAUGES = {
    "running": ("fleet_overflow_running", "Requests that run at the hosted endpoint"),
    "spent_dollars": (
        "fleet_overflow_spent_dollars",
        "Charges of the last hour, including estimates; processes with one ledger report the same",
    ),
    "limit_dollars": ("fleet_overflow_limit_dollars", "The most that an hour may cost"),
}


class OverflowMetrics:
    """Collects the metrics of hosted endpoints for a `CollectorRegistry`."""

    def __init__(self, overflow: OverflowReports) -> None:
        self._overflow = overflow

    def collect(self) -> Iterator[Metric]:
        status = self._overflow.status()
        requests = CounterMetricFamily(
            "fleet_overflow_requests",
            "Requests that were refused and may overflow, by outcome",
            labels=["model", "outcome"],
        )
        dollars = CounterMetricFamily(
            "fleet_overflow_dollars", "Cost of the hosted endpoint for requests that have ended", labels=["model"]
        )
        for each in status:
            dollars.add_metric([each.model], each.dollars)
            for outcome, count in each.outcomes.items():
                requests.add_metric([each.model, outcome], count)
        yield requests
        yield dollars
        for field, (name, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=["model"])
            for each in status:
                gauge.add_metric([each.model], getattr(each, field))
            yield gauge
