"""Metrics: converts the state of a planner to Prometheus metrics at each scrape."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from fleet.planner.decisions import DecisionReason, PlanConditionType
from fleet.planner.records import PlannerStatus, PlanState
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition

LEADS = GaugeDefinition("fleet_planner_leads", "Whether this planner leads", ("model",), "0 or 1")
POOLS: Mapping[str, GaugeDefinition] = {
    name: GaugeDefinition(f"fleet_planner_{name}_replicas", meaning, ("model", "pool"))
    for name, meaning in {
        "wanted": "Replicas that were wanted last, by pool",
        "ready": "Replicas that serve, by pool",
        "draining": "Replicas that drain, by pool",
    }.items()
}
"""Gauges of each pool, by the field of `fleet.planner.messages.PoolObservation` whose value they show."""

PLANNED = GaugeDefinition(
    "fleet_planner_planned_replicas", "Replicas that the planner would have now, by pool", ("model", "pool")
)
NUMBERS = GaugeDefinition(
    "fleet_planner_decision",
    "Numbers that led to the last decision, by name",
    ("model", "number"),
    "that of the number",
)
DEMAND = GaugeDefinition(
    "fleet_planner_demand", "Demand of the last window, by quantity", ("model", "of"), "that of the quantity"
)
OVERFLOW: Mapping[str, CounterDefinition] = {
    name: CounterDefinition(
        f"fleet_planner_overflow_{name}",
        f"Overflow to a hosted endpoint since this planner started: {name}",
        ("model",),
    )
    for name in ("requests", "dollars")
}
CONDITIONS = GaugeDefinition("fleet_planner_condition", "Whether a condition holds", ("model", "type"), "0 or 1")
ERRORS = GaugeDefinition(
    "fleet_planner_prediction_error",
    "Running error of the latencies that rehearsals predicted, by latency",
    ("model", "of"),
    "share of the longer one of the predicted and the measured time, 0 to 1",
)
DECISIONS = CounterDefinition("fleet_planner_decisions", "Decisions by reason", ("model", "reason"), "decisions")
RULE_FAILURES = CounterDefinition(
    "fleet_planner_rule_failures",
    "Rounds in which the rule raised an error and nothing was decided",
    ("model",),
    "rounds",
)
PLANS = CounterDefinition("fleet_planner_plans", "Plans by the state in which they ended", ("model", "state"), "plans")
METRICS: Sequence[MetricDefinition] = (
    *(LEADS, *POOLS.values(), PLANNED, NUMBERS, DEMAND, *OVERFLOW.values()),
    *(CONDITIONS, ERRORS, DECISIONS, RULE_FAILURES, PLANS),
)


class MeteredPlanner(Protocol):
    """Port to a planner: lists the attributes of `fleet.planner.loop.PlannerLoop` that the metrics read."""

    rule_failures: int
    ended: dict[PlanState, int]
    decided: dict[DecisionReason, int]

    def status(self) -> PlannerStatus: ...


class PlannerMetrics:
    """Converts the state of a planner to Prometheus metrics at each scrape.

    The caller has to register the object in a `CollectorRegistry`.
    """

    def __init__(self, planner: MeteredPlanner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        status = self._planner.status()
        model = status.model
        yield LEADS.samples({(model,): float(status.leads)})
        for name, definition in POOLS.items():
            yield definition.samples({(model, pool.name): getattr(pool, name) for pool in status.pools})
        yield PLANNED.samples({(model, pool): count for pool, count in status.replicas.items()})
        yield NUMBERS.samples({(model, name): value for name, value in status.numbers.items()})
        yield DEMAND.samples({(model, name): value for name, value in status.demand.items() if value is not None})
        for name, overflow in OVERFLOW.items():
            if name in status.overflow:
                yield overflow.samples({(model,): status.overflow[name]})
        present = {each.type for each in status.conditions}
        yield CONDITIONS.samples({(model, each): float(each in present) for each in PlanConditionType})
        yield ERRORS.samples({(model, latency): error for latency, error in status.errors.items()})
        yield DECISIONS.samples({(model, reason): count for reason, count in self._planner.decided.items()})
        yield RULE_FAILURES.samples({(model,): self._planner.rule_failures})
        yield PLANS.samples({(model, state): count for state, count in self._planner.ended.items()})
