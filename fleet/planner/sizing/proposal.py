"""Proposal of pools: finds the cheapest pools, in money or energy, of several GPU types that serve a load within its goals. Pure.

Rules:

1. For each GPU type and each role, there is one possible pool for each tensor parallelism with which a node can hold
   the model. The solver chooses among all these pools.
2. The KV of a prompt is sent from a prefill node to a decode node. The time of this transfer is computed for the
   network of the GPU type of the decode pool, and counts as part of the TPOT.
3. If no pool can keep a goal, a condition names the goal and the best value that can be reached. If the limits do not
   allow the whole rate, a condition names the rate that they allow.
"""

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from fleet.core.roles import Role
from fleet.hardware.gpus import Gpu
from fleet.hardware.known_models import SizedModel
from fleet.hardware.latency.coefficients import estimate
from fleet.hardware.latency.open_loop import EngineReplica
from fleet.hardware.latency.prediction import BUDGET_TOKENS, transfer_seconds
from fleet.hardware.sharding import ShardedModel
from fleet.hardware.sizing import MOST_RUNNING, ONE_CONTEXT, node_shardings
from fleet.planner.decisions import Minimised, PlanBudget, PlanCondition, PlanConditionType, PlanGoals, PlannedPool
from fleet.planner.messages import MOST_REPLICAS, PoolName
from fleet.planner.sizing.capacity import OfferedLoad, PoolEngine, StepCapacity
from fleet.planner.sizing.corrected import CorrectedCapacity
from fleet.planner.sizing.prices import MILLION, SECONDS_PER_HOUR
from fleet.planner.sizing.solver import Candidate, solve

LONG_PROMPT = 1000
"""Transfer times are computed for a prompt of one token and for a prompt of this number of tokens. The difference gives
the time for each further token."""

LEAST_RATE = 1e-3
"""The smallest rate for which the solver is asked, in requests per second. Its tolerances are absolute, about 1e-6, so
it would find that no replica is needed for much smaller rates."""


class PricedGpu(Struct, frozen=True, kw_only=True):
    """Names a GPU type that the proposal may use, with its price."""

    gpu: Gpu
    dollars_per_hour: float


class ProposedPool(Struct, frozen=True, kw_only=True):
    """Describes one proposed pool: its GPUs, its number of replicas, its price and its rate."""

    role: Role
    gpu: str
    tp: int
    """Tensor parallelism: number of GPUs of one replica."""

    replicas: int
    gpus: int
    dollars_per_hour: float
    watts: float
    """Power of all GPUs of the pool under load (`fleet.hardware.power`): boards alone, with an error of 30 %."""

    rate: float
    """Requests per second that the pool can serve within the goals."""


class PoolProposal(Struct, frozen=True, kw_only=True):
    """Holds the proposed pools for a load. If there are no pools, the conditions state the reason."""

    pools: tuple[ProposedPool, ...]
    gpus: int
    dollars_per_hour: float
    dollars_per_million_tokens: float
    """Dollars for a million prompt and answer tokens together, at the rate `rate`."""

    dollars_per_million_answer_tokens: float
    watts: float
    """Power of all GPUs under load, with the error of `ProposedPool.watts`."""

    joules_per_token: float
    """Energy for each prompt or answer token, at the rate `rate`. It is computed from `watts`, so it is too high if `rate` is much
    below the rate that the pools can serve."""

    joules_per_answer_token: float
    ttft_seconds: float
    """Predicted TTFT in seconds at the percentile of the goals, or 0 if there are no pools."""

    tpot_seconds: float
    rate: float
    """Requests per second that the pools serve within the goals: the wanted rate, or less if the limits do not allow
    it."""

    conditions: tuple[PlanCondition, ...] = ()


