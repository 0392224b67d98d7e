"""Metrics of a router and its workers, read on each scrape.

Other metrics: requests in `fleet.core.telemetry`; relays, predictions, demand and hosted endpoints in the other files of this
folder; store nodes in `kvstore.service.metrics`. `merged.py` merges the metrics of several router processes.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.router.state.snapshot import RouterSnapshot
from fleet.router.tenants import TenantUsage

Value = TypeVar("Value", bound=StrEnum)

COUNTERS: Mapping[str, str] = {
    "retried": "Attempts that failed and were followed by another",
    "fallbacks": "Prompts computed by the decode worker because a prefill worker had failed",
    "continued": "Streams that another worker continued after tokens had been sent",
    "workers_lost": "Workers that left or were lost",
    "late_messages": "Messages of attempts that had ended before",
    "kv_mismatches": "Attempts that workers refused because the handed-over blocks do not match theirs",
    "policy_fallbacks": "Decisions of the default policy after the chosen policy failed",
}

WORKER_GAUGES: Mapping[str, str] = {
    "running": "Running requests, as reported by the worker",
    "waiting": "Requests that wait in the engine, as reported by the worker",
    "kv_blocks_used": "Blocks of running requests, as reported by the worker",
    "kv_blocks": "Capacity of the engine's cache in blocks",
    "cached_blocks": "Blocks of the engine's prefix cache in the prefix index",
    "booked_requests": "Requests reserved by this router",
    "booked_elsewhere": "Requests reserved by peer routers",
    "booked_blocks": "Blocks reserved by this router",
    "booked_prefill_tokens": "Prompt tokens reserved by this router and not computed yet",
}


class RouterMetrics:
    def __init__(
        self,
        read: Callable[[], RouterSnapshot],
        *,
        tasks: Callable[[], int] | None = None,
        refused: Callable[[], Mapping[str, float]] | None = None,
        directory: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """Create the collector for a `CollectorRegistry`.

        Args:
            read: Returns the current state of the router.
            tasks: Returns the number of tasks of the event loop; None: leave the metric out.
            refused: Returns how many workers each comparison of the tokenizer check has refused; None: leave the metric out.
            directory: Returns whether the discovery directory answers, or None if there is none or it was not read yet.
        """
        self._read = read
        self._tasks = tasks
        self._refused = refused
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        counters = snapshot.counters
        yield GaugeMetricFamily(
            "fleet_active_requests", "Requests that have not ended, including waiting ones", snapshot.active
        )
        yield GaugeMetricFamily("fleet_queued_requests", "Requests in the admission queue", snapshot.queued)
        if self._tasks is not None:
            yield GaugeMetricFamily("fleet_tasks", "Tasks of the router's event loop", self._tasks())
        if (reachable := self._directory()) is not None:
            yield GaugeMetricFamily(
                "fleet_directory_reachable",
                "Whether the discovery directory (etcd, Kubernetes, a folder) answers; meanwhile known workers stay until their leases end",
                float(reachable),
            )
        yield GaugeMetricFamily("fleet_index_blocks", "Distinct blocks in the prefix index", snapshot.index_blocks)
        yield CounterMetricFamily(
            "fleet_index_overflowed_blocks",
            "Blocks left out of the prefix index because their holder was full",
            snapshot.index_overflowed,
        )
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"fleet_{name}", meaning, getattr(counters, name))
        yield _by("fleet_refused_requests", "Rejected requests by reason", "reason", counters.refused)
        yield _by(
            "fleet_impossible_requests", "Requests that no worker could serve, by cause", "cause", counters.impossible
        )
        yield _by("fleet_placements", "Placements by the reason for one worker or a pair", "why", counters.placements)
        for name, meaning in WORKER_GAUGES.items():
            yield _of_workers(snapshot, f"fleet_worker_{name}", meaning, name)
        yield _stores(snapshot)
        yield from _knowledge(snapshot)
        if self._refused is not None:
            refused = GaugeMetricFamily(
                "fleet_refused_workers",
                "Workers that failed the tokenizer check and are not used",
                labels=["different"],
            )
            for field, count in self._refused().items():
                refused.add_metric([field], count)
            yield refused


def _by(name: str, meaning: str, label: str, counts: Mapping[Value, int]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family


def _of_workers(snapshot: RouterSnapshot, name: str, meaning: str, field: str) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=["model", "role", "worker"])
    for pool in snapshot.pools:
        for worker in pool.workers:
            family.add_metric([pool.model, pool.role, worker.worker_id], getattr(worker, field))
    return family


def _stores(snapshot: RouterSnapshot) -> Metric:
    family = GaugeMetricFamily(
        "fleet_store_blocks", "Blocks in the prefix index by store tier", labels=["store", "namespace", "tier"]
    )
    for store in snapshot.stores:
        family.add_metric([store.store_id, store.fingerprint, store.tier], store.blocks)
    return family


def _knowledge(snapshot: RouterSnapshot) -> Iterator[Metric]:
    """Yield the metrics of the prefix index (`fleet.router.kv_index.prefix_index`)."""
    gauges = {
        "workers": "Workers by how the router knows their cache",
        "drifting_workers": "Workers whose reported cache differs from what the router believes",
        "precision": "Part of the predicted cached tokens that was cached, recently",
        "recall": "Part of the cached tokens that was predicted, recently",
        "hit_rate_error": "Predicted hit rate minus the reported one, for recent prompts with hits",
    }
    families = {
        name: GaugeMetricFamily(f"fleet_cache_{name}", meaning, labels=["knowledge"])
        for name, meaning in gauges.items()
    }
    tokens = CounterMetricFamily(
        "fleet_cache_compared_tokens",
        "Prompt tokens of compared requests: all, predicted as cached, reported as cached, both",
        labels=["knowledge", "what"],
    )
    for each in snapshot.knowledge:
        recent, total = each.recent, each.total
        values = {
            "workers": each.workers,
            "drifting_workers": each.drifting,
            "precision": recent.precision,
            "recall": recent.recall,
            "hit_rate_error": recent.hit_rate_error,
        }
        for name, value in values.items():
            families[name].add_metric([each.knowledge], value)
        for what, count in zip(
            ("prompt", "predicted", "reported", "both"),
            (total.prompt, total.predicted, total.reported, total.agreed),
            strict=True,
        ):
            tokens.add_metric([each.knowledge, what], count)
    yield from families.values()
    yield tokens


class TenantMetrics:
    """Collects requests and tokens of each tenant that the settings name."""

    def __init__(self, read: Callable[[], Mapping[str, TenantUsage]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fleet_tenant_requests", "Admitted requests", labels=["tenant"])
        tokens = CounterMetricFamily("fleet_tenant_tokens", "Tokens of prompts and of answers", labels=["tenant", "of"])
        for tenant, usage in self._read().items():
            requests.add_metric([tenant], usage.requests)
            tokens.add_metric([tenant, "prompts"], usage.prompt_tokens)
            tokens.add_metric([tenant, "answers"], usage.answer_tokens)
        yield requests
        yield tokens
