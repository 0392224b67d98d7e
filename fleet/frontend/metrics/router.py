"""Metrics of a router and its workers, read on each scrape.

Other metrics: requests in `fleet.core.telemetry`; relays, predictions, demand, images, traces and hosted endpoints in the other
files of this folder; store nodes in `kvstore.service.metrics`. `merged.py` merges the metrics of several router processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from msgspec import structs
from prometheus_client.core import Metric

from fleet.membership.compatibility import IncompatiblePeer, Link
from fleet.router.state.snapshot import RouterCounters, RouterSnapshot
from fleet.router.tenants import TenantUsage
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, Labels, MetricDefinition

Value = TypeVar("Value", bound=StrEnum)

COUNTERS: Mapping[str, CounterDefinition] = CounterDefinition.by_field(
    "fleet_",
    ("model",),
    (
        ("retried", "Attempts that failed and were followed by another", "attempts"),
        ("fallbacks", "Prompts computed by the decode worker because a prefill worker had failed", "prompts"),
        ("continued", "Streams that another worker continued after tokens had been sent", "streams"),
        ("workers_lost", "Workers that left or were lost", "workers"),
        (
            "kv_mismatches",
            "Attempts that workers refused because the handed-over blocks do not match theirs",
            "attempts",
        ),
        ("policy_fallbacks", "Decisions of the default policy after the chosen policy failed", "decisions"),
    ),
)
"""Maps names of fields of `RouterCounters` to the counters that show these fields, with only the label `model`."""

WORKER_GAUGES: Mapping[str, GaugeDefinition] = GaugeDefinition.by_field(
    "fleet_worker_",
    ("model", "role", "worker"),
    (
        ("running", "Running requests, as reported by the worker", "requests"),
        ("waiting", "Requests that wait in the engine, as reported by the worker", "requests"),
        ("kv_blocks_used", "Blocks of running requests, as reported by the worker", "KV blocks"),
        ("kv_blocks", "Capacity of the engine's cache in blocks", ""),
        ("cached_blocks", "Blocks of the engine's prefix cache in the prefix index", ""),
        ("booked_requests", "Requests reserved by this router", ""),
        ("booked_elsewhere", "Requests reserved by peer routers", "requests"),
        ("booked_blocks", "Blocks reserved by this router", ""),
        ("booked_prefill_tokens", "Prompt tokens reserved by this router and not computed yet", ""),
    ),
)
"""Maps names of fields of `WorkerSnapshot` to the gauges that show these fields. The labels `model` and `role` name the worker's pool."""

PULLED_BLOCKS = CounterDefinition(
    "fleet_worker_pulled_blocks",
    "Blocks that the worker has pulled from other engines' memory, by the result of their check",
    ("model", "role", "worker", "check"),
)

ACTIVE = GaugeDefinition("fleet_active_requests", "Requests that have not ended, including waiting ones", ("model",))
QUEUED = GaugeDefinition("fleet_queued_requests", "Requests in the admission queue", ("model",))
LATE_MESSAGES = CounterDefinition("fleet_late_messages", "Messages of attempts that had ended before", unit="messages")
TASKS = GaugeDefinition("fleet_tasks", "Tasks of the router's event loop", unit="tasks")
DIRECTORY_REACHABLE = GaugeDefinition(
    "fleet_directory_reachable",
    "Whether the discovery directory (etcd, Kubernetes, a folder) answers; meanwhile known workers stay until their leases end",
    unit="0 or 1",
)
INDEX_BLOCKS = GaugeDefinition("fleet_index_blocks", "Distinct blocks in the prefix index")
INDEX_OVERFLOWED = CounterDefinition(
    "fleet_index_overflowed_blocks", "Blocks left out of the prefix index because their holder was full"
)
REFUSED = CounterDefinition("fleet_refused_requests", "Rejected requests by reason", ("model", "reason"))
IMPOSSIBLE = CounterDefinition(
    "fleet_impossible_requests", "Requests that no worker could serve, by cause", ("model", "cause")
)
PLACEMENTS = CounterDefinition(
    "fleet_placements", "Placements by the reason for one worker or a pair", ("model", "why"), "placements"
)
REFUSED_WORKERS = GaugeDefinition(
    "fleet_refused_workers", "Workers that failed the tokenizer check and are not used", ("model", "different")
)
INCOMPATIBLE_PEERS = GaugeDefinition(
    "fleet_incompatible_peers",
    "Peers refused within the last minute, because they speak no common version of the protocol",
    ("link",),
    "peers",
)
STORE_BLOCKS = GaugeDefinition(
    "fleet_store_blocks", "Blocks in the prefix index by store tier", ("store", "namespace", "tier")
)
CACHE_GAUGES: Mapping[str, GaugeDefinition] = GaugeDefinition.by_field(
    "fleet_cache_",
    ("model", "knowledge"),
    (
        ("workers", "Workers by how the router knows their cache", ""),
        ("drifting_workers", "Workers whose reported cache differs from what the router believes", ""),
        ("precision", "Part of the predicted cached tokens that was cached, recently", "share from 0 to 1"),
        ("recall", "Part of the cached tokens that was predicted, recently", "share from 0 to 1"),
        ("hit_rate_error", "Predicted hit rate minus the reported one, for recent prompts with hits", "-1 to 1"),
    ),
)
COMPARED_TOKENS = CounterDefinition(
    "fleet_cache_compared_tokens",
    "Prompt tokens of compared requests: all, predicted as cached, reported as cached, both",
    ("model", "knowledge", "what"),
)
TENANT_REQUESTS = CounterDefinition("fleet_tenant_requests", "Admitted requests", ("tenant",))
TENANT_TOKENS = CounterDefinition("fleet_tenant_tokens", "Tokens of prompts and of answers", ("tenant", "of"))

