"""Metrics of relayed requests. They are counted in plain numbers, which become metrics on each scrape (`fleet.core.telemetry`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import Metric

from fleet.core.clock import SECOND
from fleet.core.errors import Reason
from fleet.core.telemetry import CHAT, COMPLETION, LATENCY_BUCKETS, UNKNOWN_MODEL, Durations, GenAiTimes, summed
from kvstore.metric_definitions import CounterDefinition, HistogramDefinition, Labels, MetricDefinition

SERVED = "served"

RELAYED = CounterDefinition("fleet_relayed_requests", "Relayed requests that ended, by outcome", ("model", "outcome"))
PASSAGES = CounterDefinition(
    "fleet_relayed_passages",
    "Requests for external backends that were passed on while they arrived, by outcome",
    ("model", "outcome"),
    "requests",
)
FIRST_BYTE = HistogramDefinition(
    "fleet_relayed_ttft_seconds",
    "Seconds from arrival to the first relayed byte of the answer",
    ("model",),
    bounds=LATENCY_BUCKETS,
)
WHOLE = HistogramDefinition(
    "fleet_relayed_request_seconds",
    "Seconds from arrival to the end of the answer",
    ("model",),
    bounds=LATENCY_BUCKETS,
)
METRICS: Sequence[MetricDefinition] = (RELAYED, PASSAGES, FIRST_BYTE, WHOLE)


class RelayedRequests:
    """Counts the relayed requests of one model and one operation, and measures their durations."""

    def __init__(self, model: str, operation: str) -> None:
        self.model = model
        self.operation = operation
        self.outcomes: dict[str, int] = {SERVED: 0}
        self.first_byte = Durations()
        self.answered = Durations()
        # Durations of requests by the reason why they were not served; the key of served requests is the empty text.
        self.durations: dict[str, Durations] = {}

    def ended(self, reason: Reason | None, nanos: int, *, answered: bool) -> None:
        """Record the end of a request.

        Args:
            reason: Why the request was not served; None if it was served.
            nanos: Duration of the request in nanoseconds.
            answered: Whether any part of an answer was relayed.
        """
        outcome = SERVED if reason is None else reason
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if answered:
            self.answered.observe(nanos / SECOND)
        error = reason or ""
        if (durations := self.durations.get(error)) is None:
            durations = self.durations[error] = Durations()
        durations.observe(nanos / SECOND)

    def times(self) -> GenAiTimes:
        """Return the times for the metrics with OpenTelemetry's names."""
        first_byte = self.first_byte if self.operation in {CHAT, COMPLETION} else None
        return GenAiTimes(self.model, self.operation, self.durations, first_byte)


class RelayMetrics:
    def __init__(self, gauges: Callable[[], Iterable[Metric]]) -> None:
        """Create the collector for a `CollectorRegistry`; `gauges` returns further metrics of external backends."""
        self._gauges = gauges
        self.requests: dict[tuple[str, str], RelayedRequests] = {}
        """Counts by model and operation. `begin` adds the entry at the first request of a model and operation."""

        self._passages: dict[Labels, int] = {}

    def begin(self, model: str, operation: str) -> RelayedRequests:
        """Return the counts of a model and an operation, with zeros if there are none yet."""
        return self.requests.setdefault((model, operation), RelayedRequests(model, operation))

    def passed(self, model: str | None, reason: Reason | None) -> None:
        """Record the end of a passage.

        Args:
            model: The model that the passage names; None if it names no known model.
            reason: Why the passage was not served; None if it was served.
        """
        labels = model or UNKNOWN_MODEL, SERVED if reason is None else reason
        self._passages[labels] = self._passages.get(labels, 0) + 1

    def times(self) -> list[GenAiTimes]:
        """Return the times for the metrics with OpenTelemetry's names."""
        return [each.times() for each in self.requests.values()]

    def collect(self) -> Iterator[Metric]:
        outcomes: dict[Labels, int] = {}
        by_model: dict[str, list[RelayedRequests]] = {}
        for each in self.requests.values():
            for outcome, count in each.outcomes.items():
                outcomes[each.model, outcome] = outcomes.get((each.model, outcome), 0) + count
            by_model.setdefault(each.model, []).append(each)
        yield RELAYED.samples(outcomes)
        yield PASSAGES.samples(self._passages)
        for definition, name in ((FIRST_BYTE, "first_byte"), (WHOLE, "answered")):
            yield definition.samples(
                {
                    (model,): summed(getattr(each, name) for each in alike).buckets(definition.bounds)
                    for model, alike in by_model.items()
                }
            )
        yield from self._gauges()
