"""Metrics of a cluster's planners: the metrics of `fleet.planner.control.metrics`, with labels for the deployment."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import structs
from prometheus_client.core import Metric

from fleet.planner.control import metrics as of_one_planner
from fleet.planner.control.metrics import PlannerMetrics
from kvstore.metric_definitions import GaugeDefinition, MetricDefinition
from operators.planner.deployment_planner import DeploymentPlanner

DEPLOYMENT_LABELS = ("deployment_namespace", "deployment")
PROCESS_LEADS = GaugeDefinition("fleet_planner_process_leads", "Whether this process applies plans", unit="0 or 1")
DEPLOYMENTS = GaugeDefinition("fleet_planner_deployments", "Deployments that are planned", unit="deployments")
METRICS: Sequence[MetricDefinition] = (
    PROCESS_LEADS,
    DEPLOYMENTS,
    *(structs.replace(each, labels=(*DEPLOYMENT_LABELS, *each.labels)) for each in of_one_planner.METRICS),
)


class ClusterPlannerMetrics:
    """Collects the metrics of all planners at each scrape. The caller has to register it in a `CollectorRegistry`."""

    def __init__(
        self, leads: Callable[[], bool], planners: Callable[[], Mapping[tuple[str, str], DeploymentPlanner]]
    ) -> None:
        self._leads = leads
        self._planners = planners

    def collect(self) -> Iterator[Metric]:
        planners = self._planners()
        yield PROCESS_LEADS.value(float(self._leads()))
        yield DEPLOYMENTS.value(float(len(planners)))
        merged: dict[str, Metric] = {}
        for (namespace, deployment), planner in sorted(planners.items()):
            labels = dict(zip(DEPLOYMENT_LABELS, (namespace, deployment), strict=True))
            for family in PlannerMetrics(planner.loop).collect():
                kept = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    kept.add_sample(sample.name, labels | sample.labels, sample.value)
        yield from merged.values()
