"""Metrics of relayed requests.

Incrementing a counter of the Prometheus client library takes longer than all other work for a streamed token. So this
module counts in plain numbers, and makes metrics of them when the page is scraped.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fleet.core.clock import SECOND
from fleet.core.errors import Reason
from fleet.core.telemetry import LATENCY_BUCKETS

_BOUNDS = tuple(int(seconds * SECOND) for seconds in LATENCY_BUCKETS)

SERVED = "served"


class _DurationHistogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0

    def observe(self, nanos: int) -> None:
        self._counts[bisect_left(_BOUNDS, nanos)] += 1
        self._sum += nanos

    def family(self, name: str, meaning: str) -> Metric:
        buckets = []
        total = 0
        for bound, count in zip((*map(str, LATENCY_BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=self._sum / SECOND)


class RelayMetrics:
    def __init__(self, gauges: Callable[[], Iterable[tuple[str, str, str, Mapping[str, float]]]]) -> None:
        """Create the collector for a `CollectorRegistry`, with all counts at zero.

        Args:
            gauges: Returns further gauges, each with name, help text, label name, and values by label value.
        """
        self._gauges = gauges
        self._ended: dict[str, int] = {SERVED: 0}
        self._passed: dict[str, int] = {SERVED: 0}
        self._first_byte = _DurationHistogram()
        self._whole = _DurationHistogram()

    def first_byte(self, nanos: int) -> None:
        """Record the first byte of an answer, with the time since the request arrived."""
        self._first_byte.observe(nanos)

    def ended(self, reason: Reason | None, nanos: int, *, answered: bool) -> None:
        """Record the end of a request: its duration if any of its answer was relayed, and the reason if it was not served."""
        outcome = SERVED if reason is None else reason
        self._ended[outcome] = self._ended.get(outcome, 0) + 1
        if answered:
            self._whole.observe(nanos)

    def passed(self, reason: Reason | None) -> None:
        """Record the end of a passage, and the reason if it was not served."""
        outcome = SERVED if reason is None else reason
        self._passed[outcome] = self._passed.get(outcome, 0) + 1

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "fleet_relayed_requests", "Relayed requests that ended, by outcome", labels=["outcome"]
        )
        for outcome, count in self._ended.items():
            ended.add_metric([str(outcome)], count)
        yield ended
        passed = CounterMetricFamily(
            "fleet_relayed_passages",
            "Requests for external backends that were passed on while they arrived, by outcome",
            labels=["outcome"],
        )
        for outcome, count in self._passed.items():
            passed.add_metric([str(outcome)], count)
        yield passed
        yield self._first_byte.family(
            "fleet_relayed_ttft_seconds", "Seconds from arrival to the first relayed byte of the answer"
        )
        yield self._whole.family("fleet_relayed_request_seconds", "Seconds from arrival to the end of the answer")
        for name, meaning, label, values in self._gauges():
            gauge = GaugeMetricFamily(name, meaning, labels=[label])
            for value, number in values.items():
                gauge.add_metric([value], number)
            yield gauge
