"""Proposals: computes the DisaggDeployment that fulfils a ServingRequest, or the reason why there is none.

Pure. `fleet.hardware.sizing` computes the numbers of replicas and GPUs.

Rules:

1. A proposal is complete: if it is applied without changes, its pods serve the described requests. Engine options for
   which a role has no field (the longest request, the batch size, the prompt tokens of a step) are arguments in the
   podTemplates of the proposal. The arguments of the request follow these arguments.
2. Each predicted latency is given together with its goal and the median error of such predictions. A text (`basis`)
   says on which measurements the predictions are based.
3. If no deployment keeps the goals, the reply names the goal that fails, the best possible value, and what would have to
   change. Messages contain only numbers and Fleet's own names. They repeat no text of the user, except the name of an
   unknown field of the model's config.
4. The sizes of `podTemplate` and `modelConfig` are limited. The status contains the podTemplate once for each role,
   besides the one in the specification, and etcd stores no object above 1.5 MiB.
"""

from collections.abc import Iterator
from math import ceil, floor
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath
from fleet.core.roles import Role as Work
from fleet.hardware.gpus import Gpu, gpus
from fleet.hardware.known_models import SizedModel, model_by_repository, model_from_config
from fleet.hardware.latency.coefficients import EstimateBasis, StepModelEstimate
from fleet.hardware.latency.open_loop import RequestShape
from fleet.hardware.latency.prediction import BUDGET_TOKENS
from fleet.hardware.sizing import (
    MOST_GPUS,
    MOST_RUNNING,
    Demand,
    GpuSupply,
    LatencyGoals,
    Shortfall,
    SizedPool,
    Sizing,
    SizingGoal,
    size,
)
from operators.api.disagg_deployment import (
    Balance,
    DisaggDeploymentSpec,
    Drain,
    KvTransfer,
    Parallelism,
    RoleSpec,
    RoleType,
    Rollout,
    Routing,
)
from operators.api.disagg_deployment import Gpus as RoleGpus
from operators.api.fields import GpuVendor, ServingObjective
from operators.api.serving_request import GoalName, ProposalFigure, ServingRequestSpec

VENDORS = {"nvidia": GpuVendor.NVIDIA, "amd": GpuVendor.AMD}
TYPES = {Work.BOTH: RoleType.AGGREGATED, Work.PREFILL: RoleType.PREFILL, Work.DECODE: RoleType.DECODE}
NAMES = {Work.BOTH: "workers", Work.PREFILL: "prefill", Work.DECODE: "decode"}
ROUTERS = 2
"""Number of routers in a proposal: two, so that requests are still served when one router or its node fails."""

UNKNOWN_CONTEXT = 2
"""If the model's config names no maximum length, engines accept requests of up to this many times the length in the
workload."""

ANSWERS = 2
"""The time limit of a drain is at least this multiple of the predicted duration of one answer, so that running requests
can end."""

MOST_REPLICAS = 10_000
"""The maximum number of replicas that `operators.api.disagg_deployment.RoleSpec` allows."""

LARGEST = 128 << 10
"""Maximum size in bytes of the fields `podTemplate` and `modelConfig` of a request, each as JSON. A ServingRequest object
whose proposal has two roles contains at most four texts of this size, and Kubernetes adds `managedFields` of twice their
size. So the object stays below 1.5 MiB."""

MINUTE = 60.0
RESTS_ON = {
    EstimateBasis.MODEL: "measurements of this model on these GPUs",
    EstimateBasis.GPU: "measurements of other models on these GPUs",
    EstimateBasis.ENGINE: "measurements on other GPUs",
}


class Proposal(Struct, frozen=True, kw_only=True):
    """Holds a proposed deployment that keeps the goals, with the predictions for it."""

    spec: DisaggDeploymentSpec
    reason: str
    message: str
    figures: tuple[ProposalFigure, ...]
    basis: str


class Infeasible(Struct, frozen=True, kw_only=True):
    """Explains why there is no proposal: no deployment keeps the goals, or the request cannot be used."""

    reason: str
    message: str
    figures: tuple[ProposalFigure, ...] = ()
    basis: str = ""


Reply = Proposal | Infeasible


