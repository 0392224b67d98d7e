"""Policies: which callers reach pods, and how many pods may be evicted at once."""

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
    """Return a budget of as many pods as a rollout may take, but at least one, so that nodes can be drained."""
    spec = {
        "maxUnavailable": max(1, role.rollout.max_unavailable),
        # A pod that is not ready serves nobody, and must not block the drain of a node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selected(deployment, role)},
    }
    return object_of(
        deployment, "policy/v1", "PodDisruptionBudget", base_name(deployment, role), labels_of(deployment, role), spec
    )


def to_workers(deployment: DesiredDeployment) -> Manifest:
    """Return the policy that admits only routers and workers to workers; workers use any port among themselves.

    These links have no key, and a group's link is unencrypted, so this policy is their only protection. It covers all
    workers, also those of a removed role whose last pods drain.
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


def to_router(deployment: DesiredDeployment, client_ports: Mapping[str, int]) -> Manifest:
    """Return the policy for routers: everyone reaches the ports for requests, health and metrics.

    Only workers, other routers, the operator and the planner reach the control port, and only other routers the port of
    peers.
    """
    ours = [
        {"podSelector": {"matchLabels": {INSTANCE: deployment.name, NAME: "fleet"}}},
        *(
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {COMPONENT: each, PART_OF: "fleet"}}}
            for each in ("operator", "planner")
        ),
    ]
    spec = {
        "podSelector": _of_types(deployment, ROUTERS),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"port": port, "protocol": "TCP"} for port in (*client_ports, "health")]},
            {"from": ours, "ports": [{"port": "control", "protocol": "TCP"}]},
            {
                "from": [{"podSelector": _of_types(deployment, ROUTERS)}],
                "ports": [{"port": "peers", "protocol": "TCP"}],
            },
        ],
    }
    return of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-router", spec)


def _of_types(deployment: DesiredDeployment, types: Sequence[str]) -> Manifest:
    return {
        "matchLabels": {INSTANCE: deployment.name},
        "matchExpressions": [{"key": TYPE, "operator": "In", "values": list(types)}],
    }
