"""What a router knows of itself and its workers, as metrics; read when somebody asks for them."""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.router.state.snapshot import RouterSnapshot

Value = TypeVar("Value", bound=StrEnum)

COUNTERS: Mapping[str, str] = {
    "retried": "Attempts that failed and were followed by another",
    "fallbacks": "Prompts computed by the decode worker because a prefill worker had failed",
    "continued": "Streams that went on, on another worker, after tokens had been sent",
    "workers_lost": "Workers that left, by themselves or not",
    "late_messages": "Messages of work that was given up before",
    "kv_mismatches": "Pieces of work that workers refused since their blocks are not like those handed over",
    "policy_fallbacks": "Decisions that the default policy made because the chosen one did not",
}
"""Of `fleet.router.state.snapshot.RouterCounters`."""

WORKER_GAUGES: Mapping[str, str] = {
    "running": "Requests that run, as the worker reports",
    "waiting": "Requests that wait in the engine, as the worker reports",
    "kv_blocks_used": "Blocks that running requests hold, as the worker reports",
    "kv_blocks": "Blocks that the engine's cache has room for",
    "cached_blocks": "Blocks of the engine's prefix cache that the index knows",
    "booked_requests": "Requests that this router has booked",
    "booked_elsewhere": "Requests that other routers have booked",
    "booked_blocks": "Blocks that this router has booked",
    "booked_prefill_tokens": "Prompt tokens that this router has booked and that are not computed",
}
"""Of `fleet.router.state.snapshot.WorkerSnapshot`."""


class RouterMetrics:
    """Register it with a `CollectorRegistry`."""

    def __init__(
        self,
        read: Callable[[], RouterSnapshot],
        *,
        tasks: Callable[[], int] | None = None,
        refused: Callable[[], Mapping[str, float]] | None = None,
        directory: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """Metrics of one router.

        Args:
            read: Its state at the instant.
            tasks: How many its event loop has; None: that is not told.
            refused: Workers that are not used, by what they make of the golden prompts; None: that is not told.
            directory: Whether the directory of workers answers; None: there is none, or it was not asked yet.
        """
        self._read = read
        self._tasks = tasks
        self._refused = refused
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        counters = snapshot.counters
        yield GaugeMetricFamily(
            "fleet_active_requests", "Requests that have not ended, waiting ones included", snapshot.active
        )
        yield GaugeMetricFamily("fleet_queued_requests", "Requests that wait for room on a worker", snapshot.queued)
        if self._tasks is not None:
            yield GaugeMetricFamily("fleet_tasks", "Tasks of the router's event loop", self._tasks())
        if (reachable := self._directory()) is not None:
            yield GaugeMetricFamily(
                "fleet_directory_reachable",
                "Whether the directory of workers (etcd, Kubernetes, a file) answers; while it does not, known workers stay until their leases end",
                float(reachable),
            )
        yield GaugeMetricFamily("fleet_index_blocks", "Distinct blocks that the index knows", snapshot.index_blocks)
        yield CounterMetricFamily(
            "fleet_index_overflowed_blocks", "Blocks not noted because their holder was full", snapshot.index_overflowed
        )
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"fleet_{name}", meaning, getattr(counters, name))
        yield _by("fleet_refused_requests", "Requests that were refused, by reason", "reason", counters.refused)
        yield _by(
            "fleet_impossible_requests", "Requests that nobody could serve, by cause", "cause", counters.impossible
        )
        yield _by("fleet_placements", "Placements, by why on one worker or two", "why", counters.placements)
        for name, meaning in WORKER_GAUGES.items():
            yield _of_workers(snapshot, f"fleet_worker_{name}", meaning, name)
        yield _stores(snapshot)
        yield from _knowledge(snapshot)
        if self._refused is not None:
            refused = GaugeMetricFamily(
                "fleet_refused_workers",
                "Workers not used since golden prompts come out otherwise",
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
        "fleet_store_blocks", "Blocks that the index knows", labels=["store", "namespace", "tier"]
    )
    for store in snapshot.stores:
        family.add_metric([store.store_id, store.fingerprint, store.tier], store.blocks)
    return family


def _knowledge(snapshot: RouterSnapshot) -> Iterator[Metric]:
    """How well it is known what workers have cached, see `fleet.router.kv_index.cache_accuracy`."""
    gauges = {
        "workers": "Workers by how it is known what they have cached",
        "drifting_workers": "Workers that report to have cached something else than is known of them",
        "precision": "Of the prompt tokens lately believed to be cached, the part that was",
        "recall": "Of the prompt tokens lately cached, the part that was believed to be",
        "hit_rate_error": "Hit rate lately believed, less the reported one, of prompts with hits",
    }
    families = {
        name: GaugeMetricFamily(f"fleet_cache_{name}", meaning, labels=["knowledge"])
        for name, meaning in gauges.items()
    }
    tokens = CounterMetricFamily(
        "fleet_cache_compared_tokens",
        "Prompt tokens of compared requests: all, believed to be cached, reported to have been, both",
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
