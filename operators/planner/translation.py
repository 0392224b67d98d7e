"""Translation: converts a ServingPlan and its DisaggDeployment to the settings of a planner. Pure.

Rules:

1. All worker roles become pools of the planner, because prefill and decode are sized together. For roles that are not
   in scaling mode Planner, the connector reports that the planner must not change them (pinned).
2. If two limits apply, the stricter limit counts. This is so for the bounds of replicas in the plan and in the role's
   `scaling`, and for the plan's GPU budget and the deployment's `balance.gpuBudget`.
3. If a field makes it impossible to carry out a plan, the message names the field. It contains no text from the user's
   objects, except names of roles.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from fleet.config import parse_value
from fleet.core.clock import MILLISECOND, SECOND
from fleet.core.ids import ModelName
from fleet.core.roles import Role
from fleet.hardware.gpus import gpus
from fleet.hardware.known_models import model_by_repository
from fleet.planner.decisions import PlanBudget, PlanGoals, PlannedPool, impossible_ratio
from fleet.planner.messages import PoolName
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.settings import (
    FleetRuleSettings,
    GpuEngineSettings,
    KubernetesTarget,
    LinearEngineSettings,
    LoadRuleSettings,
    PlannerMode,
    PlannerSettings,
    RouterDemandSettings,
)
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    EngineKind,
    RatioBounds,
    RoleSpec,
    RoleType,
    ScalingMode,
)
from operators.api.serving_plan import PlanMinimum, PlanMode, RoleBounds, ServingPlanSpec
from operators.manifests.names import CONTROL, DesiredDeployment, host_of, router_service
from operators.manifests.objects import mapping
from operators.planner.settings import KubePlannerSettings

ROLES = {RoleType.PREFILL: Role.PREFILL, RoleType.DECODE: Role.DECODE, RoleType.AGGREGATED: Role.BOTH}
MODES = {PlanMode.OFF: PlannerMode.OFF, PlanMode.SHADOW: PlannerMode.SHADOW, PlanMode.ACTIVE: PlannerMode.ACTIVE}
LATENCY = "simulated.latency."
SIMULATED = {
    "simulated.speedup": "speedup",
    "simulated.max_batched_tokens": "step_tokens",
    "simulated.bytes_per_token": "bytes_per_token",
    "max_running": "max_running",
}
"""Settings of a worker with the simulated engine, each with the corresponding field of `LinearEngineSettings`."""

KV_BLOCKS, BLOCK_TOKENS = 4096, 32
"""Defaults of `workers.settings`: the number of blocks in the simulated engine's cache, and the tokens of a block."""

SPECIFICATION_REFUSED = "SpecificationRefused"


