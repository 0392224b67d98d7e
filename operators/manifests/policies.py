"""Policies: builds NetworkPolicies (who may connect to pods) and PodDisruptionBudgets (how many may be evicted)."""

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
from operators.manifests.settings import metrics_ports

ROUTERS = (RoleType.ROUTER.value,)
WORKERS = tuple(sorted(each.value for each in RoleType if each is not RoleType.ROUTER))


def disruption_budget(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    """Return the disruption budget of a role.

    The number of its pods that may be evicted at once is the role's `rollout.maxUnavailable`, but at least 1.
    """
    spec = {
        "maxUnavailable": max(1, role.rollout.max_unavailable),
        # A pod that is not ready serves no requests, so it may be evicted and does not block the drain of a node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selected(deployment, role)},
    }
    return object_of(
        deployment, "policy/v1", "PodDisruptionBudget", base_name(deployment, role), labels_of(deployment, role), spec
    )


def to_workers(deployment: DesiredDeployment) -> Manifest:
    """Return the NetworkPolicy by which only routers and workers of the deployment may connect to its workers.

    Workers may use any port of each other. Everybody may use the ports for metrics, which demand a key.

    Direct transfers between workers, and the engine's connections within a worker group, need no key and are not encrypted. So
    only this policy protects them. It covers all workers, even workers of a removed role whose last pods drain.
    """
    scraped = metrics_ports(deployment)
    spec = {
        "podSelector": _of_types(deployment, WORKERS),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": _of_types(deployment, WORKERS)}]},
            {
                "from": [{"podSelector": _of_types(deployment, ROUTERS)}],
                "ports": [{"port": "worker", "protocol": "TCP"}],
            },
            *([{"ports": [{"port": port, "protocol": "TCP"} for port in scraped]}] if scraped else []),
        ],
    }
    return of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-workers", spec)


def to_router(deployment: DesiredDeployment, client_ports: Mapping[str, int]) -> Manifest:
    """Return the NetworkPolicy of routers: everybody may use the ports for requests, health and metrics.

    Only workers, other routers, the operator and the planner may connect to the control port. Only other routers may
    connect to the port `peers`.
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
