"""RBAC: lists the permissions of the operator and of the planner on the API server.

Pure.

Rules:

1. The Roles of the Helm chart are generated from these lists. A test compares the operator's list with all API requests
   in the life of a deployment: every granted right must be used, and every used right must be granted.
2. Server-side apply needs `patch`, and also `create` if the object may not exist yet.
3. The operator reads only its own Secret, in its own namespace; in other namespaces it creates Secrets and never reads
   them. It reads no events and needs no right on the whole cluster. So a Role in each namespace is enough if the
   settings name the namespaces. An operator that manages the whole cluster may also list nodes. It then chooses the
   domains of worker groups by the room of the nodes (`operators.observed.domains`).
4. Child objects carry `blockOwnerDeletion: false`, because the API server demands the right `update` on the owner's
   finalizers for `true`.
5. The planner reads the operator's Secret by its name, and no other Secret (ADR 39). The planner changes only the
   numbers of replicas in RoleScalers, the statuses of ServingPlans, and its Lease with the Events about it.
"""

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind

OWN_SECRET = "fleet-operator-control"  # noqa: S105 - a name, no secret
"""Name of the Secret that contains the operator's own secret (`operators.controller.control_secrets`)."""

READ = ("list", "watch")
CHILD = ("list", "watch", "create", "patch", "delete")

REMOVED = (kinds.CONFIG_MAP, kinds.SERVICE, kinds.DISRUPTION_BUDGET, kinds.INFERENCE_POOL)
KEPT = (kinds.NETWORK_POLICY, kinds.POD_MONITOR)
"""Kinds of child objects that the operator itself never deletes. Kubernetes deletes these objects when their deployment
is deleted."""


class RoleRule(Struct, frozen=True, kw_only=True):
    """Describes one rule of a Role: the verbs that are allowed on one resource."""

    group: str
    """API group of the resource; empty for the core group of Kubernetes."""

    resource: str
    """Plural name of the resource, such as `pods`; the name of a subresource follows after a slash."""

    verbs: tuple[str, ...]

    own_namespace: bool = False
    """True if the rule applies in the namespace of this process, and not in the namespaces of deployments."""

    names: tuple[str, ...] = ()
    """Names of the objects to which the rule is limited; if it is empty, the rule applies to all objects."""


def _of(
    kind: ApiKind, verbs: tuple[str, ...], part: str = "", *, own_namespace: bool = False, names: tuple[str, ...] = ()
) -> RoleRule:
    resource = f"{kind.plural}/{part}" if part else kind.plural
    return RoleRule(group=kind.group, resource=resource, verbs=verbs, own_namespace=own_namespace, names=names)


ACCESS: tuple[RoleRule, ...] = (
    _of(kinds.DISAGG_DEPLOYMENT, (*READ, "create", "patch")),
    _of(kinds.ROLE_SCALER, (*READ, "create", "delete")),
    _of(kinds.SERVING_PLAN, READ),
    _of(kinds.SERVING_REQUEST, READ),
    *(_of(kind, ("patch",), "status") for kind in kinds.CUSTOM_KINDS),
    *(_of(kind, CHILD) for kind in (*kinds.WORKLOAD_KINDS, *REMOVED)),
    *(_of(kind, (*READ, "create", "patch")) for kind in KEPT),
    _of(kinds.POD, (*READ, "patch", "delete")),
    _of(kinds.LEASE, READ),
    _of(kinds.LEASE, ("get", "create", "update"), own_namespace=True),
    _of(kinds.DEPLOYMENT, ("get",), own_namespace=True),
    _of(kinds.EVENT, ("create",)),
    _of(kinds.EVENT, ("create",), own_namespace=True),  # Kubernetes events of the leader election
    _of(kinds.SECRET, ("create",)),
    _of(kinds.SECRET, ("create",), own_namespace=True),
    _of(kinds.SECRET, ("get",), own_namespace=True, names=(OWN_SECRET,)),
)

CLUSTER_ACCESS: tuple[RoleRule, ...] = (_of(kinds.NODE, ("list",)),)
"""Additional rights of an operator that manages the whole cluster. The operator also works without them."""

LEASE_NAME = "{lease}"
"""Placeholder for the name of the planner's Lease. The chart replaces it."""

PLANNER_ACCESS: tuple[RoleRule, ...] = (
    _of(kinds.DISAGG_DEPLOYMENT, ("get", *READ)),
    _of(kinds.ROLE_SCALER, ("list", "patch")),
    _of(kinds.SERVING_PLAN, READ),
    _of(kinds.SERVING_PLAN, ("patch",), "status"),
    _of(kinds.POD, READ),
    # This rule lists no object names, because RBAC cannot restrict the name of an object that is created.
    _of(kinds.LEASE, ("create",), own_namespace=True),
    _of(kinds.LEASE, ("get", "update"), own_namespace=True, names=(LEASE_NAME,)),
    _of(kinds.EVENT, ("create",), own_namespace=True),  # Kubernetes events of the leader election
    # The planner reads its own Deployment, which has the same name as the Lease and becomes the owner of the Lease.
    _of(kinds.DEPLOYMENT, ("get",), own_namespace=True, names=(LEASE_NAME,)),
    _of(kinds.SECRET, ("get",), own_namespace=True, names=(OWN_SECRET,)),
)
"""Rights of the planner (`operators.planner`)."""
