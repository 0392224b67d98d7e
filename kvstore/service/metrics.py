"""What a node says of itself to Prometheus: its counters by tier, and how long its tiers take.

Names follow Prometheus' rules: base units, `_total` for counters. The pool is the tier "cpu". Nothing is counted twice:
counters are read from the machine and the tiers when somebody asks.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.eviction.ghost_caches import NamespaceEstimates
from kvstore.hierarchy.transfers import TierCounters
from kvstore.messages import POOL_TIER, Stats, TierStatus

TRANSFERS = {
    "loaded": "Blocks that came up to the pool",
    "kept": "Blocks that went down to the tier",
    "dropped": "Blocks that should have gone down, and for which the queue had no room",
    "too_slow": "Loads not begun, because computing the blocks again was predicted to be faster",
    "failures": "Movements that failed, or did not come back in time",
    "fenced": "Times that a failure closed the tier for a while",
}


class NodeSnapshot(Struct, frozen=True, kw_only=True):
    """What a node knows of itself at one moment."""

    stats: Stats
    transfers: tuple[TierCounters, ...]  # of the tiers below the pool, in the order of `stats.tiers`
    refused_loads: int
    ghost_caches: tuple[NamespaceEstimates, ...]
    mismatches: int = 0  # clients refused, because their blocks are not like those here
    undecodable: int = 0  # requests refused, because they are no messages
    unproven: int = 0  # connections of the data plane that could not prove the secret
    crowded_out: int = 0  # connections of the data plane that were silent, and gave way to the next


# Seconds, three steps a decade: from a look into an index in memory to a disk that hangs.
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
    "hits": "Blocks that were asked for and there",
    "misses": "Blocks that were asked for and not there, corrupt ones included",
    "bytes_read": "Bytes of the blocks that were there",
    "bytes_written": "Bytes of the blocks that were taken",
    "refused": "Blocks that were not taken: no space, no quota, no budget",
    "evicted": "Blocks that made room for others",
    "corrupt": "Blocks whose bytes were found bad",
    "failures": "Calls of the tier that failed or ended past their deadline, as it counts them",
    "damaged": "Blocks that were damaged on their way from the tier, which keeps them",
}
GAUGES = {
    "blocks": "Blocks held now",
    "bytes": "Bytes that they occupy",
    "capacity_bytes": "Room for them; 0 where it is not known",
    "fenced": "Servers of the tier that are left alone now, because their answers are damaged often",
}


class NodeMetrics:
    """All metrics of one node process."""

    def __init__(self, registry: CollectorRegistry, look: Callable[[], NodeSnapshot]):
        """Registers everything.

        Args:
            registry: Whoever serves it may call from another thread.
            look: Takes a snapshot, safe to call from there; raises TimeoutError when the node has no time.
        """
        self.registry = registry
        self._seconds = Histogram(
            "kvstore_tier_operation_seconds",
            "Batches of blocks looked for, fetched or kept in a tier below the pool",
            ["tier", "operation"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        registry.register(_SnapshotCollector(look))

    def moved(self, tier: str, operation: str, seconds: float) -> None:
        """A tier has answered."""
        self._seconds.labels(tier, operation).observe(seconds)


class _SnapshotCollector:
    def __init__(self, look: Callable[[], NodeSnapshot]):
        self._look = look

    def describe(self) -> Iterable[Metric]:
        """Nothing: names would have to be known before the node runs."""
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
            "kvstore_hierarchy_refused_loads", "Loads not begun, because too many were under way", found.refused_loads
        )
        hit_rates = GaugeMetricFamily(
            "kvstore_shadow_hit_rate",
            "What the pool's hit rate of late would have been under a policy, at a multiple of its size",
            labels=["namespace", "policy", "scale"],
        )
        for each in found.ghost_caches:
            for estimate in each.estimates:
                hit_rates.add_metric([each.fingerprint, estimate.policy, str(estimate.scale)], estimate.hit_rate)
        yield hit_rates
        yield GaugeMetricFamily("kvstore_pinned_blocks", "Blocks that a lease or a hold keeps in place", stats.pinned)
        yield GaugeMetricFamily("kvstore_held_bytes", "Bytes that sessions hold while they wait", stats.held_bytes)
        yield CounterMetricFamily(
            "kvstore_mismatches", "Clients refused, because their blocks are not like those here", found.mismatches
        )
        yield CounterMetricFamily(
            "kvstore_undecodable", "Requests refused, because they were no messages", found.undecodable
        )
        yield CounterMetricFamily(
            "kvstore_data_unproven", "Connections of the data plane that could not prove the secret", found.unproven
        )
        yield CounterMetricFamily(
            "kvstore_data_crowded_out",
            "Connections of the data plane that had proven nothing, and gave way to the next",
            found.crowded_out,
        )
        yield CounterMetricFamily("kvstore_expired", "Leases and reservations that ended by themselves", stats.expired)


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
