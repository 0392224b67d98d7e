"""Decisions of a planner: what it is asked to keep, which pools it may change, and what it decided for which reason.

Rules:

1. A rule (`ScalingRule`) is a pure function of what it was told: demand windows and observations of pools with their instants. The same
   rule runs in production, in the simulator and in the study of baselines.
2. A decision names every number that led to it, so that a person can follow it.
3. A condition says why a goal, a budget or a number cannot be kept. It names the field or the source.
"""

from enum import StrEnum
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from fleet.core.clock import Nanos
from fleet.core.roles import Role
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import MOST_REPLICAS, Observation, PoolName, Replicas

Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class PlanGoals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency goals of a model. Each one holds for a share of all requests."""

    ttft_seconds: Annotated[float, Meta(gt=0, le=1e6)]
    tpot_seconds: Annotated[float, Meta(gt=0, le=1e6)]
    percentile: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """Share of requests that must keep each goal."""


class PlannedPool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool that a planner may size."""

    name: PoolName
    role: Role
    gpu: str = ""
    """Short name of its GPU type; empty: no GPU."""

    gpus: int = 1
    """GPUs of one replica."""

    least: Replicas = 0
    most: Replicas = MOST_REPLICAS
    dollars_per_hour: float = 0.0
    """Price of one GPU, or of one replica without a GPU."""

    start_seconds: Seconds = 120.0
    """Time from asking for a replica until it serves; the observed time replaces it."""

    drain_seconds: Seconds = 60.0
    """Time from telling a replica to end until it has ended."""

    @property
    def replica_gpus(self) -> int:
        """Return the GPUs of one replica; 0 if it needs none."""
        return self.gpus if self.gpu else 0

    @property
    def replica_dollars(self) -> float:
        """Return the dollars per hour of one replica."""
        return self.dollars_per_hour * (self.gpus if self.gpu else 1)


class PlanBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that hold at every instant, including replicas that start or drain. None: there is no limit."""

    gpus: Annotated[int, Meta(ge=0)] | None = None
    dollars_per_hour: Annotated[float, Meta(ge=0)] | None = None
    least_ratio: Annotated[float, Meta(ge=0)] | None = None
    """Fewest prefill replicas for one decode replica."""

    most_ratio: Annotated[float, Meta(ge=0)] | None = None


class PlanConditionType(StrEnum):
    """Why a goal, a budget or a number is not kept."""

    NO_DEMAND_SIGNAL = "NoDemandSignal"
    GOAL_OUT_OF_REACH = "GoalOutOfReach"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    PINNED = "Pinned"
    CONNECTOR_FAILED = "ConnectorFailed"
    MODEL_DRIFT = "ModelDrift"
    RULE_FAILED = "RuleFailed"


class PlanCondition(Struct, frozen=True, kw_only=True):
    type: PlanConditionType
    field: str
    """Setting, pool or source that the condition is about."""

    message: str


class DecisionReason(StrEnum):
    """Why replicas change, or do not."""

    WITHIN_BAND = "within_band"
    LOAD_UP = "load_up"
    FORECAST_UP = "forecast_up"
    LOAD_DOWN = "load_down"
    RATIO = "ratio"
    CHEAPER_MIX = "cheaper_mix"
    COOLING_DOWN = "cooling_down"
    IN_FLIGHT = "in_flight"
    NO_SIGNAL = "no_signal"
    BOUNDS = "bounds"


class PlanDecision(Struct, frozen=True, kw_only=True):
    """Decision of a rule at one instant."""

    at: Nanos
    replicas: dict[PoolName, int]
    """Wanted replicas of every pool of the rule, changed or not. Pinned pools keep the number that they have."""

    reason: DecisionReason
    message: str = ""
    """One sentence for a person, with the numbers that led to the decision."""

    numbers: dict[str, float] = {}
    """The numbers that led to the decision, by name."""

    conditions: tuple[PlanCondition, ...] = ()


class ScalingRule(Protocol):
    """A rule that sizes pools: Fleet's planner, or a baseline that it is compared with."""

    interval: Nanos
    """Time between two decisions."""

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        """Return the wanted replicas. `demand` covers the time since the last decision; `seen` is the present state of the pools."""
        ...