def propose(asked: ServingRequestSpec) -> Reply:
    """Return the proposal for a request, or the reason why there is none."""
    if (asked.workload.requests_per_minute > 0) == (asked.workload.concurrency > 0):
        text = "spec.workload: one of requestsPerMinute and concurrency must be above 0"
        return Infeasible(reason="SpecificationRefused", message=text)
    if (wrong := _too_long(asked)) or (wrong := _misshapen(asked.pod_template)):
        return Infeasible(reason="SpecificationRefused", message=f"spec.{wrong}")
    known = gpus()
    gpu = known.get(asked.hardware.gpu.lower())
    if gpu is None:
        text = f"spec.hardware.gpu: is not one of {', '.join(known)}"
        return Infeasible(reason="GpuUnknown", message=text)
    try:
        sized = _model(asked)
    except ConfigurationRefused as error:
        return Infeasible(reason="ModelUnknown", message=f"spec.{error}")
    if sized is None:
        text = "spec.model: is in no repository whose model is known; give the content of its config.json as spec.modelConfig"
        return Infeasible(reason="ModelUnknown", message=text)
    supply = GpuSupply(gpu=gpu, gpus=asked.hardware.count, per_node=asked.hardware.per_node)
    found = size(sized, _demand(asked), _goals(asked.objective), supply)
    if isinstance(found, Shortfall):
        return _infeasible(asked, sized, supply, found)
    if (most := max(pool.replicas for pool in found.pools)) > MOST_REPLICAS:
        text = (
            f"spec.workload: {most:,} engines of one kind would keep the goals, and a role has {MOST_REPLICAS:,} at most; "
            "share the load out among several requests"
        )
        return Infeasible(reason="TooManyReplicas", message=text)
    return _proposed(asked, sized, found)


def _model(asked: ServingRequestSpec) -> SizedModel | None:
    if asked.model_config:
        return model_from_config(asked.model_config, "modelConfig")
    return model_by_repository(asked.model.uri or asked.model.name)


def _demand(asked: ServingRequestSpec) -> Demand:
    work = asked.workload
    # At least one prompt token has to be computed, because cached blocks alone give no first token.
    cached = min(work.prompt_tokens * work.cached_percent / 100, work.prompt_tokens - 1)
    request = RequestShape(prompt_tokens=work.prompt_tokens, answer_tokens=work.answer_tokens, cached_tokens=cached)
    return Demand(request=request, rate=work.requests_per_minute / MINUTE, clients=work.concurrency)


def _goals(objective: ServingObjective) -> LatencyGoals:
    return LatencyGoals(
        ttft=objective.ttft_ms / 1000, tpot=objective.tpot_ms / 1000, percentile=objective.percentile / 100
    )


# Proposals for feasible requests.


def _proposed(asked: ServingRequestSpec, sized: SizedModel, found: Sizing) -> Proposal:
    objective, estimate = asked.objective, found.estimate
    per_minute = GoalName.CONCURRENCY if asked.workload.concurrency else GoalName.RATE
    load = asked.workload.concurrency or asked.workload.requests_per_minute
    most = found.most if asked.workload.concurrency else found.most * MINUTE
    first = _figure(GoalName.TTFT, objective.ttft_ms, found.ttft * 1000, estimate.ttft_error)
    token = _figure(GoalName.TPOT, objective.tpot_ms, found.tpot * 1000, estimate.tpot_error)
    pools = " and ".join(f"{pool.replicas} x {NAMES[pool.role]}" for pool in found.pools)
    surely = all(each.predicted * (100 + each.error_percent) <= 100 * each.asked for each in (first, token))
    text = (
        f"{pools}, {found.placement.parallelism.gpus} GPUs each; {objective.percentile} of 100 requests have their first token within "
        f"{first.predicted} ms ({first.asked} are asked for) and then one each {token.predicted} ms ({token.asked})"
    )
    if not surely:
        text += "; a goal lies within the error of what is predicted: try it before you rely on it"
    return Proposal(
        spec=_deployment(asked, sized, found),
        reason="GoalsMet" if surely else "GoalsWithinError",
        message=text,
        figures=(
            first,
            token,
            ProposalFigure(goal=GoalName.GPUS, asked=asked.hardware.count, predicted=found.gpus, met=True),
            ProposalFigure(goal=per_minute, asked=load, predicted=max(load, floor(most)), met=True),
        ),
        basis=_basis(estimate),
    )


