"""Metrics of hosted endpoints that take the overflow of a model, read on each scrape."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from fleet.frontend.overflow import OverflowReports
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition

OVERFLOW_REQUESTS = CounterDefinition(
    "fleet_overflow_requests", "Requests that were refused and may overflow, by outcome", ("model", "outcome")
)
DOLLARS = CounterDefinition(
    "fleet_overflow_dollars", "Cost of the hosted endpoint for requests that have ended", ("model",)
)
GAUGES: Mapping[str, GaugeDefinition] = {
    "running": GaugeDefinition(
        "fleet_overflow_running", "Requests that run at the hosted endpoint", ("model",), "requests"
    ),
    "spent_dollars": GaugeDefinition(
        "fleet_overflow_spent_dollars",
        "Charges of the last hour, including estimates; processes with one ledger report the same",
        ("model",),
    ),
    "limit_dollars": GaugeDefinition("fleet_overflow_limit_dollars", "The most that an hour may cost", ("model",)),
}
"""Maps names of fields of a hosted endpoint's state (`OverflowState`) to the gauges that show these fields."""

METRICS: Sequence[MetricDefinition] = (OVERFLOW_REQUESTS, DOLLARS, *GAUGES.values())


class OverflowMetrics:
    """Collects the metrics of hosted endpoints for a `CollectorRegistry`."""

    def __init__(self, overflow: OverflowReports) -> None:
        self._overflow = overflow

    def collect(self) -> Iterator[Metric]:
        status = self._overflow.status()
        yield OVERFLOW_REQUESTS.samples(
            {(each.model, outcome): count for each in status for outcome, count in each.outcomes.items()}
        )
        yield DOLLARS.samples({(each.model,): each.dollars for each in status})
        for field, definition in GAUGES.items():
            yield definition.samples({(each.model,): getattr(each, field) for each in status})
