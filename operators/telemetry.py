"""Metrics of an operator. Label values are of a fixed number."""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ReconcileOutcome(StrEnum):
    """How a look at a deployment went."""

    SETTLED = "settled"
    ACTED = "acted"
    REFUSED = "refused"
    """Something of it, by the API server."""

    FAILED = "failed"
    """It could not go on, because of the API server."""

    CRASHED = "crashed"
    """Because of a fault of ours."""


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._looks = Counter(
            "fleet_operator_reconciles", "Looks at one deployment, by how they ended", ["outcome"], registry=registry
        )
        self._writes = Counter(
            "fleet_operator_writes", "Writes to the API server, by what for", ["write"], registry=registry
        )
        self._seconds = Histogram("fleet_operator_reconcile_seconds", "Of one look", buckets=BUCKETS, registry=registry)
        for outcome in ReconcileOutcome:
            self._looks.labels(outcome)

    def looked(self, outcome: ReconcileOutcome, seconds: float) -> None:
        self._looks.labels(outcome).inc()
        self._seconds.observe(seconds)

    def wrote(self, write: str) -> None:
        self._writes.labels(write).inc()


class OperatorGauges:
    """What is so at the moment of a scrape. Register it with a `CollectorRegistry`."""

    def __init__(
        self,
        *,
        leads: Callable[[], bool],
        waiting: Callable[[], int],
        objects: Callable[[], Mapping[str, int]],
        restarts: Callable[[], int],
        ready: Callable[[], Mapping[str, int]],
    ) -> None:
        self._leads = leads
        self._waiting = waiting
        self._objects = objects
        self._restarts = restarts
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client has it."""
        yield GaugeMetricFamily("fleet_operator_leads", "Whether this operator acts", float(self._leads()))
        yield GaugeMetricFamily("fleet_operator_queue", "Deployments to be looked at", self._waiting())
        yield GaugeMetricFamily("fleet_operator_watch_restarts", "Lists and watches begun anew", self._restarts())
        objects = GaugeMetricFamily("fleet_operator_objects", "Objects that are kept, by kind", labels=["kind"])
        for kind, count in self._objects().items():
            objects.add_metric([kind], count)
        yield objects
        deployments = GaugeMetricFamily("fleet_operator_deployments", "DisaggDeployments, by Ready", labels=["ready"])
        for status, count in self._ready().items():
            deployments.add_metric([status], count)
        yield deployments
