"""Metrics of a planner, read on each scrape."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.planner.decisions import DecisionReason, PlanConditionType
from fleet.planner.records import PlannerStatus, PlanState


class MeteredPlanner(Protocol):
    """The attributes of `fleet.planner.loop.PlannerLoop` that the metrics read."""

    rule_failures: int
    ended: dict[PlanState, int]
    decided: dict[DecisionReason, int]

    def status(self) -> PlannerStatus: ...


class PlannerMetrics:
    """Converts the state of a planner to Prometheus metrics; registered in a `CollectorRegistry`."""

    def __init__(self, planner: MeteredPlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        status = self._planner.status()
        yield GaugeMetricFamily("fleet_planner_leads", "Whether this planner leads", float(status.leads))
        pools = {
            "wanted": "Replicas that were wanted last, by pool",
            "ready": "Replicas that serve, by pool",
            "draining": "Replicas that drain, by pool",
        }
        for name, meaning in pools.items():
            family = GaugeMetricFamily(f"fleet_planner_{name}_replicas", meaning, labels=["pool"])
            for pool in status.pools:
                family.add_metric([pool.name], getattr(pool, name))
            yield family
        planned = GaugeMetricFamily(
            "fleet_planner_planned_replicas", "Replicas that the planner would have now, by pool", labels=["pool"]
        )
        for pool_name, count in status.replicas.items():
            planned.add_metric([pool_name], count)
        yield planned
        numbers = GaugeMetricFamily(
            "fleet_planner_decision", "Numbers that led to the last decision, by name", labels=["number"]
        )
        for name, value in status.numbers.items():
            numbers.add_metric([name], value)
        yield numbers
        demand = GaugeMetricFamily("fleet_planner_demand", "Demand of the last window, by quantity", labels=["of"])
        for name, measured in status.demand.items():
            if measured is not None:
                demand.add_metric([name], measured)
        yield demand
        for name, amount in status.overflow.items():
            yield CounterMetricFamily(
                f"fleet_planner_overflow_{name}",
                f"Overflow to a hosted endpoint since this planner started: {name}",
                amount,
            )
        present = {each.type for each in status.conditions}
        conditions = GaugeMetricFamily("fleet_planner_condition", "Whether a condition holds", labels=["type"])
        for condition in PlanConditionType:
            conditions.add_metric([condition], float(condition in present))
        yield conditions
        errors = GaugeMetricFamily(
            "fleet_planner_prediction_error",
            "Running relative error of the latencies that rehearsals predicted, by latency",
            labels=["of"],
        )
        for latency, error in status.errors.items():
            errors.add_metric([latency], error)
        yield errors
        decided = CounterMetricFamily("fleet_planner_decisions", "Decisions by reason", labels=["reason"])
        for reason, count in self._planner.decided.items():
            decided.add_metric([reason], count)
        yield decided
        yield CounterMetricFamily(
            "fleet_planner_rule_failures",
            "Rounds in which the rule raised an error and nothing was decided",
            self._planner.rule_failures,
        )
        plans = CounterMetricFamily("fleet_planner_plans", "Plans by the state in which they ended", labels=["state"])
        for state, count in self._planner.ended.items():
            plans.add_metric([state], count)
        yield plans