def propose_pools(
    sized: SizedModel,
    gpus: Sequence[PricedGpu],
    load: OfferedLoad,
    rate: float,
    goals: PlanGoals,
    budget: PlanBudget,
    *,
    headroom: float,
    backend: str = "vllm",
    minimise: Minimised = "dollars",
) -> PoolProposal:
    """Return the pools that serve `rate` requests per second within the goals, at the lowest price or with the lowest power.

    If the budget does not allow this rate, the pools serve as much of it as the budget allows. If no pools are possible, return none,
    with the reason in the conditions.
    """
    tokens = ceil(load.shape.prompt_tokens + load.shape.answer_tokens)
    if sized.context and tokens > sized.context:
        return _nothing(
            "model", f"a request of {tokens} tokens is longer than the context of the model, {sized.context}"
        )
    pools, engines = [], {}
    for priced in gpus:
        for placement in node_shardings(sized, priced.gpu, priced.gpu.gpus_per_node, ceil(tokens / ONE_CONTEXT)):
            engine = pool_engine(placement, backend)
            for role in (Role.BOTH, Role.PREFILL, Role.DECODE):
                pool = _pool(role, placement, priced.dollars_per_hour)
                pools.append(pool)
                engines[pool.name] = engine
    if not pools:
        return _nothing(
            "gpus",
            f"no node of {', '.join(each.gpu.id for each in gpus)} holds the model and a request of {tokens} tokens",
        )
    model = StepCapacity(engines, headroom)
    corrected = CorrectedCapacity(model, goals, pools)
    if conditions := tuple(corrected.out_of_reach(load)):
        return _empty(conditions)
    candidates = [Candidate(pool=each, least=0, most=MOST_REPLICAS, cost=each.cost(minimise)) for each in pools]
    sized_for = max(rate, LEAST_RATE)
    mix = solve(candidates, sized_for, lambda pool, count: corrected.highest_rate(pool, load, count), budget)
    if mix is None or mix.served <= 0.0:
        return _empty((_exhausted("the limits do not allow for a single replica of each role"),))
    used = {pool: count for pool, count in zip(pools, mix.replicas, strict=True) if count}
    served = min(mix.served, rate)
    ttft, tpot = corrected.predicted(load, served, used)
    shape, per_hour = load.shape, served * SECONDS_PER_HOUR / MILLION
    watts = sum(pool.replica_watts * count for pool, count in used.items())
    return PoolProposal(
        pools=tuple(_proposed(pool, count, corrected.highest_rate(pool, load, count)) for pool, count in used.items()),
        gpus=sum(pool.gpus * count for pool, count in used.items()),
        dollars_per_hour=mix.dollars,
        dollars_per_million_tokens=mix.dollars / (per_hour * (shape.prompt_tokens + shape.answer_tokens)),
        dollars_per_million_answer_tokens=mix.dollars / (per_hour * shape.answer_tokens),
        watts=watts,
        joules_per_token=watts / (served * (shape.prompt_tokens + shape.answer_tokens)),
        joules_per_answer_token=watts / (served * shape.answer_tokens),
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        rate=served,
        conditions=()
        if served >= rate * (1.0 - 1e-6)
        else (_exhausted(f"{rate:g} requests a second are asked for, and the limits allow for {served:.4g}"),),
    )


def pool_engine(placement: ShardedModel, backend: str = "vllm") -> PoolEngine:
    """Return the engine of a sharded model, with a step model that is estimated from measurements of GPUs."""
    estimated = estimate(placement, backend)
    first = transfer_seconds(placement, placement, 1)
    return PoolEngine(
        engine=EngineReplica(
            step=estimated.step,
            client=estimated.client,
            capacity_tokens=placement.kv_capacity_tokens(),
            most_running=MOST_RUNNING,
            budget_tokens=BUDGET_TOKENS,
        ),
        transfer_base=first,
        transfer_token=(transfer_seconds(placement, placement, LONG_PROMPT) - first) / LONG_PROMPT,
    )


def _pool(role: Role, placement: ShardedModel, dollars: float) -> PlannedPool:
    gpus = placement.parallelism.gpus
    name = PoolName(f"{role}-{placement.gpu.id}-tp{gpus}")
    return PlannedPool(name=name, role=role, gpu=placement.gpu.id, gpus=gpus, dollars_per_hour=dollars)


def _proposed(pool: PlannedPool, replicas: int, rate: float) -> ProposedPool:
    return ProposedPool(
        role=pool.role,
        gpu=pool.gpu,
        tp=pool.gpus,
        replicas=replicas,
        gpus=replicas * pool.gpus,
        dollars_per_hour=replicas * pool.replica_dollars,
        watts=replicas * pool.replica_watts,
        rate=rate,
    )


def _exhausted(message: str) -> PlanCondition:
    return PlanCondition(type=PlanConditionType.BUDGET_EXHAUSTED, field="budget", message=f"budget: {message}")


def _nothing(field: str, message: str) -> PoolProposal:
    return _empty(
        (PlanCondition(type=PlanConditionType.GOAL_OUT_OF_REACH, field=field, message=f"{field}: {message}"),)
    )


def _empty(conditions: tuple[PlanCondition, ...]) -> PoolProposal:
    return PoolProposal(
        pools=(),
        gpus=0,
        dollars_per_hour=0.0,
        dollars_per_million_tokens=0.0,
        dollars_per_million_answer_tokens=0.0,
        watts=0.0,
        joules_per_token=0.0,
        joules_per_answer_token=0.0,
        ttft_seconds=0.0,
        tpot_seconds=0.0,
        rate=0.0,
        conditions=conditions,
    )
