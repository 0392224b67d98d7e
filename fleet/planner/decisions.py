"""Decisions: defines the input of a planner (goals, pools, limits) and its output (numbers of replicas with reasons).

Rules:

1. A rule (`ScalingRule`) decides only from the demand windows and the observations of pools that it has received, each
   with its instant. So the same rule runs in production, in the simulator and in the study that compares it with other rules.
2. A decision names the main numbers that led to it, so that a person can follow it.
3. A condition states a problem. Examples are a goal or a limit that cannot be kept, a pool that somebody has pinned, and
   wrong input or predictions. A condition names what the problem is about: a setting, a pool, a demand source, a field of the
   demand window, a latency, or the clock.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from math import ceil, isfinite
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from fleet.core.clock import Nanos
from fleet.core.roles import Role
from fleet.hardware.gpus import gpus
from fleet.hardware.power import loaded_watts
from fleet.planner.demand import DemandWindow
from fleet.planner.messages import MOST_REPLICAS, Observation, PoolName, Replicas, shortened

Seconds = Annotated[float, Meta(ge=0, le=1e6)]

Minimised = Literal["dollars", "energy"]
"""The cost that a planner keeps low: money or energy."""

MOST_NUMBER = 1e30
"""Highest number that a demand window may contain. No router counts so far, and rules can compute with smaller numbers without an
overflow."""

DOLLARS_ROUNDING = 1e-6
"""Tolerance in dollars for the rounding of sums of prices: in floating point, 2.49 + 2.49 + 2.49 is more than 7.47."""

PRICE_SHARE = 1e-3
"""Largest share by which the price of a pool raises its cost if energy is minimised. So the cheaper one of two pools with the same
GPU type is chosen. The share is far below the error of the power, and far above the gap at which the solver stops."""

_ROUNDING = 1e-9  # tolerance for the rounding of a ratio times a number of replicas

COUNTED = (
    *("arrivals", "refused", "abandoned", "prompt_tokens", "cached_tokens", "prompt_squares", "finished"),
    *("answer_tokens", "answer_squares", "queued", "oldest_seconds", "overflowed", "overflow_dollars"),
)
"""Names of the fields of a demand window that are single numbers; each must be between 0 and `MOST_NUMBER`."""


class PlanGoals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States the latency goals of a model; each goal has to hold for a share of all requests."""

    ttft_seconds: Annotated[float, Meta(gt=0, le=1e6)]
    """Maximum time to first token."""

    tpot_seconds: Annotated[float, Meta(gt=0, le=1e6)]
    """Maximum TPOT: the mean time per output token of an answer, after the first token."""

    percentile: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """Share of requests that must keep each goal."""


class PlannedPool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a pool that a planner may size: its role, its GPUs, its bounds and its price."""

    name: PoolName
    """Name of the pool."""

    role: Role
    """The phases of a request that the workers of the pool run: prefill, decode, or both."""

    gpu: str = ""
    """Short name of the GPU type of the workers; empty: the workers have no GPU."""

    gpus: int = 1
    """Number of GPUs of one replica. If the engine of the pool has the kind `gpu`, this is its tp x pp x dp."""

    least: Replicas = 0
    """Minimum number of replicas."""

    most: Replicas = MOST_REPLICAS
    """Maximum number of replicas."""

    dollars_per_hour: float = 0.0
    """Price of one GPU, or of one replica without a GPU. If the price of a GPU is 0, a planner with a price book takes
    the price from there."""

    watts: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Power in watts of one GPU under load, or of one replica without a GPU; 0: the estimate for the GPU type
    (`fleet.hardware.power`, boards alone, with an error of 30 %)."""

    start_seconds: Seconds = 120.0
    """Time from the request for a replica until it serves. The rule `fleet` takes this value as its first estimate;
    each observed start then moves the estimate halfway to the observed time."""

    drain_seconds: Seconds = 60.0
    """Expected time from the order to end a replica until it has drained and ended."""

    @property
    def replica_gpus(self) -> int:
        """Return the number of GPUs of one replica; 0 if `gpu` is empty."""
        return self.gpus if self.gpu else 0

    @property
    def replica_dollars(self) -> float:
        """Return the dollars per hour of one replica."""
        return self.dollars_per_hour * (self.gpus if self.gpu else 1)

    @property
    def replica_watts(self) -> float:
        """Return the power of one replica under load, in watts; 0 if it is unknown."""
        watts = self.watts
        if not watts and (gpu := gpus().get(self.gpu)) is not None:
            watts = loaded_watts(gpu, self.role)
        return watts * (self.gpus if self.gpu else 1)

    def cost(self, minimised: "Minimised") -> float:
        """Return what a planner minimises of one replica: its dollars per hour or its watts; 0 if this is unknown.

        Watts are raised by up to the share `PRICE_SHARE`, the more the higher the price is.
        """
        dollars = self.replica_dollars
        if minimised == "dollars":
            return dollars
        return self.replica_watts * (1.0 + PRICE_SHARE * dollars / (1.0 + dollars))


class PlanBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States the limits for all pools together. The limits also count replicas that start. None means no limit."""

    gpus: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of GPUs, including those of replicas that drain."""

    dollars_per_hour: Annotated[float, Meta(ge=0)] | None = None
    """Maximum price of all replicas together, including those that drain, in dollars per hour."""

    least_ratio: Annotated[float, Meta(ge=0)] | None = None
    """Minimum number of prefill replicas for each decode replica; it may be a fraction. Only the rule `fleet` takes it."""

    most_ratio: Annotated[float, Meta(ge=0)] | None = None
    """Maximum number of prefill replicas for each decode replica; it may be a fraction. Only the rule `fleet` takes it."""


class PlanConditionType(StrEnum):
    """Types of conditions: the problems that a decision or a planner can report."""

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
    """Name of the setting, the pool, the demand source or the latency that the condition is about."""

    message: str
    """Description of the problem. It is shortened (`shortened`), because it may quote another program."""

    def __post_init__(self) -> None:
        force_setattr(self, "message", shortened(self.message))


class DecisionReason(StrEnum):
    """Reasons why a decision changes the numbers of replicas, or leaves them as they are."""

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
    """Holds the decision of a rule at one instant: the number of replicas of each pool, and the reason."""

    at: Nanos
    replicas: dict[PoolName, int]
    """Number of replicas of each pool that the rule sizes, also if the number is unchanged. A pool that the observation
    lacks is missing here too."""

    reason: DecisionReason
    message: str = ""
    """One sentence that explains the decision to a person, with the numbers that led to it."""

    numbers: dict[str, float] = {}
    """The numbers that led to the decision, by name."""

    conditions: tuple[PlanCondition, ...] = ()


class ScalingRule(Protocol):
    """Port of a rule that decides the sizes of pools: a rule of Fleet, or one of another system with which they are compared."""

    interval: Nanos
    """Time between two decisions."""

    def decide(self, now: Nanos, demand: DemandWindow, seen: Observation) -> PlanDecision:
        """Return the decision at the instant `now`.

        `demand` is the latest demand window, which begins at the end of the previous one; `seen` is the present state of
        the pools.
        """
        ...


def no_signal(field: str, message: str) -> PlanCondition:
    """Return a condition of type `NO_DEMAND_SIGNAL` about a field or source that is not reliable enough to decide."""
    return PlanCondition(type=PlanConditionType.NO_DEMAND_SIGNAL, field=field, message=message)


def demand_doubts(demand: DemandWindow) -> Iterator[PlanCondition]:
    """Yield a condition for each reason why a demand window is not reliable.

    The reasons are stale sources, impossible numbers, and an end of the window before its beginning.
    """
    for source in demand.stale:
        yield no_signal(source.partition(": ")[0], f"no demand from {source}")
    for field, value in _numbers(demand):
        if not 0 <= value <= MOST_NUMBER:
            yield no_signal(
                f"demand.{field}", f"demand.{field}: {str(value)[:40]} is not a number from 0 to {MOST_NUMBER:.0e}"
            )
    if demand.ended < demand.began:
        yield no_signal("demand.ended", "demand.ended: the window ends before it begins")


def _numbers(demand: DemandWindow) -> Iterator[tuple[str, float]]:
    for name in COUNTED:
        yield name, getattr(demand, name)
    for name in ("ttft", "tpot", "queue_wait"):
        yield name, min(getattr(demand, name), default=0)
    for each in demand.workers:
        for name in ("running", "waiting", "kv_used", "speed", "start_seconds"):
            yield f"workers.{each.worker}.{name}", getattr(each, name)


def pool_doubts(names: Iterable[PoolName], seen: Observation) -> Iterator[PlanCondition]:
    """Yield a condition for each pool in `names` that is missing in the observation, or has negative numbers there."""
    for name in names:
        pool = seen.pool(name)
        if pool is None or min(pool.wanted, pool.ready, pool.draining) < 0:
            said = "is not reported" if pool is None else "has a negative number of replicas"
            yield PlanCondition(
                type=PlanConditionType.CONNECTOR_FAILED, field=f"pools.{name}", message=f"pool {name} {said}"
            )


def model_doubts(demand: DemandWindow, seen: Observation) -> Iterator[PlanCondition]:
    """Yield a condition if no router serves the model although pools have ready replicas.

    The name of the model in the settings is then wrong, or the source names the routers of another cluster, or the
    replicas have not registered at a router yet. In each case, no demand does not mean that no replicas are needed.
    Without ready replicas, no router can serve the model, so this is no doubt.
    """
    ready = [f"{each.name} {each.ready}" for each in seen.pools if each.ready > 0]
    if demand.unserved and ready:
        yield no_signal("model", f"model: {demand.unserved}, although replicas are ready: {', '.join(ready)}")