def _deployment(asked: ServingRequestSpec, sized: SizedModel, found: Sizing) -> DisaggDeploymentSpec:
    count, each = asked.hardware.count, found.placement.parallelism.gpus
    # If the unused GPUs suffice for one more replica of every role, a rollout creates new replicas before it removes old
    # replicas. If they do not suffice, it removes old replicas first.
    surge = count - found.gpus >= each * len(found.pools)
    rollout = Rollout() if surge else Rollout(max_surge=0, max_unavailable=1)
    seconds = found.ttft + asked.workload.answer_tokens * found.tpot
    drain = Drain(timeout_seconds=min(86_400, max(Drain().timeout_seconds, ceil(ANSWERS * seconds))))
    template = _template(asked, _context(asked, sized, found))
    roles = [_role(asked, found, pool, rollout, drain, template) for pool in found.pools]
    new_tokens = floor(_demand(asked).request.new_tokens)
    # The threshold is at most half of the workload's uncached tokens, so that its prompts are sent to prefill workers, even
    # if they are short.
    routing = Routing(disaggregate_above_tokens=min(Routing().disaggregate_above_tokens, new_tokens // 2))
    return DisaggDeploymentSpec(
        model=asked.model,
        roles=(RoleSpec(name="router", type=RoleType.ROUTER, replicas=ROUTERS), *roles),
        image=asked.image,
        kv_transfer=KvTransfer(paths=(KvPath.DIRECT,)),
        routing=routing if len(found.pools) > 1 else Routing(),
        balance=Balance(gpu_budget=count, max_step=min(1000, max(pool.replicas for pool in found.pools))),
    )


def _role(
    asked: ServingRequestSpec, found: Sizing, pool: SizedPool, rollout: Rollout, drain: Drain, template: dict[str, Any]
) -> RoleSpec:
    tensor = found.placement.parallelism.tp
    return RoleSpec(
        name=NAMES[pool.role],
        type=TYPES[pool.role],
        replicas=pool.replicas,
        parallelism=Parallelism(tensor=tensor),
        gpus=RoleGpus(vendor=VENDORS[found.placement.gpu.maker], product=asked.hardware.product, per_replica=tensor),
        topology=asked.topology,
        rollout=rollout,
        drain=drain,
        pod_template=template,
    )


def _context(asked: ServingRequestSpec, sized: SizedModel, found: Sizing) -> int:
    """Return the maximum length of a request in tokens that the model allows and an engine's KV cache can hold.

    If the model's config names no maximum length, it is taken as UNKNOWN_CONTEXT times the length in the workload.
    """
    described = asked.workload.prompt_tokens + asked.workload.answer_tokens
    return min(sized.context or UNKNOWN_CONTEXT * described, found.room)


def _template(asked: ServingRequestSpec, context: int) -> dict[str, Any]:
    """Return the request's pod template with Fleet's engine options as arguments of the container `main`.

    The options have no field in a role. The request's own arguments follow them, and so override them.
    """
    ours = [
        f"--set=max_model_len={context}",
        f"--set=max_running={MOST_RUNNING}",
        f"--set=vllm.extra_args.max_num_batched_tokens={int(BUDGET_TOKENS)}",
    ]
    template = asked.pod_template
    pod = template.get("spec") or {}
    containers = list(pod.get("containers") or ())
    for index, each in enumerate(containers):
        if each.get("name") == "main":
            containers[index] = each | {"args": [*ours, *(each.get("args") or ())]}
            break
    else:
        containers.append({"name": "main", "args": ours})
    return template | {"spec": pod | {"containers": containers}}


def _too_long(asked: ServingRequestSpec) -> str:
    """Return a message about a field that is larger than `LARGEST`, or an empty text if there is none."""
    for field, given in {"podTemplate": asked.pod_template, "modelConfig": asked.model_config}.items():
        if (size := len(msgspec.json.encode(given))) > LARGEST:
            return (
                f"{field}: takes {size:,} bytes as JSON, and may take {LARGEST:,}; mount what is long from a ConfigMap"
            )
    return ""


def _misshapen(template: dict[str, Any]) -> str:
    """Return a message about a pod template to which no arguments can be added, or an empty text if it is usable.

    The API server checks the rest of the template later.
    """
    pod = template.get("spec")
    if not isinstance(pod, dict | None):
        return "podTemplate.spec: must be an object"
    containers = (pod or {}).get("containers")
    if not isinstance(containers, list | None):
        return "podTemplate.spec.containers: must be a list"
    for index, each in enumerate(containers or ()):
        if not isinstance(each, dict):
            return f"podTemplate.spec.containers[{index}]: must be an object"
        if not isinstance(each.get("args"), list | None):
            return f"podTemplate.spec.containers[{index}].args: must be a list"
    return ""


def _figure(goal: GoalName, asked: int, milliseconds: float, error: float) -> ProposalFigure:
    predicted = ceil(milliseconds)
    return ProposalFigure(
        goal=goal, asked=asked, predicted=predicted, error_percent=ceil(100 * error), met=milliseconds <= asked
    )


def _basis(estimate: StepModelEstimate) -> str:
    return f"{estimate.rows} {RESTS_ON[estimate.basis]}; errors are medians of such predictions"


# Replies to requests that no deployment can fulfil.


def _infeasible(asked: ServingRequestSpec, sized: SizedModel, supply: GpuSupply, why: Shortfall) -> Infeasible:
    match why.goal:
        case SizingGoal.MEMORY:
            return _too_large(asked, sized, supply, why)
        case SizingGoal.CONTEXT:
            text = (
                f"spec.workload: promptTokens and answerTokens are {ceil(why.wanted):,} together, and the model takes {ceil(why.best):,}; "
                "ask for shorter ones, or take a model with a longer context"
            )
            figure = ProposalFigure(goal=GoalName.CONTEXT, asked=ceil(why.wanted), predicted=ceil(why.best), met=False)
            return Infeasible(reason="ContextTooLong", message=text, figures=(figure,))
        case SizingGoal.GPUS:
            return _too_few(asked, why)
        case SizingGoal.TTFT | SizingGoal.TPOT:
            return _too_slow(asked, sized, supply, why)


def _too_large(asked: ServingRequestSpec, sized: SizedModel, supply: GpuSupply, why: Shortfall) -> Infeasible:
    needs = f"takes {ceil(why.best)} of {supply.gpu.name}" if why.best else f"fits on no number of {supply.gpu.name}"
    have = f"a node has {supply.per_node}" if supply.gpus >= supply.per_node else f"there are {supply.gpus}"
    fitting = [
        other
        for other, found in _elsewhere(asked, sized, supply)
        if isinstance(found, Sizing) or found.goal is not SizingGoal.MEMORY
    ]
    text = (
        f"spec.hardware: for the weights and one request's KV an engine {needs}, in one node, and {have}; take {_others(fitting)}, "
        "narrower weights (fp8, fp4), or shorter requests"
    )
    figure = ProposalFigure(goal=GoalName.GPUS_PER_NODE, asked=ceil(why.wanted), predicted=ceil(why.best), met=False)
    return Infeasible(reason="ModelDoesNotFit", message=text, figures=(figure,))


def _too_few(asked: ServingRequestSpec, why: Shortfall) -> Infeasible:
    assert why.placement is not None, "GPUs are counted for a cut"
    waiting = asked.workload.concurrency > 0
    load = asked.workload.concurrency or asked.workload.requests_per_minute
    most = floor(why.most if waiting else why.most * MINUTE)
    of = "at once" if waiting else "requests a minute"
    text = (
        f"spec.hardware.count: {ceil(why.best):,} GPUs keep the goals, {why.placement.parallelism.gpus} for each engine; the {ceil(why.wanted):,} "
        f"there are would do for {most:,} {of}; take more of them, faster ones, or looser goals"
    )
    figures = (
        ProposalFigure(goal=GoalName.GPUS, asked=ceil(why.wanted), predicted=ceil(why.best), met=False),
        ProposalFigure(goal=GoalName.CONCURRENCY if waiting else GoalName.RATE, asked=load, predicted=most, met=False),
    )
    return Infeasible(reason="TooFewGpus", message=text, figures=figures)


def _too_slow(asked: ServingRequestSpec, sized: SizedModel, supply: GpuSupply, why: Shortfall) -> Infeasible:
    assert why.placement is not None, "times are of a cut"
    first = why.goal is SizingGoal.TTFT
    what, field = ("the first token takes", "ttftMs") if first else ("a token takes", "tpotMs")
    keep = [other for other, found in _elsewhere(asked, sized, supply) if isinstance(found, Sizing)]
    text = (
        f"spec.objective.{field}: {what} {why.best * 1000:.1f} ms where nobody else is served, on {why.placement.parallelism.gpus} of "
        f"{supply.gpu.name}, the best cut of it; take {_others(keep)}, narrower weights (fp8, fp4), "
        f"{'shorter prompts, more of them cached, ' if first else ''}or a looser goal"
    )
    asked_ms = asked.objective.ttft_ms if first else asked.objective.tpot_ms
    figure = _figure(GoalName.TTFT if first else GoalName.TPOT, asked_ms, why.best * 1000, 0.0)
    return Infeasible(reason="TtftOutOfReach" if first else "TpotOutOfReach", message=text, figures=(figure,))


def _elsewhere(
    asked: ServingRequestSpec, sized: SizedModel, supply: GpuSupply
) -> Iterator[tuple[Gpu, Sizing | Shortfall]]:
    """Yield each other GPU type with the sizing of the workload on any number of these GPUs, or with the goal that cannot be kept."""
    within = min(supply.per_node, supply.gpus)
    for other in gpus().values():
        if other.id != supply.gpu.id:
            there = GpuSupply(gpu=other, gpus=MOST_GPUS, per_node=within)
            yield other, size(sized, _demand(asked), _goals(asked.objective), there)


def _others(found: list[Gpu]) -> str:
    return (
        f"other GPUs ({', '.join(other.id for other in found)})"
        if found
        else "other GPUs (none that is known would do)"
    )
