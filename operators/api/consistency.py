"""Consistency check: checks one DisaggDeployment by the same rules as the CEL rules in `operators.api`, but in Python.

Callers without an API server use it, such as `fleet kube`. If this check and the CEL rules differ, the CEL rules are
right. For each CEL rule that applies to new objects, tests/kube/chart/test_crds.py has a sample object that the rule
refuses. tests/kube/chart/test_consistency.py runs this check on the same samples.
"""

import re
from collections.abc import Iterator

from fleet.core.roles import KvPath
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    EngineKind,
    RoleSpec,
    RoleType,
    ScalingMode,
    ServedTask,
    TraceProtocol,
)

MOST_WITH_ROUTER = 48
"""Maximum number of characters in the name of a deployment that specifies no role of routers. The operator adds a role
with the name `router` to such a deployment, and the names of child objects contain both names."""


def contradictions(spec: DisaggDeploymentSpec, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each contradiction in the specification of a deployment, as a pair: the path of the field, and the reason.

    `name` is the name of the deployment, or empty if it has none yet.
    """
    names: set[str] = set()
    for index, role in enumerate(spec.roles):
        path = f"spec.roles[{index}]"
        if role.name in names:
            yield f"{path}.name", f"Duplicate value: {role.name}"
        names.add(role.name)
        for why in _of_role(role):
            yield path, why
    types = [role.type for role in spec.roles]
    if (RoleType.PREFILL in types) != (RoleType.DECODE in types):
        yield "spec.roles", "prefill and decode need each other; a single pool has the type aggregated"
    if all(each is RoleType.ROUTER for each in types):
        yield "spec.roles", "at least one role of workers is needed"
    if types.count(RoleType.ROUTER) > 1:
        yield "spec.roles", "one role of routers at most"
    budget = spec.balance.gpu_budget
    if budget and any(role.replicas * role.gpus.per_replica > budget for role in spec.roles):
        yield "spec", "balance.gpuBudget: a role alone needs more"
    stored = spec.engine is EngineKind.VLLM and KvPath.STORE in spec.kv_transfer.paths
    if stored and any(role.nodes_per_replica > 1 or not role.parallelism.by_heads for role in spec.roles):
        why = "a store takes blocks of engines on one node, without pipeline stages and data parallelism"
        yield "spec", f"kvTransfer.paths: {why}"
    if spec.task is not ServedTask.GENERATE:
        yield from (("spec", why) for why in _of_pooling(spec))
    if spec.model.claim and spec.model.cache_claim:
        yield "spec.model", "cacheClaim: keeps what is fetched, and with claim nothing is"
    if spec.model.token_secret and not spec.model.insecure and spec.model.endpoint.startswith("http:"):
        why = "the token of tokenSecret would cross the network in the clear: use https, or set insecure"
        yield "spec.model", f"endpoint: {why}"
    if spec.watchdog.floor_seconds > spec.watchdog.ceiling_seconds:
        yield "spec", "watchdog.ceilingSeconds: is below watchdog.floorSeconds"
    if spec.tracing.protocol is TraceProtocol.GRPC and re.search(r"//[^/]+/.", spec.tracing.endpoint):
        why = "has a path, which gRPC does not use; leave it out, or set tracing.protocol to http"
        yield "spec", f"tracing.endpoint: {why}"
    if (spec.tracing.headers_secret or spec.tracing.authority_secret) and not spec.tracing.endpoint.startswith(
        "https:"
    ):
        yield "spec", "tracing.endpoint: headersSecret and authoritySecret are for a collector with https"
    if spec.routing.tls_secret and spec.routing.inference_pool.create:
        why = "gateways speak plain HTTP to the pods of an InferencePool; set one of the two"
        yield "spec", f"routing.tlsSecret: {why}"
    if spec.worker_metrics.tls_secret and not spec.worker_metrics.key_sha256:
        yield "spec", "workerMetrics.tlsSecret: without keySha256 the ports are closed; set both"
    transfer = spec.kv_transfer
    if KvPath.STORE not in transfer.paths if transfer.redis else transfer.redis_secret:
        why = "takes blocks of stores, so 'store' must be among kvTransfer.paths; and redisSecret is for redis only"
        yield "spec", f"kvTransfer.redis: {why}"
    if name and not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        why = "Services are named after it, so it has letters, digits and dashes only, first a letter"
        proposed = ("" if name[0].isalpha() else "m-") + name.replace(".", "-")
        yield "metadata.name", f"{why}; use {proposed}" if "." in name or not name[0].isalpha() else why
    if any(len(name) + len(role.name) > (38 if role.nodes_per_replica > 1 else 54) for role in spec.roles):
        why = "too long beside the name of a role; together 54 characters, 38 with nodesPerReplica above 1"
        yield "metadata.name", why
    if len(name) > MOST_WITH_ROUTER and all(role.type is not RoleType.ROUTER for role in spec.roles):
        yield (
            "metadata.name",
            "too long beside the name of the routers' role, which is router; use at most 48 characters",
        )


def _of_pooling(spec: DisaggDeploymentSpec) -> Iterator[str]:
    if any(role.type not in (RoleType.AGGREGATED, RoleType.ROUTER) for role in spec.roles):
        yield "task: workers of a model that does not generate have the type aggregated"
    if KvPath.STORE in spec.kv_transfer.paths:
        yield "kvTransfer.paths: a model that does not generate has no blocks to store; leave store out"
    if any(role.scaling.mode is ScalingMode.PLANNER for role in spec.roles):
        yield "scaling: a ServingPlan scales workers that generate; use External"


def _of_role(role: RoleSpec) -> Iterator[str]:
    gpus, degree = role.gpus.per_replica, role.parallelism
    if role.scaling.least > role.scaling.most:
        yield "scaling: least is more than most"
    if gpus not in (0, degree.tensor * degree.pipeline * degree.data):
        yield "parallelism: tensor x pipeline x data must be gpus.perReplica"
    if gpus % role.nodes_per_replica:
        yield "nodesPerReplica: must divide gpus.perReplica"
    if not degree.fits(role.nodes_per_replica):
        yield "nodesPerReplica: each node takes whole data parallel engines, or each such engine whole nodes"
    if not role.rollout.max_surge + role.rollout.max_unavailable:
        yield "rollout: maxSurge and maxUnavailable are both 0, so nothing could ever be updated"
    if role.type is RoleType.ROUTER and gpus:
        yield "gpus: a router needs none"
    if role.type is RoleType.ROUTER and role.scaling.mode is ScalingMode.PLANNER:
        yield "scaling: a ServingPlan scales workers, not routers"
