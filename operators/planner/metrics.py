"""Metrics of a cluster's planners: those of `fleet.planner.control.metrics`, with the namespace and the name of the deployment."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from fleet.planner.control.metrics import PlannerMetrics
from operators.planner.deployment_planner import DeploymentPlanner


class ClusterPlannerMetrics:
    """Collector for a `CollectorRegistry`."""

    def __init__(
        self, leads: Callable[[], bool], planners: Callable[[], Mapping[tuple[str, str], DeploymentPlanner]]
    ) -> None:
        self._leads = leads
        self._planners = planners

    def collect(self) -> Iterator[Metric]:
        planners = self._planners()
        yield GaugeMetricFamily(
            "fleet_planner_process_leads", "Whether this process applies plans", float(self._leads())
        )
        yield GaugeMetricFamily("fleet_planner_deployments", "Deployments that are planned", float(len(planners)))
        merged: dict[str, Metric] = {}
        for (namespace, deployment), planner in sorted(planners.items()):
            labels = {"deployment_namespace": namespace, "deployment": deployment}
            for family in PlannerMetrics(planner.loop).collect():
                kept = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    kept.add_sample(sample.name, labels | sample.labels, sample.value)
        yield from merged.values()
