"""Metric catalogue: every metric of a router, a KV store node and the operator, read from their objects."""

from collections.abc import Iterable, Mapping
from functools import cache

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from fleet.core.requests import Finish
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.metrics.predictions import PredictionMetrics
from fleet.frontend.metrics.relay import RelayMetrics
from fleet.frontend.metrics.router import RouterMetrics, TenantMetrics
from fleet.router.state.snapshot import RouterCounters, RouterSnapshot
from fleet.router.tenants import TenantUsage
from kvstore.messages import Stats
from kvstore.service.metrics import NodeMetrics, NodeSnapshot
from operators import telemetry

IDLE_ROUTER = RouterSnapshot(
    pools=(), stores=(), active=0, queued=0, index_blocks=0, index_overflowed=0, counters=RouterCounters()
)
IDLE_NODE = NodeSnapshot(
    stats=Stats(
        blocks=0,
        bytes=0,
        capacity_bytes=0,
        hits=0,
        misses=0,
        written=0,
        evicted=0,
        corrupt=0,
        expired=0,
        pinned=0,
    ),
    transfers=(),
    refused_loads=0,
    ghost_caches=(),
)


class MetricDescription(Struct, frozen=True, kw_only=True):
    """One metric; a counter's samples are called `<name>_total`, a histogram's `<name>_bucket` and so on."""

    name: str
    kind: str
    meaning: str
    labels: frozenset[str]


@cache
def router_metric_descriptions() -> Mapping[str, MetricDescription]:
    metrics = RouterProcessMetrics(CollectorRegistry())
    metrics.ended(Finish.STOP, (), None, 0.0)
    parts = (
        RouterMetrics(lambda: IDLE_ROUTER, tasks=lambda: 0, refused=dict, directory=bool),
        TenantMetrics(lambda: {"one": TenantUsage()}),
        RelayMetrics(tuple),
        PredictionMetrics(lambda _: None),
    )
    return _described(metrics.registry.collect(), *(part.collect() for part in parts))


@cache
def store_metric_descriptions() -> Mapping[str, MetricDescription]:
    metrics = NodeMetrics(CollectorRegistry(), lambda: IDLE_NODE)
    metrics.moved("ssd", "fetch", 0.0)
    return _described(metrics.registry.collect())


@cache
def operator_metric_descriptions() -> Mapping[str, MetricDescription]:
    metrics = telemetry.OperatorMetrics(CollectorRegistry())
    metrics.wrote("apply")
    gauges = telemetry.OperatorGauges(leads=bool, waiting=int, objects=dict, restarts=int, ready=dict)
    return _described(metrics.registry.collect(), gauges.collect())


def _described(*collected: Iterable[Metric]) -> dict[str, MetricDescription]:
    found: dict[str, MetricDescription] = {}
    for family in (each for families in collected for each in families):
        declared = getattr(family, "_labelnames", ())  # labels without a sample yet
        sampled = {label for sample in family.samples for label in sample.labels}
        found[family.name] = MetricDescription(
            name=family.name,
            kind=family.type,
            meaning=family.documentation,
            labels=frozenset({*declared, *sampled} - {"le"}),
        )
    return found
