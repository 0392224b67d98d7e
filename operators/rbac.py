"""What the operator may do on the API server, and has to be allowed: one list, for its code's tests and for the chart's Role. Pure.

Rules:

1. The Role is made from this list, and a test holds the requests of a whole life of a deployment against it: nothing is granted that is
   not used, nothing used that is not granted.
2. Server-side apply is `patch`, and `create` as well where the object is not there yet.
3. Of Secrets only one is read, the operator's own in its own namespace; elsewhere they are made and never read. No nodes, no reading of events, nothing of the whole cluster: in namespaces that are named, a Role is enough.
4. Children carry `blockOwnerDeletion: false`: whoever sets it needs `update` on finalizers of the owner.
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
"""For as long as their deployment: they go with it."""


class RoleRule(Struct, frozen=True, kw_only=True):
    """One rule of a Role."""

    group: str
    """Empty: Kubernetes' core."""

    resource: str
    """Plural; with the subresource after a slash."""

    verbs: tuple[str, ...]

    own_namespace: bool = False
    """Needed where the operator runs, not where deployments are."""

    names: tuple[str, ...] = ()
    """Names of the only objects that the rule is for; empty: all."""


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
    _of(kinds.SECRET, ("create",)),
    _of(kinds.SECRET, ("create",), own_namespace=True),
    _of(kinds.SECRET, ("get",), own_namespace=True, names=(OWN_SECRET,)),
)
