"""Names, labels, annotations, ports and addresses of the child objects of a DisaggDeployment."""

from msgspec import Struct

from fleet.net.kubernetes.kinds import GROUP
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType

HTTP, GRPC, CONTROL, WORKER, WORKER_CONTROL = 8000, 50051, 50052, 50060, 50061

PEERS = 50054
"""The port at which the routers of a deployment exchange their state."""

HEALTH = 8080
"""The router's port for probes and Prometheus. It is not in the Service for clients."""

GROUP_PORT = 50063
"""The port at which the first pod of a worker group listens for the other pods of the group."""

METRICS, STORE_METRICS = 9400, 9401
"""The ports at which a worker and its embedded store serve Prometheus metrics, if the specification asks for them."""

PICKER = 9002
"""The port at which gateways call the endpoint picker of a router; most gateways use this number by default."""

CONTROL_SECRET_KEY = "secret"  # noqa: S105 - a name, no secret
"""The key of a Secret's `data` whose value is the control secret. In pods, the mounted file has this name."""

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR = "fleet-operator"
"""The value of the label `MANAGED_BY` of objects that the operator manages."""

PART_OF = "app.kubernetes.io/part-of"
ROLE = f"{GROUP}/role"
COMPONENT = "app.kubernetes.io/component"
TYPE = f"{GROUP}/type"
REVISION = f"{GROUP}/revision"

GROUP_LABEL = f"{GROUP}/group"
"""Label of the StatefulSet and the pods of a worker group; its value is the index of the replica, from 0 on."""

DOMAIN = f"{GROUP}/domain"
"""Annotation of the StatefulSet and the pods of a worker group: the domain that was chosen for them, as
`label=value`."""

AVOIDED = f"{GROUP}/avoided-nodes"
"""Annotation of the StatefulSet of a worker group: the nodes that its pods must avoid. These nodes had room for only a
part of an earlier group of the role."""

GATE = f"{GROUP}/group"
"""Name of the scheduling gate that pods of worker groups have if the scheduler chooses the domain. The operator removes
the gate when the scheduler may place the group."""

GATED = f"{GROUP}/gated"
"""Annotation of the StatefulSet and the pods of a worker group: `true` if the pods are created with the scheduling
gate."""

SPEAKS_TLS = f"{GROUP}/speaks-tls"
"""Label of the router pods that speak TLS to clients: `true`."""

ROUTER = "router"
"""The name of the router role, if the specification does not contain one."""

LEADER, RANK = "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"
"""Environment variables in the pods of a worker group: the address of the group's first pod, and the rank of the pod
that has the variable. The commands of the pods refer to them. A LeaderWorkerSet sets variables of the same names."""


class GroupPlacement(Struct, frozen=True, kw_only=True):
    """Says where the pods of a group may run: the domain, the nodes to avoid, and whether a gate holds them back."""

    domain: str = ""
    """The value of the node label that `topology.domain` of the role names; empty if the scheduler chooses the domain."""

    avoided: tuple[str, ...] = ()
    """Names of the nodes on which the pods must not run."""

    gated: bool = False
    """True if the pods are created with a scheduling gate."""

    @property
    def chosen(self) -> bool:
        return bool(self.domain or self.avoided)


class DesiredDeployment(Struct, frozen=True, kw_only=True):
    """Holds the parts of a DisaggDeployment from which the manifests of its child objects are made."""

    name: str
    namespace: str
    spec: DisaggDeploymentSpec
    uid: str = ""
    """The uid on the API server. It is empty if the deployment is on no API server; its manifests then name no
    owner."""

    control_secret: str = ""
    """Name of the Secret with the control secret that callers of the routers' control ports have to prove. If it is
    empty, routers demand no proof."""

    @property
    def workers(self) -> tuple[RoleSpec, ...]:
        return tuple(role for role in self.spec.roles if role.type is not RoleType.ROUTER)

    @property
    def router(self) -> RoleSpec:
        """The role of the routers in the specification, or else a default role with one replica."""
        given = (role for role in self.spec.roles if role.type is RoleType.ROUTER)
        return next(given, RoleSpec(name=ROUTER, type=RoleType.ROUTER))


def child_name(deployment: DesiredDeployment, role: str, of_revision: str) -> str:
    """Return the name of a role's ConfigMap and workload in one revision; names of StatefulSets begin with it."""
    return f"{deployment.name}-{role}-{of_revision}"


def host_of(service: str, namespace: str) -> str:
    """Return a host name of a Service that pods of any namespace can resolve.

    The name ends with `svc`, without the domain of the cluster, because resolvers append the domain.

    A name without `svc`, such as `llama-decode.dev` for the namespace `dev`, could also be a name on the internet. Resolvers
    would ask there if the Service is missing.
    """
    return f"{service}.{namespace}.svc"


def router_service(deployment: DesiredDeployment) -> str:
    """Return the name of the Service to which clients send requests."""
    return base_name(deployment, deployment.router)


def control_host(deployment: DesiredDeployment) -> str:
    """Return the host name that resolves to the addresses of all router pods, even of pods that are not ready."""
    return host_of(f"{router_service(deployment)}-control", deployment.namespace)


def pod_selector(deployment: DesiredDeployment, role: str) -> str:
    """Return the label selector of a role's pods, in the syntax of `kubectl get -l`."""
    return ",".join(f"{key}={value}" for key, value in {INSTANCE: deployment.name, ROLE: role}.items())


def base_name(deployment: DesiredDeployment, role: RoleSpec) -> str:
    return f"{deployment.name}-{role.name}"


def config_name(deployment: DesiredDeployment, role: RoleSpec, of_revision: str) -> str:
    """Return the name of a role's ConfigMap. If `of_revision` is empty, the name contains no revision.

    The ConfigMap of routers has the same name in all revisions. The router pods have a label with a digest of the settings.
    If the settings change, this label changes, so Kubernetes replaces the pods.
    """
    base = base_name(deployment, role)
    return base if role.type is RoleType.ROUTER or not of_revision else f"{base}-{of_revision}"


def selected(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return {INSTANCE: deployment.name, ROLE: role.name}


def labels_of(deployment: DesiredDeployment, role: RoleSpec) -> dict[str, str]:
    return selected(deployment, role) | {NAME: "fleet", MANAGED_BY: OPERATOR, TYPE: role.type.value}
