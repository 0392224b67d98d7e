"""Permissions of the operator and of the planner on the API server: one list each for the chart's Roles and for the tests. Pure.

Rules:

1. The chart's Role is made from this list, and a test compares it with all requests in the life of a deployment: every
   granted right is used, and every used right is granted.
2. Server-side apply needs `patch`, and also `create` if the object may not exist yet.
3. The operator reads one Secret, its own, in its own namespace; elsewhere it creates Secrets and never reads them. It
   reads no events and needs nothing cluster-wide, so that a Role suffices if the namespaces are named. If it manages the
   whole cluster, it may also list nodes, to choose domains for groups of pods (`operators.observed.domains`).
4. Child objects carry `blockOwnerDeletion: false`, because setting it to true needs `update` on the owner's finalizers.
5. The planner reads the operator's Secret by its name and no other one (ADR 39). It changes nothing but the number of RoleScalers, the
   statuses of ServingPlans, and its Lease with its Events.
"""

from msgspec import Struct

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.kinds import ApiKind

OWN_SECRET = "fleet-operator-control"  # noqa: S105 - a name
"""The Secret with the operator's own secret (`operators.controller.control_secrets`)."""

READ = ("list", "watch")
CHILD = ("list", "watch", "create", "patch", "delete")

REMOVED = (kinds.CONFIG_MAP, kinds.SERVICE, kinds.DISRUPTION_BUDGET, kinds.INFERENCE_POOL)
KEPT = (kinds.NETWORK_POLICY, kinds.POD_MONITOR)
"""Kinds of child objects that stay until their deployment goes."""


class RoleRule(Struct, frozen=True, kw_only=True):
    """One rule of a Role."""

    group: str
    """Empty: the core group of Kubernetes."""

    resource: str
    """Plural name, with a subresource after a slash."""

    verbs: tuple[str, ...]

    own_namespace: bool = False
    """True if the right is needed in the operator's namespace, not in those of deployments."""

    names: tuple[str, ...] = ()
    """Names of the only objects to which the rule applies; empty: all."""


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
    _of(kinds.EVENT, ("create",), own_namespace=True),  # of the leader election
    _of(kinds.SECRET, ("create",)),
    _of(kinds.SECRET, ("create",), own_namespace=True),
    _of(kinds.SECRET, ("get",), own_namespace=True, names=(OWN_SECRET,)),
)

CLUSTER_ACCESS: tuple[RoleRule, ...] = (_of(kinds.NODE, ("list",)),)
"""Further rights of an operator that manages the whole cluster; it works without them."""

LEASE_NAME = "{lease}"
"""Stands for the name of the planner's Lease, which the chart fills in."""

PLANNER_ACCESS: tuple[RoleRule, ...] = (
    _of(kinds.DISAGG_DEPLOYMENT, ("get", *READ)),
    _of(kinds.ROLE_SCALER, ("list", "patch")),
    _of(kinds.SERVING_PLAN, READ),
    _of(kinds.SERVING_PLAN, ("patch",), "status"),
    _of(kinds.POD, READ),
    # without names, because RBAC cannot restrict the name of an object that is created
    _of(kinds.LEASE, ("create",), own_namespace=True),
    _of(kinds.LEASE, ("get", "update"), own_namespace=True, names=(LEASE_NAME,)),
    _of(kinds.EVENT, ("create",), own_namespace=True),  # of the leader election
    _of(kinds.DEPLOYMENT, ("get",), own_namespace=True, names=(LEASE_NAME,)),  # of the Lease's name, and its owner
    _of(kinds.SECRET, ("get",), own_namespace=True, names=(OWN_SECRET,)),
)
"""Rights of the planner (`operators.planner`)."""
