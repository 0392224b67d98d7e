"""Who reaches pods, and how many of them may be taken away."""

from collections.abc import Mapping, Sequence

from operators.api.disagg_deployment import RoleSpec, RoleType
from operators.manifests.names import (
    COMPONENT,
    INSTANCE,
    NAME,
    PART_OF,
    TYPE,
    DesiredDeployment,
    base_name,
    labels_of,
    selected,
)
from operators.manifests.objects import Manifest, object_of, of_all

ROUTERS = (RoleType.ROUTER.value,)
WORKERS = tuple(sorted(each.value for each in RoleType if each is not RoleType.ROUTER))


def disruption_budget(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    """As many pods as a rollout may take replicas away, and one at least, or no node could ever be emptied."""
    spec = {
        "maxUnavailable": max(1, role.rollout.max_unavailable),
        # What is not ready serves nobody, and must not keep a node from being emptied.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selected(deployment, role)},
    }
    return object_of(
        deployment, "policy/v1", "PodDisruptionBudget", base_name(deployment, role), labels_of(deployment, role), spec
    )


def to_workers(deployment: DesiredDeployment) -> Manifest:
    """Who reaches workers: their routers, and each other, on whatever ports engines hand blocks over, and ranks of a group speak.

    Neither link has a key, and that of a group is in the clear: this policy is all that guards it. So it is of every worker that there may be, also of a
    role that the specification has no more, and whose last pods drain.
    """
    spec = {
        "podSelector": _of_types(deployment, WORKERS),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": _of_types(deployment, WORKERS)}]},
            {
                "from": [{"podSelector": _of_types(deployment, ROUTERS)}],
                "ports": [{"port": "worker", "protocol": "TCP"}],
            },
        ],
    }
    return of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-workers", spec)


def to_router(deployment: DesiredDeployment, doors: Mapping[str, int]) -> Manifest:
    """The callers that reach routers: clients where requests come in, and probes and Prometheus where health and metrics are; where workers register, only our own pods: workers, other routers, the operator."""
    ours = [
        {"podSelector": {"matchLabels": {INSTANCE: deployment.name, NAME: "fleet"}}},
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {COMPONENT: "operator", PART_OF: "fleet"}}},
    ]
    spec = {
        "podSelector": _of_types(deployment, ROUTERS),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"port": door, "protocol": "TCP"} for door in (*doors, "health")]},
            {"from": ours, "ports": [{"port": "control", "protocol": "TCP"}]},
        ],
    }
    return of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-router", spec)


def _of_types(deployment: DesiredDeployment, types: Sequence[str]) -> Manifest:
    return {
        "matchLabels": {INSTANCE: deployment.name},
        "matchExpressions": [{"key": TYPE, "operator": "In", "values": list(types)}],
    }