METRICS: Sequence[MetricDefinition] = (
    *(ACTIVE, QUEUED, *COUNTERS.values(), REFUSED, IMPOSSIBLE, PLACEMENTS, LATE_MESSAGES),
    *(TASKS, DIRECTORY_REACHABLE, INDEX_BLOCKS, INDEX_OVERFLOWED, STORE_BLOCKS, REFUSED_WORKERS, INCOMPATIBLE_PEERS),
    *(*WORKER_GAUGES.values(), PULLED_BLOCKS, *CACHE_GAUGES.values(), COMPARED_TOKENS, TENANT_REQUESTS, TENANT_TOKENS),
)


class RouterMetrics:
    def __init__(
        self,
        read: Callable[[], RouterSnapshot],
        *,
        tasks: Callable[[], int] | None = None,
        refused: Callable[[], Mapping[Labels, float]] | None = None,
        directory: Callable[[], bool | None] = lambda: None,
        incompatible: Callable[[], Sequence[IncompatiblePeer]] = tuple,
    ) -> None:
        """Create the collector for a `CollectorRegistry`.

        Args:
            read: Returns the current state of the router.
            tasks: Returns the number of tasks of the event loop; None: leave the metric out.
            refused: Returns how many workers the tokenizer check has refused, by model and by the digest that differs; None:
                leave the metric out.
            directory: Returns whether the discovery directory answers, or None if there is none or it was not read yet.
            incompatible: Returns the peers without a common protocol version.
        """
        self._read = read
        self._tasks = tasks
        self._refused = refused
        self._directory = directory
        self._incompatible = incompatible

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        yield ACTIVE.samples({(each.model,): each.active for each in snapshot.models})
        yield QUEUED.samples({(each.model,): each.queued for each in snapshot.models})
        for name, definition in COUNTERS.items():
            yield definition.samples({(each.model,): getattr(each.counters, name) for each in snapshot.models})
        yield _by(snapshot, REFUSED, lambda counters: counters.refused)
        yield _by(snapshot, IMPOSSIBLE, lambda counters: counters.impossible)
        yield _by(snapshot, PLACEMENTS, lambda counters: counters.placements)
        yield LATE_MESSAGES.value(snapshot.counters.late_messages)
        if self._tasks is not None:
            yield TASKS.value(self._tasks())
        if (reachable := self._directory()) is not None:
            yield DIRECTORY_REACHABLE.value(float(reachable))
        yield INDEX_BLOCKS.value(snapshot.index_blocks)
        yield INDEX_OVERFLOWED.value(snapshot.index_overflowed)
        yield STORE_BLOCKS.samples(
            {(store.store_id, store.fingerprint, store.tier): store.blocks for store in snapshot.stores}
        )
        refused_now = self._incompatible()
        yield INCOMPATIBLE_PEERS.samples({(link,): sum(each.link is link for each in refused_now) for link in Link})
        if self._refused is not None:
            yield REFUSED_WORKERS.samples(self._refused())
        for name, gauge in WORKER_GAUGES.items():
            yield gauge.samples(
                {
                    (pool.model, pool.role, worker.worker_id): getattr(worker, name)
                    for pool in snapshot.pools
                    for worker in pool.workers
                }
            )
        yield PULLED_BLOCKS.samples(
            {
                (pool.model, pool.role, worker.worker_id, check): count
                for pool in snapshot.pools
                for worker in pool.workers
                for check, count in structs.asdict(worker.pulled).items()
            }
        )
        yield from _knowledge(snapshot)


def _by(
    snapshot: RouterSnapshot, definition: CounterDefinition, read: Callable[[RouterCounters], Mapping[Value, int]]
) -> Metric:
    """Return a counter with two labels: the model, and each key of the mapping that `read` returns for the model."""
    return definition.samples(
        {(each.model, value): count for each in snapshot.models for value, count in read(each.counters).items()}
    )


def _knowledge(snapshot: RouterSnapshot) -> Iterator[Metric]:
    """Yield the metrics of cache accuracy: how well the prefix index (`fleet.router.kv_index.prefix_index`) knows the workers' caches."""
    gauges: dict[str, dict[Labels, float]] = {name: {} for name in CACHE_GAUGES}
    tokens: dict[Labels, float] = {}
    for each in snapshot.knowledge:
        recent, total = each.recent, each.total
        gauges["workers"][each.model, each.knowledge] = each.workers
        gauges["drifting_workers"][each.model, each.knowledge] = each.drifting
        gauges["precision"][each.model, each.knowledge] = recent.precision
        gauges["recall"][each.model, each.knowledge] = recent.recall
        gauges["hit_rate_error"][each.model, each.knowledge] = recent.hit_rate_error
        tokens |= {
            (each.model, each.knowledge, "prompt"): total.prompt,
            (each.model, each.knowledge, "predicted"): total.predicted,
            (each.model, each.knowledge, "reported"): total.reported,
            (each.model, each.knowledge, "both"): total.agreed,
        }
    for name, definition in CACHE_GAUGES.items():
        yield definition.samples(gauges[name])
    yield COMPARED_TOKENS.samples(tokens)


class TenantMetrics:
    """Collects requests and tokens of each tenant that the settings name."""

    def __init__(self, read: Callable[[], Mapping[str, TenantUsage]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        usages = self._read()
        yield TENANT_REQUESTS.samples({(tenant,): usage.requests for tenant, usage in usages.items()})
        tokens: dict[Labels, float] = {}
        for tenant, usage in usages.items():
            tokens[tenant, "prompts"] = usage.prompt_tokens
            tokens[tenant, "answers"] = usage.answer_tokens
        yield TENANT_TOKENS.samples(tokens)
