"""Metrics of images that a router fetches from URLs, read on each scrape. A router that may fetch no images lacks these metrics."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from fleet.frontend.images.fetcher import ImageFetcher
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition

FETCHES = CounterDefinition(
    "fleet_image_fetches", "Images at URLs whose fetch ended, by how it ended", ("outcome",), "images"
)
HELD = GaugeDefinition("fleet_image_held_bytes", "Fetched images of requests that have not ended", unit="bytes")

METRICS: Sequence[MetricDefinition] = (FETCHES, HELD)


class ImageMetrics:
    """Collects the metrics of an image fetcher for a `CollectorRegistry`."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self._fetcher = fetcher

    def collect(self) -> Iterator[Metric]:
        yield FETCHES.samples({(outcome,): count for outcome, count in self._fetcher.outcomes.items()})
        yield HELD.value(self._fetcher.held_bytes)
