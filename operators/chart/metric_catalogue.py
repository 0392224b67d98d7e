"""Metric catalogue: lists the definitions of all metrics of Fleet, by the process that exports them.

docs/metrics.md (`operators.chart.metrics_reference`) and the dashboards are generated from the catalogue.
"""

from collections.abc import Mapping, Sequence

from fleet.backends.external import workers as external_backends
from fleet.core import telemetry as requests
from fleet.frontend.metrics import demand, images, overflow, predictions, relay, router, tracing
from fleet.peers import redis_tenants
from fleet.planner.control import metrics as planner
from fleet.recording import access_records
from kvstore.metric_definitions import MetricDefinition
from kvstore.security import certificates
from kvstore.service import metrics as store
from kvstore.tracing import metrics as export
from operators import telemetry as operator
from operators.planner import metrics as cluster_planner
from workers import metrics as worker

Definitions = Sequence[MetricDefinition]

ROUTER: Definitions = (
    *(*requests.METRICS, *router.METRICS, *relay.METRICS, *external_backends.METRICS, *demand.METRICS),
    *(*predictions.METRICS, *overflow.METRICS, *redis_tenants.METRICS, *access_records.METRICS),
    *(*images.METRICS, *tracing.METRICS, *export.METRICS, *certificates.METRICS),
)
WORKER: Definitions = (*worker.METRICS, *export.METRICS, *certificates.METRICS)
STORE: Definitions = (*store.METRICS, *export.METRICS, *certificates.METRICS)
PLANNER: Definitions = (*planner.METRICS, *certificates.METRICS)
CLUSTER_PLANNER: Definitions = (*cluster_planner.METRICS, *certificates.METRICS)
OPERATOR: Definitions = (*operator.METRICS, *certificates.METRICS)

PROCESSES: Mapping[str, Definitions] = {
    "router": ROUTER,
    "worker": WORKER,
    "kvstore": STORE,
    "planner": PLANNER,
    "kube-planner": CLUSTER_PLANNER,
    "operator": OPERATOR,
}
"""The definitions of the metrics of each process, by the name that the process has in `fleet serve`."""


def by_name(definitions: Definitions) -> Mapping[str, MetricDefinition]:
    """Return the definitions by the name of their metric; names of counters have no `_total` here."""
    return {each.name: each for each in definitions}