def check_limits(pools: Sequence[PlannedPool], budget: PlanBudget) -> None:
    """Check that each pool has its own name and valid numbers, and that the bounds and the budget are compatible.

    Raises:
        ValueError: A check failed; the message names the field.
    """
    names = [each.name for each in pools]
    for each in pools:
        if names.count(each.name) > 1:
            raise ValueError(f"pools: {each.name} is named twice")
        if each.least > each.most:
            raise ValueError(f"pools.{each.name}.least: {each.least} is above most, which is {each.most}")
        if each.gpus < 1 or not isfinite(each.dollars_per_hour) or each.dollars_per_hour < 0:
            raise ValueError(f"pools.{each.name}: gpus must be at least 1 and dollars_per_hour a number of at least 0")
        if not isfinite(each.watts) or each.watts < 0:
            raise ValueError(f"pools.{each.name}.watts: must be a number of at least 0")
    if budget.least_ratio is not None and budget.most_ratio is not None and budget.least_ratio > budget.most_ratio:
        raise ValueError(f"budget.least_ratio: {budget.least_ratio} is above most_ratio, which is {budget.most_ratio}")
    if cause := impossible_ratio(pools, budget):
        field = "most_ratio" if budget.least_ratio is None else "least_ratio"
        raise ValueError(f"budget.{field}: no numbers within `least` and `most` of the pools keep it: {cause}")
    for field, limit, floor in (
        ("gpus", budget.gpus, sum(each.least * each.replica_gpus for each in pools)),
        ("dollars_per_hour", budget.dollars_per_hour, sum(each.least * each.replica_dollars for each in pools)),
    ):
        if limit is not None and floor > limit + DOLLARS_ROUNDING:
            raise ValueError(f"budget.{field}: {limit} is below what the floors of the pools take, which is {floor}")


def impossible_ratio(pools: Sequence[PlannedPool], budget: PlanBudget) -> str:
    """Return why no numbers within the bounds of the pools keep the bounds of the ratio of prefill to decode; empty if some do."""
    if _ratio_can_hold(pools, budget):
        return ""
    return (
        f"prefill has {_range(pools, Role.PREFILL)} replicas, decode {_range(pools, Role.DECODE)},"
        f" and the ratio must be {_ratio_bounds(budget)}"
    )


def check_energy(pools: Sequence[PlannedPool]) -> None:
    """Check that the power of each pool is known, so that the energy of pools can be compared.

    Raises:
        ValueError: A pool has neither a GPU type nor a power; the message names the field.
    """
    for index, each in enumerate(pools):
        if not each.replica_watts:
            raise ValueError(
                f'pools[{index}].watts: is needed, because the rule minimises "energy" and {each.name} has no known `gpu`'
            )


def check_gpu_limit(pools: Sequence[PlannedPool], budget: PlanBudget) -> None:
    """Check that a limit on GPUs, if there is one, limits some pool.

    Raises:
        ValueError: No pool has GPUs.
    """
    if budget.gpus is not None and not any(each.gpu for each in pools):
        raise ValueError(
            "budget.gpus: would limit nothing, because no pool has a `gpu`; name the GPU type of the pools"
        )


def _ratio_can_hold(pools: Sequence[PlannedPool], budget: PlanBudget) -> bool:
    """Return whether some numbers within the bounds of the pools keep the bounds of the ratio of prefill to decode.

    If no pool serves both phases, only numbers with a replica for each phase count, unless the bounds exclude them.
    """
    if budget.least_ratio is None and budget.most_ratio is None:
        return True
    first = 0 if any(each.role is Role.BOTH for each in pools) else 1
    (least, most), (fewest, highest) = _bounds(pools, Role.PREFILL), _bounds(pools, Role.DECODE)
    least, fewest = max(least, min(first, most)), max(fewest, min(first, highest))
    for decode in range(fewest, highest + 1):
        low = float(least) if budget.least_ratio is None else max(least, budget.least_ratio * decode - _ROUNDING)
        high = float(most) if budget.most_ratio is None else min(most, budget.most_ratio * decode + _ROUNDING)
        if low <= high and ceil(low) <= high:
            return True
    return False


def _bounds(pools: Sequence[PlannedPool], role: Role) -> tuple[int, int]:
    """Return the minimum and the maximum number of replicas of all pools with a role together."""
    alike = [each for each in pools if each.role is role]
    return sum(each.least for each in alike), sum(each.most for each in alike)


def _range(pools: Sequence[PlannedPool], role: Role) -> str:
    return " to ".join(map(str, _bounds(pools, role)))


def _ratio_bounds(budget: PlanBudget) -> str:
    least = [] if budget.least_ratio is None else [f"at least {budget.least_ratio:g}"]
    most = [] if budget.most_ratio is None else [f"at most {budget.most_ratio:g}"]
    return " and ".join((*least, *most))


def check_roles(pools: Sequence[PlannedPool]) -> None:
    """Check that some pools serve prefill and some serve decode, as a rule that sizes all pools together needs.

    Raises:
        ValueError: No pool serves one of the phases; the message names the field.
    """
    roles = {each.role for each in pools}
    if Role.BOTH not in roles and roles != {Role.PREFILL, Role.DECODE}:
        raise ValueError("pools: there must be pools for prefill and for decode, or one for both")