class PlanNotObeyed(Exception):
    """A ServingPlan cannot be carried out until somebody changes something. The plan's status shows the message."""

    def __init__(self, reason: str, message: str, *, target_found: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.target_found = target_found


def planner_settings(
    plan: ServingPlanSpec, deployment: DesiredDeployment, settings: KubePlannerSettings
) -> PlannerSettings:
    """Return the settings of the planner of a deployment.

    Args:
        plan: The ServingPlan.
        deployment: The deployment that the plan names.
        settings: The settings of this process.

    Raises:
        PlanNotObeyed: The deployment is suspended, no role is to be planned, a needed field is missing, fields
            contradict each other, or a field names something unknown.
    """
    spec, workers = deployment.spec, deployment.workers
    if spec.suspend:
        raise PlanNotObeyed("Suspended", "the deployment is suspended, so all of its roles have no replica")
    if not any(role.scaling.mode is ScalingMode.PLANNER for role in workers):
        text = "no role of the deployment has scaling.mode Planner, so there is nothing to plan"
        raise PlanNotObeyed("NoPlannedRoles", text)
    bounds = {each.role: each for each in plan.roles}
    names = [role.name for role in workers]
    for index, each in enumerate(plan.roles):
        if each.role not in names:
            text = f"spec.roles[{index}].role: is no role of workers; there are {', '.join(names)}"
            raise PlanNotObeyed(SPECIFICATION_REFUSED, text)
    pools = tuple(_pool(role, bounds.get(role.name, RoleBounds(role=role.name))) for role in workers)
    budget = _budget(plan, spec)
    for role, pool in zip(workers, pools, strict=True):
        if budget.gpus is not None and role.gpus.per_replica and not pool.gpu:
            raise _unnamed_gpu(role, "a budget of GPUs counts them")
        if plan.minimise is PlanMinimum.ENERGY and not plan.requests_per_replica and not pool.replica_watts:
            raise _unknown_power(role)
    try:
        return _settings(plan, deployment, pools, budget, settings)
    except ValueError as error:
        raise PlanNotObeyed(SPECIFICATION_REFUSED, f"spec.{error}") from error


def _settings(
    plan: ServingPlanSpec,
    deployment: DesiredDeployment,
    pools: tuple[PlannedPool, ...],
    budget: PlanBudget,
    settings: KubePlannerSettings,
) -> PlannerSettings:
    """Return the settings of the planner for pools and a budget that were computed before.

    Raises:
        ValueError: Two fields contradict each other; the message names the field.
        PlanNotObeyed: The bounds of the roles exclude the deployment's ratio, or an engine's model, GPU type or option in a
            podTemplate is not known.
    """
    spec, goals, by_load = deployment.spec, plan.objective, plan.requests_per_replica > 0
    if by_load:  # the rule `load` keeps no ratio, but the operator does, when it carries out a plan
        budget = structs.replace(budget, least_ratio=None, most_ratio=None)
    if cause := impossible_ratio(pools, budget):  # in the planner's settings, the ratio is a field of the budget
        text = (
            f"balance.ratio of the deployment: no numbers of replicas within the bounds of the roles keep it: {cause}"
        )
        raise PlanNotObeyed(SPECIFICATION_REFUSED, text)
    return PlannerSettings(
        model=ModelName(spec.model.name),
        mode=MODES[plan.mode],
        goals=PlanGoals(
            ttft_seconds=goals.ttft_ms * MILLISECOND / SECOND,
            tpot_seconds=goals.tpot_ms * MILLISECOND / SECOND,
            percentile=goals.percentile / 100,
        ),
        budget=budget,
        pools=pools,
        engines={}
        if by_load
        else {pool.name: _engine(spec, role, pool.gpu) for role, pool in zip(deployment.workers, pools, strict=True)},
        rule=_load_rule(plan) if by_load else _fleet_rule(plan),
        source=RouterDemandSettings(addresses=(_control(deployment),), stale_seconds=settings.stale_seconds),
        target=KubernetesTarget(
            deployment=deployment.name, namespace=deployment.namespace, kubeconfig=settings.kubeconfig
        ),
        identity=settings.identity,
        rehearsal=settings.rehearsal,
        score_seconds=settings.score_seconds,
    )


def _pool(role: RoleSpec, bounds: RoleBounds) -> PlannedPool:
    scaling, gpu = role.scaling, _gpu(role, bounds)
    planned = scaling.mode is ScalingMode.PLANNER
    least, most = max(bounds.least, scaling.least), min(bounds.most, scaling.most)
    if not planned:  # the planner does not change this role, so the bounds of the plan do not apply
        least, most = 0, max(scaling.most, role.replicas)
    if least > most:
        text = f"spec.roles: {role.name} needs at least {least} replicas, and its bounds allow for {most}"
        raise PlanNotObeyed(SPECIFICATION_REFUSED, text)
    known = gpus().get(gpu)
    # A pool without a known GPU type counts the price and the power of a whole replica.
    units = 1 if gpu else max(1, role.gpus.per_replica)
    price = bounds.cents_per_hour / 100 * units
    if not price and known is not None and known.price is not None:
        price = known.price.dollars
    return PlannedPool(
        name=PoolName(role.name),
        role=ROLES[role.type],
        gpu=gpu,
        gpus=max(1, role.gpus.per_replica),
        least=least,
        most=most,
        dollars_per_hour=price,
        watts=float(bounds.watts * units),
        start_seconds=float(bounds.start_seconds),
        drain_seconds=float(role.drain.timeout_seconds),
    )


def _gpu(role: RoleSpec, bounds: RoleBounds) -> str:
    """Return the name of the role's GPU type in `gpus`; empty if the role has no GPU or the GPU type is unknown.

    Raises:
        PlanNotObeyed: The plan names a GPU type for the role that `gpus` does not contain.
    """
    if not role.gpus.per_replica:
        return ""
    known = gpus()
    if named := bounds.gpu.lower():
        if named not in known:
            text = f"spec.roles: gpu of {role.name} is not one of {', '.join(known)}"
            raise PlanNotObeyed(SPECIFICATION_REFUSED, text)
        return named
    parts = role.gpus.product.lower().replace("_", "-").split("-")
    return next((each for each in known if each in parts), "")


def _budget(plan: ServingPlanSpec, spec: DisaggDeploymentSpec) -> PlanBudget:
    limits = [each for each in (plan.budget.gpus, spec.balance.gpu_budget) if each]
    ratio, unbound = spec.balance.ratio, RatioBounds()
    cents = plan.budget.cents_per_hour
    return PlanBudget(
        gpus=min(limits) if limits else None,
        dollars_per_hour=cents / 100 if cents else None,
        least_ratio=None if ratio.least == unbound.least else _quotient(ratio.least),
        most_ratio=None if ratio.most == unbound.most else _quotient(ratio.most),
    )


def _quotient(ratio: str) -> float:
    prefill, _, decode = ratio.partition(":")
    return int(prefill) / int(decode)


def _engine(spec: DisaggDeploymentSpec, role: RoleSpec, gpu: str) -> LinearEngineSettings | GpuEngineSettings:
    if spec.engine is EngineKind.SIMULATED:
        return _simulated(role)
    repository = (spec.model.uri or spec.model.name).partition("@")[0]
    if model_by_repository(repository) is None:
        text = "spec.requestsPerReplica: must be above 0, because the model of the deployment is in no repository whose model is known"
        raise PlanNotObeyed(SPECIFICATION_REFUSED, text)
    if not gpu:
        raise _unnamed_gpu(role, "without requestsPerReplica, the model of its engine depends on it")
    degree = role.parallelism
    return GpuEngineSettings(model=repository, tp=degree.tensor, pp=degree.pipeline, dp=degree.data, ep=degree.expert)


def _simulated(role: RoleSpec) -> LinearEngineSettings:
    """Return the settings of a role's simulated engine: the defaults, changed by `--set` options in its podTemplate."""
    containers = mapping(role.pod_template.get("spec")).get("containers")
    mains = [each for each in map(mapping, _listed(containers)) if each.get("name") == "main"]
    given = [str(each) for main in mains for each in _listed(main.get("args"))]
    changes = dict(
        each.removeprefix("--set=").split("=", 1) for each in given if each.startswith("--set=") and each.count("=") > 1
    )
    found: dict[str, Any] = {"latency": {}}
    for path, text in changes.items():
        value = parse_value(text)
        if path.startswith(LATENCY):
            found["latency"][path.removeprefix(LATENCY)] = value
        elif path in SIMULATED:
            found[SIMULATED[path]] = value
    try:
        blocks, tokens = (
            msgspec.convert(parse_value(changes.get(path, "0")), int)
            for path in ("simulated.kv_blocks", "block_tokens")
        )
        if blocks or tokens:
            found["kv_tokens"] = (blocks or KV_BLOCKS) * (tokens or BLOCK_TOKENS)
        return msgspec.convert(found, LinearEngineSettings)
    except msgspec.ValidationError as error:
        text = f"the simulated engine of {role.name}: an option --set of its podTemplate is not understood"
        raise PlanNotObeyed(SPECIFICATION_REFUSED, text) from error


def _listed(value: object) -> list[Any]:
    """Return the list in a field of a podTemplate.

    The user may have written any value. If it is not a list, return an empty list.
    """
    return value if isinstance(value, list) else []


def _unnamed_gpu(role: RoleSpec, why: str) -> PlanNotObeyed:
    text = f"spec.roles: gpu of {role.name} is needed, because neither the plan nor gpus.product of the role names a known GPU; {why}"
    return PlanNotObeyed(SPECIFICATION_REFUSED, text)


def _unknown_power(role: RoleSpec) -> PlanNotObeyed:
    why = "the role has no GPUs"
    if role.gpus.per_replica:
        why = "neither the plan nor gpus.product of the role names a known GPU; set watts or gpu of the role"
    text = f"spec.roles: watts of {role.name} is needed for minimise: Energy, because {why}"
    return PlanNotObeyed(SPECIFICATION_REFUSED, text)


def _load_rule(plan: ServingPlanSpec) -> LoadRuleSettings:
    return LoadRuleSettings(
        requests_per_replica=float(plan.requests_per_replica),
        interval_seconds=_interval(plan),
        cool_down_seconds=float(plan.cool_down_seconds),
    )


def _fleet_rule(plan: ServingPlanSpec) -> FleetRuleSettings:
    settings = PlannerRuleSettings(
        interval_seconds=_interval(plan),
        cool_down_seconds=float(plan.cool_down_seconds),
        minimise="energy" if plan.minimise is PlanMinimum.ENERGY else "dollars",
    )
    return FleetRuleSettings(settings=settings)


def _interval(plan: ServingPlanSpec) -> float:
    return float(min(plan.interval_seconds, 3600))


def _control(deployment: DesiredDeployment) -> str:
    return f"{host_of(f'{router_service(deployment)}-control', deployment.namespace)}:{CONTROL}"


def planned_roles(deployment: DesiredDeployment) -> Mapping[str, ScalingMode]:
    """Return the scaling mode of each role of workers."""
    return {role.name: role.scaling.mode for role in deployment.workers}
