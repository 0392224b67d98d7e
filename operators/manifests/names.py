"""Names, labels, ports and addresses of child objects."""

from msgspec import Struct

from fleet.net.kubernetes.kinds import GROUP
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType

HTTP, GRPC, CONTROL, WORKER, WORKER_CONTROL = 8000, 50051, 50052, 50060, 50061

PEERS = 50054
"""The port at which the routers of a deployment tell each other their state."""

HEALTH = 8080
"""The router's port for probes and Prometheus; clients do not reach it."""

GROUP_PORT = 50063
"""The port at which the first pod of a worker group listens for the others."""

PICKER = 9002
"""The customary port for gateways' endpoint requests."""

CONTROL_SECRET_KEY = "secret"  # noqa: S105 - a name
"""The key of a Secret that holds a control secret; its file in pods has the same name."""

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "fleet-operator"
"""The value of that label."""

PART_OF = "app.kubernetes.io/part-of"
ROLE = f"{GROUP}/role"
COMPONENT = "app.kubernetes.io/component"
TYPE = f"{GROUP}/type"
REVISION = f"{GROUP}/revision"

GROUP_LABEL = f"{GROUP}/group"
"""Label of the StatefulSet and the pods of one replica that has several nodes: its number."""

DOMAIN = f"{GROUP}/domain"
"""Annotation of such a StatefulSet and its pods: the label and the value of the domain that was chosen for them."""

AVOIDED = f"{GROUP}/avoided-nodes"
"""Annotation of such a StatefulSet: nodes where an earlier group of the role found too little room beside them."""

GATE = f"{GROUP}/group"
"""Scheduling gate of a group's pods, while the scheduler chooses the domain; the operator takes it away."""

GATED = f"{GROUP}/gated"
"""Annotation of such a StatefulSet and its pods: `true` if the pods are made with the gate."""

ROUTER = "router"
"""The name of the routers' role, if the specification has none."""

LEADER, RANK = "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"
"""Variables of a group's pods, named as in a LeaderWorkerSet; commands refer to them."""


class GroupPlacement(Struct, frozen=True, kw_only=True):
    """Domain and nodes on which the pods of a group may run."""

    domain: str = ""
    """The value of the role's `topology.domain`; empty: the scheduler chooses one."""

    avoided: tuple[str, ...] = ()
    """Nodes where they may not go, by name."""

    gated: bool = False
    """True if they are made with a scheduling gate."""

    @property
    def chosen(self) -> bool:
        return bool(self.domain or self.avoided)


class DesiredDeployment(Struct, frozen=True, kw_only=True):
    """The parts of a DisaggDeployment on which its children depend."""

    name: str
    namespace: str
    spec: DisaggDeploymentSpec
    uid: str = ""
    """Empty: it is not on a server, so it can own nothing."""

    control_secret: str = ""
    """Name of the Secret with the secret that its routers demand at their control ports; empty: they demand nothing."""

    @property
    def workers(self) -> tuple[RoleSpec, ...]:
        return tuple(role for role in self.spec.roles if role.type is not RoleType.ROUTER)

    @property
    def router(self) -> RoleSpec:
        """The role of routers; one with a single replica if the specification has none."""
        given = (role for role in self.spec.roles if role.type is RoleType.ROUTER)
        return next(given, RoleSpec(name=ROUTER, type=RoleType.ROUTER))


def child_name(deployment: DesiredDeployment, role: str, of_revision: str) -> str:
    """Return the name of a role's settings and child in a revision; names of its StatefulSets begin with it."""
    return f"{deployment.name}-{role}-{of_revision}"


def host_of(service: str, namespace: str) -> str:
    """Return a Service's host name for pods of any namespace, whatever the cluster's domain is.

    Resolvers append the domain.

    Without `svc`, a missing name would be looked up on the internet if the namespace is named like a domain:
    `llama-decode.dev`.
    """
    return f"{service}.{namespace}.svc"


def router_service(deployment: DesiredDeployment) -> str:
    """Return the name of the Service for clients."""
    return base_name(deployment, deployment.router)


def control_host(deployment: DesiredDeployment) -> str:
    """Return the name that resolves to all router pods, also to those that are not ready."""
    return host_of(f"{router_service(deployment)}-control", deployment.namespace)


def pod_selector(deployment: DesiredDeployment, role: str) -> str:
    """Return the selector of a role's pods, as for `kubectl get -l`."""
    return ",".join(f"{key}={value}" for key, value in {INSTANCE: deployment.name, ROLE: role}.items())


def base_name(deployment: DesiredDeployment, role: RoleSpec) -> str:
    return f"{deployment.name}-{role.name}"


def config_name(deployment: DesiredDeployment, role: RoleSpec, of_revision: str) -> str:
    """Return the name of a role's ConfigMap; a router's name stays, because its pods' labels carry the revision."""
    base = base_name(deployment, role)
    return base if role.type is RoleType.ROUTER or not of_revision else f"{base}-{of_revision}"


def selected(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return {INSTANCE: deployment.name, ROLE: role.name}


def labels_of(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return selected(deployment, role) | {NAME: "fleet", MANAGED_BY: OPERATOR, TYPE: role.type.value}
