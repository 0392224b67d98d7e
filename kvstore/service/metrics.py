"""Prometheus metrics of a node: counters by tier, and durations of tier operations.

Names follow the rules of Prometheus: base units, and `_total` for counters. The pool is the tier "cpu". This module
collects only the durations itself; each scrape reads the counters of the pool machine, the hierarchy and the tiers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import Metric

from kvstore.eviction.ghost_cache import NamespaceEstimates
from kvstore.hierarchy.transfers import TierCounters
from kvstore.messages import POOL_TIER, Stats, TierStatus
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, HistogramDefinition, MetricDefinition

_BY_TIER = ("tier",)
TRANSFERS: Mapping[str, CounterDefinition] = CounterDefinition.by_field(
    "kvstore_hierarchy_",
    _BY_TIER,
    (
        ("loaded", "Blocks promoted to the pool", "KV blocks"),
        ("kept", "Blocks demoted to the tier", "KV blocks"),
        ("dropped", "Blocks not demoted because the queue was full", "KV blocks"),
        (
            "too_slow",
            "Promotions not begun because computing the blocks was predicted to be faster",
            "promotions",
        ),
        ("failures", "Transfers that failed or missed their deadline", "transfers"),
        ("fenced", "Times that a failure opened the tier's circuit breaker", "times"),
    ),
)
"""Metrics of the counters of `TierCounters`, by the name of the counter's field."""


class NodeSnapshot(Struct, frozen=True, kw_only=True):
    """State and counters of a node at one moment, from which its metrics are made."""

    stats: Stats
    transfers: tuple[TierCounters, ...]  # counters of each backing tier, in the order of `stats.tiers`
    refused_loads: int
    ghost_caches: tuple[NamespaceEstimates, ...]
    mismatches: int = 0  # number of handshakes and watches refused because of incompatible blocks or protocol versions
    undecodable: int = 0  # number of requests that were refused because they were not valid messages
    unproven: int = 0  # number of data plane connections that could not prove the secret
    crowded_out: int = 0  # number of unproven data plane connections that were closed for new ones


LATENCY_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds of the buckets of `OPERATIONS` in seconds, three per decade: from a look-up in memory to a hanging disk."""

COUNTERS: Mapping[str, CounterDefinition] = CounterDefinition.by_field(
    "kvstore_tier_",
    _BY_TIER,
    (
        ("hits", "Blocks that were asked for and found", "KV blocks"),
        ("misses", "Blocks that were asked for and not found, including corrupt ones", "KV blocks"),
        ("bytes_read", "Bytes of the blocks that were found", "bytes"),
        ("bytes_written", "Bytes of the blocks that were stored", "bytes"),
        ("refused", "Blocks that were not stored: no space, no quota or no budget", "KV blocks"),
        ("evicted", "Blocks evicted to make room for others", "KV blocks"),
        ("corrupt", "Blocks whose bytes were found wrong", "KV blocks"),
        ("failures", "Calls of the tier that failed or missed their deadline, as the tier counts them", "calls"),
        ("damaged", "Blocks that were damaged in transit; the tier keeps them", "KV blocks"),
    ),
)
"""Metrics of the counters of `TierStatus`, by the name of the counter's field."""

GAUGES: Mapping[str, GaugeDefinition] = GaugeDefinition.by_field(
    "kvstore_tier_",
    _BY_TIER,
    (
        ("blocks", "Blocks held now", ""),
        ("bytes", "Bytes that they occupy", ""),
        ("capacity_bytes", "Capacity in bytes; 0 if unknown", ""),
        ("fenced", "Servers of the tier that are fenced now because their answers are damaged often", "servers"),
    ),
)
"""Metrics of those fields of `TierStatus` that can also decrease, by the name of the field."""

