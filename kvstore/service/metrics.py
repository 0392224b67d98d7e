"""Prometheus metrics of a node: counters by tier, and durations of tier operations.

Names follow the rules of Prometheus: base units, and `_total` for counters. The pool is the tier "cpu". Nothing is
counted twice: counters are read from the machine and the tiers at each scrape.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.eviction.ghost_cache import NamespaceEstimates
from kvstore.hierarchy.transfers import TierCounters
from kvstore.messages import POOL_TIER, Stats, TierStatus

TRANSFERS = {
    "loaded": "Blocks promoted to the pool",
    "kept": "Blocks demoted to the tier",
    "dropped": "Blocks not demoted because the queue was full",
    "too_slow": "Promotions not begun because computing the blocks was predicted to be faster",
    "failures": "Transfers that failed or missed their deadline",
    "fenced": "Times that a failure opened the tier's circuit breaker",
}


class NodeSnapshot(Struct, frozen=True, kw_only=True):
    """State of a node at one moment."""

    stats: Stats
    transfers: tuple[TierCounters, ...]  # counters of each backing tier, in the order of `stats.tiers`
    refused_loads: int
    ghost_caches: tuple[NamespaceEstimates, ...]
    mismatches: int = 0  # number of clients that were refused because of incompatible blocks
    undecodable: int = 0  # number of requests that were refused because they were not valid messages
    unproven: int = 0  # number of data plane connections that could not prove the secret
    crowded_out: int = 0  # number of silent data plane connections that were closed for new ones


# Upper bounds of the histogram's buckets in seconds, three per decade: from a look-up in memory to a hanging disk.
LATENCY_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)

COUNTERS = {
    "hits": "Blocks that were asked for and found",
    "misses": "Blocks that were asked for and not found, including corrupt ones",
    "bytes_read": "Bytes of the blocks that were found",
    "bytes_written": "Bytes of the blocks that were stored",
    "refused": "Blocks that were not stored: no space, no quota or no budget",
    "evicted": "Blocks evicted to make room for others",
    "corrupt": "Blocks whose bytes were found wrong",
    "failures": "Calls of the tier that failed or missed their deadline, as the tier counts them",
    "damaged": "Blocks that were damaged in transit; the tier keeps them",
}
GAUGES = {
    "blocks": "Blocks held now",
    "bytes": "Bytes that they occupy",
    "capacity_bytes": "Capacity in bytes; 0 if unknown",
    "fenced": "Servers of the tier that are fenced now because their answers are damaged often",
}


class NodeMetrics:
    """All metrics of one node process."""

    def __init__(self, registry: CollectorRegistry, look: Callable[[], NodeSnapshot]):
        """Register all metrics. Each scrape calls `look` in its own thread; `look` raises TimeoutError if the node is busy."""
        disable_created_metrics()
        self.registry = registry
        self._seconds = Histogram(
            "kvstore_tier_operation_seconds",
            "Duration of a batch operation on a backing tier: find, fetch, keep or confirm",
            ["tier", "operation"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        registry.register(_SnapshotCollector(look))

    def moved(self, tier: str, operation: str, seconds: float) -> None:
        """Record the duration of a tier's operation."""
        self._seconds.labels(tier, operation).observe(seconds)


class _SnapshotCollector:
    def __init__(self, look: Callable[[], NodeSnapshot]):
        self._look = look

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the names would have to be known before the node runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        found = self._look()
        stats = found.stats
        tiers = (_pool(stats), *stats.tiers)
        for name, about in COUNTERS.items():
            family: Metric = CounterMetricFamily(f"kvstore_tier_{name}", about, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        for name, about in GAUGES.items():
            family = GaugeMetricFamily(f"kvstore_tier_{name}", about, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        for name, about in TRANSFERS.items():
            family = CounterMetricFamily(f"kvstore_hierarchy_{name}", about, labels=["tier"])
            for tier, counters in zip(stats.tiers, found.transfers, strict=True):
                family.add_metric([tier.name], getattr(counters, name))
            yield family
        yield CounterMetricFamily(
            "kvstore_hierarchy_refused_loads",
            "Promotions not begun because too many were under way",
            found.refused_loads,
        )
        hit_rates = GaugeMetricFamily(
            "kvstore_shadow_hit_rate",
            "Estimated recent hit rate of the pool under a policy, at a multiple of its size",
            labels=["namespace", "policy", "scale"],
        )
        for each in found.ghost_caches:
            for estimate in each.estimates:
                hit_rates.add_metric([each.fingerprint, estimate.policy, str(estimate.scale)], estimate.hit_rate)
        yield hit_rates
        yield GaugeMetricFamily("kvstore_pinned_blocks", "Blocks pinned by a lease or by a session", stats.pinned)
        yield GaugeMetricFamily("kvstore_held_bytes", "Bytes pinned by waiting sessions", stats.held_bytes)
        yield CounterMetricFamily(
            "kvstore_mismatches", "Clients refused because of incompatible blocks", found.mismatches
        )
        yield CounterMetricFamily(
            "kvstore_undecodable", "Requests refused because they were not valid messages", found.undecodable
        )
        yield CounterMetricFamily(
            "kvstore_data_unproven", "Data plane connections that could not prove the secret", found.unproven
        )
        yield CounterMetricFamily(
            "kvstore_data_crowded_out", "Unproven data plane connections that gave way to new ones", found.crowded_out
        )
        yield CounterMetricFamily(
            "kvstore_expired", "Leases and reservations that ended by their deadline", stats.expired
        )


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
