"""How children are called, labelled and reached."""

from msgspec import Struct

from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType
from operators.api.fields import GROUP

HTTP, GRPC, CONTROL, WORKER, WORKER_CONTROL = 8000, 50051, 50052, 50060, 50061

HEALTH = 8080
"""The port at which probes and Prometheus ask a router; clients do not reach it."""

GROUP_PORT = 50063
"""Where the first pod of a replica of several nodes hears the others."""

PICKER = 9002
"""Where gateways ask for an endpoint, by custom."""

CONTROL_SECRET_KEY = "secret"  # noqa: S105 - a name
"""The key of a Secret that holds a control secret; its file in pods has the same name."""

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
ROLE = f"{GROUP}/role"
COMPONENT = "app.kubernetes.io/component"
TYPE = f"{GROUP}/type"
REVISION = f"{GROUP}/revision"

GROUP_LABEL = f"{GROUP}/group"
"""Of the StatefulSet and the pods of one replica that has several nodes: which one it is."""

ROUTER = "router"
"""The role of routers, where none is described."""

LEADER, RANK = "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"
"""Variables of a group's pods, as a LeaderWorkerSet calls them; commands have them put in."""


class DesiredDeployment(Struct, frozen=True, kw_only=True):
    """A DisaggDeployment as far as its children depend on it."""

    name: str
    namespace: str
    spec: DisaggDeploymentSpec
    uid: str = ""
    """Empty: it is not on a server, so nothing can be owned by it."""

    control_secret: str = ""
    """Name of the Secret with what its routers ask for at their control ports; empty: they ask for nothing."""

    @property
    def workers(self) -> tuple[RoleSpec, ...]:
        return tuple(role for role in self.spec.roles if role.type is not RoleType.ROUTER)

    @property
    def router(self) -> RoleSpec:
        """The role of routers; one of a single replica where none is described."""
        given = (role for role in self.spec.roles if role.type is RoleType.ROUTER)
        return next(given, RoleSpec(name=ROUTER, type=RoleType.ROUTER))


def child_name(deployment: DesiredDeployment, role: str, of_revision: str) -> str:
    """Of the settings of a role in a revision, of its child, and at the beginning of each of its StatefulSets."""
    return f"{deployment.name}-{role}-{of_revision}"


def host_of(service: str, namespace: str) -> str:
    """As pods of any namespace look it up, whatever the cluster's domain is called: their resolvers put that after it.

    Without `svc`, a name that is not there yet is asked for on the internet, where the namespace is called like a domain: `llama-decode.dev`.
    """
    return f"{service}.{namespace}.svc"


def router_service(deployment: DesiredDeployment) -> str:
    """Where clients bring their requests."""
    return base_name(deployment, deployment.router)


def pod_selector(deployment: DesiredDeployment, role: str) -> str:
    """Of a role's pods, as `kubectl get -l` takes it."""
    return ",".join(f"{key}={value}" for key, value in {INSTANCE: deployment.name, ROLE: role}.items())


def base_name(deployment: DesiredDeployment, role: RoleSpec) -> str:
    return f"{deployment.name}-{role.name}"


def config_name(deployment: DesiredDeployment, role: RoleSpec, of_revision: str) -> str:
    """A router's keeps its name: what counts is the revision in the labels of its pods."""
    base = base_name(deployment, role)
    return base if role.type is RoleType.ROUTER or not of_revision else f"{base}-{of_revision}"


def selected(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return {INSTANCE: deployment.name, ROLE: role.name}


def labels_of(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return selected(deployment, role) | {NAME: "fleet", MANAGED_BY: "fleet-operator", TYPE: role.type.value}
