"""Metrics of a worker process. Their values are read on the worker's event loop at each scrape.

Routers also export what workers report to them, under the names `fleet_worker_…`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import structs
from prometheus_client.core import Metric

from fleet.core.work import LoadReport, WorkerDescription
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition
from workers.machine import LifePhase

_LABELS = ("model", "role", "worker")
RUNNING = GaugeDefinition("fleet_engine_running_requests", "Requests in the engine's batch", _LABELS)
WAITING = GaugeDefinition("fleet_engine_waiting_requests", "Requests that wait in the engine", _LABELS)
HELD = GaugeDefinition("fleet_engine_held_requests", "Requests that the engine was given and has not ended", _LABELS)
KV_USED = GaugeDefinition("fleet_engine_kv_used_blocks", "Blocks of running requests", _LABELS)
KV_BLOCKS = GaugeDefinition("fleet_engine_kv_blocks", "Capacity of the engine's cache", _LABELS)
CACHED = GaugeDefinition("fleet_engine_cached_blocks", "Blocks in the engine's prefix cache", _LABELS)
ROUTERS = GaugeDefinition("fleet_worker_routers", "Routers that are connected", _LABELS, "routers")
PULLED = CounterDefinition(
    "fleet_engine_pulled_blocks",
    "Blocks that the engine has pulled from other engines' memory, by the result of their check",
    (*_LABELS, "check"),
)
PHASE = GaugeDefinition("fleet_worker_phase", "1 for the phase of the worker's life", (*_LABELS, "phase"), "0 or 1")
METRICS: Sequence[MetricDefinition] = (RUNNING, WAITING, HELD, KV_USED, KV_BLOCKS, CACHED, ROUTERS, PULLED, PHASE)


class MeteredEngine(Protocol):
    """The attributes of an engine that the metrics read."""

    def load(self) -> LoadReport: ...


class MeteredWorker(Protocol):
    """The attributes of `workers.server.WorkerServer` that the metrics read."""

    description: WorkerDescription

    @property
    def engine(self) -> MeteredEngine: ...

    @property
    def phase(self) -> LifePhase: ...

    @property
    def held(self) -> int: ...

    @property
    def warm_blocks(self) -> int: ...

    @property
    def routers(self) -> int: ...


class WorkerMetrics:
    """Collects a worker's metrics for a `CollectorRegistry` of prometheus_client.

    `collect` runs on the worker's event loop.
    """

    def __init__(self, worker: MeteredWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the worker with their present values; prometheus_client calls this method at each scrape."""
        worker, load = self._worker, self._worker.engine.load()
        described = worker.description
        labels = described.model, described.role, described.worker_id
        for definition, value in (
            (RUNNING, load.running),
            (WAITING, load.waiting),
            (HELD, worker.held),
            (KV_USED, load.kv_blocks_used),
            (KV_BLOCKS, described.kv_blocks),
            (CACHED, worker.warm_blocks),
            (ROUTERS, worker.routers),
        ):
            yield definition.samples({labels: value})
        yield PULLED.samples({(*labels, check): count for check, count in structs.asdict(load.pulled).items()})
        yield PHASE.samples({(*labels, phase): float(phase is worker.phase) for phase in LifePhase})