OPERATIONS = HistogramDefinition(
    "kvstore_tier_operation_seconds",
    "Duration of a batch operation on a backing tier: find, fetch, keep or confirm",
    ("tier", "operation"),
    bounds=LATENCY_BUCKETS,
)
REFUSED_LOADS = CounterDefinition(
    "kvstore_hierarchy_refused_loads", "Promotions not begun because too many were under way", unit="promotions"
)
HIT_RATE = GaugeDefinition(
    "kvstore_shadow_hit_rate",
    "Estimated recent hit rate of the pool under a policy, at a multiple of its size",
    ("namespace", "policy", "scale"),
    "share from 0 to 1",
)
PINNED = GaugeDefinition("kvstore_pinned_blocks", "Blocks pinned by a lease or by a session")
HELD = GaugeDefinition("kvstore_held_bytes", "Bytes pinned by waiting sessions")
MISMATCHES = CounterDefinition(
    "kvstore_mismatches", "Clients refused because of incompatible blocks or protocol versions", unit="clients"
)
UNDECODABLE = CounterDefinition(
    "kvstore_undecodable", "Requests refused because they were not valid messages", unit="requests"
)
UNPROVEN = CounterDefinition(
    "kvstore_data_unproven", "Data plane connections that could not prove the secret", unit="connections"
)
CROWDED_OUT = CounterDefinition(
    "kvstore_data_crowded_out", "Unproven data plane connections that gave way to new ones", unit="connections"
)
EXPIRED = CounterDefinition(
    "kvstore_expired", "Leases and reservations that ended by their deadline", unit="leases and reservations"
)

METRICS: Sequence[MetricDefinition] = (
    *(*COUNTERS.values(), *GAUGES.values(), *TRANSFERS.values(), REFUSED_LOADS, OPERATIONS),
    *(HIT_RATE, PINNED, HELD, MISMATCHES, UNDECODABLE, UNPROVEN, CROWDED_OUT, EXPIRED),
)


class NodeMetrics:
    """Exports all metrics of one node process."""

    def __init__(self, registry: CollectorRegistry, look: Callable[[], NodeSnapshot]):
        """Register all metrics. Each scrape calls `look` in its own thread to get the node's state.

        `look` raises TimeoutError if the node is busy.
        """
        disable_created_metrics()
        self.registry = registry
        self._seconds = OPERATIONS.instrument(registry)
        registry.register(_SnapshotCollector(look))

    def moved(self, tier: str, operation: str, seconds: float) -> None:
        """Record that an operation of a tier (a value of `kvstore.hierarchy.transfers.OPERATIONS`) took this time."""
        self._seconds.labels(tier, operation).observe(seconds)


class _SnapshotCollector:
    def __init__(self, look: Callable[[], NodeSnapshot]):
        self._look = look

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, because they cannot be listed before the node runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        found = self._look()
        stats = found.stats
        tiers = (_pool(stats), *stats.tiers)
        for definitions in (COUNTERS, GAUGES):
            for name, definition in definitions.items():
                yield definition.samples({(tier.name,): getattr(tier, name) for tier in tiers})
        transfers = dict(zip([tier.name for tier in stats.tiers], found.transfers, strict=True))
        for name, definition in TRANSFERS.items():
            yield definition.samples({(tier,): getattr(counters, name) for tier, counters in transfers.items()})
        yield REFUSED_LOADS.value(found.refused_loads)
        yield HIT_RATE.samples(
            {
                (each.fingerprint, estimate.policy, str(estimate.scale)): estimate.hit_rate
                for each in found.ghost_caches
                for estimate in each.estimates
            }
        )
        yield PINNED.value(stats.pinned)
        yield HELD.value(stats.held_bytes)
        yield MISMATCHES.value(found.mismatches)
        yield UNDECODABLE.value(found.undecodable)
        yield UNPROVEN.value(found.unproven)
        yield CROWDED_OUT.value(found.crowded_out)
        yield EXPIRED.value(stats.expired)


def _pool(stats: Stats) -> TierStatus:
    return TierStatus(
        name=POOL_TIER,
        blocks=stats.blocks,
        bytes=stats.bytes,
        capacity_bytes=stats.capacity_bytes,
        hits=stats.hits,
        misses=stats.misses,
        bytes_read=stats.bytes_matched,
        bytes_written=stats.bytes_written,
        refused=stats.refused,
        evicted=stats.evicted,
        corrupt=stats.corrupt,
    )
