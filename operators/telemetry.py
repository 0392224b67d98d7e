"""Metrics of the operator; the planner's metrics are in `operators.planner.metrics`.

Each label has a fixed set of values, so that the number of time series does not grow with the deployments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import Metric

from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, HistogramDefinition, MetricDefinition

BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)

RECONCILES = CounterDefinition(
    "fleet_operator_reconciles", "Reconciles of one deployment, by outcome", ("outcome",), "reconciles"
)
WRITES = CounterDefinition("fleet_operator_writes", "Writes to the API server, by purpose", ("write",), "writes")
SECONDS = HistogramDefinition("fleet_operator_reconcile_seconds", "Duration of one reconcile", bounds=BUCKETS)
LEADS = GaugeDefinition("fleet_operator_leads", "Whether this operator leads", unit="0 or 1")
QUEUE = GaugeDefinition("fleet_operator_queue", "Deployments that wait for a reconcile", unit="deployments")
WATCH_RESTARTS = GaugeDefinition("fleet_operator_watch_restarts", "Restarts of lists and watches", unit="restarts")
OBJECTS = GaugeDefinition("fleet_operator_objects", "Objects in the caches, by kind", ("kind",), "objects")
DEPLOYMENTS = GaugeDefinition("fleet_operator_deployments", "DisaggDeployments, by Ready", ("ready",), "deployments")
METRICS: Sequence[MetricDefinition] = (
    *(RECONCILES, WRITES, SECONDS, LEADS, QUEUE, WATCH_RESTARTS, OBJECTS, DEPLOYMENTS),
)


class ReconcileOutcome(StrEnum):
    """Outcomes that one reconcile of a DisaggDeployment or a ServingRequest can have."""

    SETTLED = "settled"
    ACTED = "acted"
    REFUSED = "refused"
    """The API server refused one or more of the writes, or the operator has no control secret for the deployment."""

    FAILED = "failed"
    """A call of the API server failed, or another writer had changed an object, so the reconcile could not finish."""

    CRASHED = "crashed"
    """The reconcile ended with an unexpected error, which is a fault in the operator."""


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()
        self.registry = registry
        self._reconciles = RECONCILES.instrument(registry)
        self._writes = WRITES.instrument(registry)
        self._seconds = SECONDS.instrument(registry)
        for outcome in ReconcileOutcome:
            self._reconciles.labels(outcome)

    def reconciled(self, outcome: ReconcileOutcome, seconds: float) -> None:
        self._reconciles.labels(outcome).inc()
        self._seconds.observe(seconds)

    def wrote(self, write: str) -> None:
        self._writes.labels(write).inc()


class OperatorGauges:
    """Reads the operator's gauges at each scrape. The caller has to register it in a `CollectorRegistry`."""

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
        """Yield the metrics; prometheus_client calls this method at each scrape."""
        yield LEADS.value(float(self._leads()))
        yield QUEUE.value(self._waiting())
        yield WATCH_RESTARTS.value(self._restarts())
        yield OBJECTS.samples({(kind,): count for kind, count in self._objects().items()})
        yield DEPLOYMENTS.samples({(status,): count for status, count in self._ready().items()})
