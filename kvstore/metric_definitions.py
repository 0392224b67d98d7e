"""Metric definitions: the name, type, labels, unit and meaning of each metric that a process exports.

Every metric is made from a definition. docs/metrics.md is written from the same definitions, so the page and the code
agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Self

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Labels = tuple[str, ...]
BucketCounts = tuple[Sequence[int], float]
"""Data of one histogram: the number of values in each bucket, and the sum of all values."""

UNITS = (
    ("_bytes", "bytes"),
    ("_blocks", "KV blocks"),
    ("_tokens", "tokens"),
    ("_timestamp_seconds", "seconds of Unix time"),
    ("_seconds", "seconds"),
    ("_ms", "milliseconds"),
    ("_dollars", "US dollars"),
    ("_requests", "requests"),
    ("_replicas", "replicas"),
    ("_workers", "workers"),
)
"""Pairs of a suffix and a unit. A metric without `MetricDefinition.unit` has the unit of the first pair whose suffix
its name ends with. If there is no such pair, the metric is a number without a unit."""


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricDefinition(Struct, frozen=True):
    """Defines one metric. There is one subclass for each type of metric.

    The subclasses make metric families. A family holds the values of the metric for one scrape by Prometheus.
    """

    name: str  # name of the metric, without the suffix `_total` of counters
    meaning: str
    labels: Labels = ()
    unit: str = ""  # if empty, the suffix of the name determines the unit (see `UNITS`)

    @classmethod
    def by_field(cls, prefix: str, labels: Labels, fields: Iterable[tuple[str, str, str]]) -> dict[str, Self]:
        """Return one definition for each field of a Struct, by the name of the field.

        Args:
            prefix: Prefix of the metrics' names; the name of the field follows.
            labels: Labels of each metric.
            fields: Name of each field, and meaning and unit of its metric.
        """
        return {name: cls(f"{prefix}{name}", meaning, labels, unit) for name, meaning, unit in fields}

    @property
    def type(self) -> MetricType:
        raise NotImplementedError

    @property
    def exported_name(self) -> str:
        """The name that queries use.

        The names of a histogram's samples end in `_bucket`, `_sum` and `_count` in addition.
        """
        return self.name

    @property
    def shown_unit(self) -> str:
        """The unit that documents show; "1" for a number without a unit."""
        return self.unit or next((unit for end, unit in UNITS if self.name.endswith(end)), "1")


class CounterDefinition(MetricDefinition, frozen=True):
    @property
    def type(self) -> MetricType:
        return MetricType.COUNTER

    @property
    def exported_name(self) -> str:
        return f"{self.name}_total"

    def samples(self, values: Mapping[Labels, float]) -> CounterMetricFamily:
        """Return a metric family with one sample for each entry of `values`, which maps label values to a value."""
        family = CounterMetricFamily(self.name, self.meaning, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def value(self, value: float) -> CounterMetricFamily:
        """Return a metric family with one value, for a metric without labels."""
        return self.samples({(): value})

    def instrument(self, registry: CollectorRegistry) -> Counter:
        """Return a counter object, which any thread may increase and `registry` exports."""
        return Counter(self.name, self.meaning, self.labels, registry=registry)


class GaugeDefinition(MetricDefinition, frozen=True):
    @property
    def type(self) -> MetricType:
        return MetricType.GAUGE

    def samples(self, values: Mapping[Labels, float]) -> GaugeMetricFamily:
        """Return a metric family with one sample for each entry of `values`, which maps label values to a value."""
        family = GaugeMetricFamily(self.name, self.meaning, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def value(self, value: float) -> GaugeMetricFamily:
        """Return a metric family with one value, for a metric without labels."""
        return self.samples({(): value})


class HistogramDefinition(MetricDefinition, frozen=True):
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets, in the metric's unit and in ascending order.

    The last bucket has no upper bound and is not listed.
    """

    @property
    def type(self) -> MetricType:
        return MetricType.HISTOGRAM

    def samples(self, values: Mapping[Labels, BucketCounts]) -> HistogramMetricFamily:
        """Return a metric family with one histogram for each entry of `values`, which maps label values to the data."""
        family = HistogramMetricFamily(self.name, self.meaning, labels=self.labels)
        for labels, (counts, total) in values.items():
            below = accumulate(counts)
            buckets = list(zip((*map(str, self.bounds), "+Inf"), below, strict=True))
            family.add_metric(labels, buckets, total)
        return family

    def instrument(self, registry: CollectorRegistry) -> Histogram:
        """Return a histogram object, to which any thread may add values and which `registry` exports."""
        return Histogram(self.name, self.meaning, self.labels, buckets=self.bounds, registry=registry)
