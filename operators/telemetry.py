"""Metrics of the operator; those of the planner are in `operators.planner.metrics`. All labels have a fixed number of values."""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ReconcileOutcome(StrEnum):
    """Outcome of one reconcile of a deployment."""

    SETTLED = "settled"
    ACTED = "acted"
    REFUSED = "refused"
    """The API server refused a part of it."""

    FAILED = "failed"
    """The API server failed, so the reconcile could not finish."""

    CRASHED = "crashed"
    """The operator has a fault."""


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()
        self.registry = registry
        self._looks = Counter(
            "fleet_operator_reconciles", "Reconciles of one deployment, by outcome", ["outcome"], registry=registry
        )
        self._writes = Counter(
            "fleet_operator_writes", "Writes to the API server, by purpose", ["write"], registry=registry
        )
        self._seconds = Histogram(
            "fleet_operator_reconcile_seconds", "Duration of one reconcile", buckets=BUCKETS, registry=registry
        )
        for outcome in ReconcileOutcome:
            self._looks.labels(outcome)

    def looked(self, outcome: ReconcileOutcome, seconds: float) -> None:
        self._looks.labels(outcome).inc()
        self._seconds.observe(seconds)

    def wrote(self, write: str) -> None:
        self._writes.labels(write).inc()


class OperatorGauges:
    """Values at the moment of a scrape. Register it with a `CollectorRegistry`."""

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
        """Yield the metrics, as prometheus_client expects."""
        yield GaugeMetricFamily("fleet_operator_leads", "Whether this operator leads", float(self._leads()))
        yield GaugeMetricFamily("fleet_operator_queue", "Deployments that wait for a reconcile", self._waiting())
        yield GaugeMetricFamily("fleet_operator_watch_restarts", "Restarts of lists and watches", self._restarts())
        objects = GaugeMetricFamily("fleet_operator_objects", "Objects in the caches, by kind", labels=["kind"])
        for kind, count in self._objects().items():
            objects.add_metric([kind], count)
        yield objects
        deployments = GaugeMetricFamily("fleet_operator_deployments", "DisaggDeployments, by Ready", labels=["ready"])
        for status, count in self._ready().items():
            deployments.add_metric([status], count)
        yield deployments
