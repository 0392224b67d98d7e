"""Observed state: describes what exists of one deployment in the cluster. It is the input of `reconcile`. Pure."""

from collections.abc import Container, Mapping

from msgspec import Struct

from fleet.net.kubernetes.kinds import OptionalKinds
from operators.api.fields import Condition
from operators.manifests.names import GroupPlacement
from operators.observed.domains import ClusterRoom
from operators.observed.gates import GatedGroup
from operators.observed.pod_troubles import PodTrouble
from operators.probes.evidence import ProbeEvidence, RunningPod
from operators.replica_steps import RevisionReplicas


class ObservedChild(Struct, frozen=True, kw_only=True):
    """Describes the workload and the pods of one role in one revision, as they are in the cluster."""

    kind: str
    """Kind of the workload object, or an empty text if the object was deleted and only pods are left."""

    name: str
    role: str
    replicas: RevisionReplicas
    ready_pods: int = 0
    """Number of replicas whose pods are all ready, whether routers know them or not."""

    registered: int = 0
    """Number of replicas that all routers know, whether the replicas are ready or not."""

    serving: tuple[RunningPod, ...] = ()
    """Pods of ready replicas to which routers send requests, sorted by name."""

    members: tuple[str, ...] = ()
    """Sorted names of the StatefulSets if each replica is a StatefulSet of its own; otherwise empty."""

    ready_members: tuple[str, ...] = ()
    """Names of the StatefulSets in `members` whose pods are all ready, and that have a registered pod. If it is unknown
    which workers are registered, ready pods suffice."""

    warm: Mapping[str, int] = {}
    """Number of warm blocks in all pods of each StatefulSet together, by the name of the StatefulSet. A StatefulSet whose
    number is unknown is left out."""

    half_scheduled: tuple[str, ...] = ()
    """Names of the StatefulSets that have waited too long for nodes. Only some pods of such a StatefulSet have a node, or
    no pod has found a node in the chosen domain or outside the nodes to avoid."""

    placements: Mapping[str, GroupPlacement] = {}
    """By the name of each StatefulSet: the domain in which its pods may run, the nodes that the pods must avoid, and whether
    the pods are created with a scheduling gate."""

    nodes: Mapping[str, tuple[str, ...]] = {}
    """Names of the nodes on which the pods of each StatefulSet run, by the name of the StatefulSet."""

    gated: tuple[GatedGroup, ...] = ()
    """The scheduling gates of those StatefulSets whose pods were created with a gate and all exist, sorted by name."""

    left_behind: tuple[str, ...] = ()
    """Names of the pods that have restarted less often than another pod of their group, if the group has not become ready
    again in time (`operators.observed.observe.GROUP_REJOIN_SECONDS`)."""


class ObservedRouter(Struct, frozen=True, kw_only=True):
    """Describes the Deployment of the routers.

    `ready` and `updated` are 0 until Kubernetes reports them for the present specification.
    """

    name: str
    asked: int
    """The number of replicas in the Deployment's specification."""

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    pods: tuple[RunningPod, ...] = ()
    """The ready pods of routers, sorted by name."""

    addresses: tuple[str, ...] = ()
    """IP addresses of the ready router pods, as their nodes report them."""

    tls: bool = False
    """True if a ready router speaks TLS to clients. While the routers are replaced after `tlsSecret` was added or removed,
    this may differ from the specification."""


class PodDeletionCost(Struct, frozen=True, kw_only=True):
    """Holds the deletion cost that a pod should have (its number of warm blocks), and the cost in its annotation."""

    pod: str
    blocks: int | None
    """The number of warm blocks of the pod, or None if it is unknown."""

    said: str | None = None
    """The deletion cost in the pod's annotation, or None if it has no such annotation."""


class ApiRefusal(Struct, frozen=True, order=True):
    """Describes a write that the API server has refused."""

    kind: str
    name: str
    reason: str
    message: str


class ObservedState(Struct, frozen=True, kw_only=True):
    """Holds the observed state of one deployment, from which `reconcile` decides."""

    children: tuple[ObservedChild, ...] = ()
    digests: Mapping[tuple[str, str], str] = {}
    """Digests of the manifests from which the deployment's objects were last applied, by kind and name of the object."""

    drifted: frozenset[tuple[str, str]] = frozenset()
    """Kinds and names of the deployment's objects that somebody else has changed."""

    orphans: frozenset[tuple[str, str]] = frozenset()
    """Kinds and names of the deployment's objects that have no owner."""

    foreign: Container[tuple[str, str]] = frozenset()
    """Kinds and names of objects that exist and belong to somebody else, so that the deployment cannot use these
    names. RoleScalers do not count, because the deployment also uses a RoleScaler of somebody else."""

    scalers: Mapping[str, int] = {}
    """Number of replicas that the RoleScaler of each role requests, by role."""

    sizes: Mapping[str, int] = {}
    """The last desired number of replicas of each role, from its RoleScaler or from the status. A new role has no
    entry."""

    own_scalers: frozenset[str] = frozenset()
    """Names of the RoleScalers that the deployment owns."""

    conditions: tuple[Condition, ...] = ()
    """The conditions in the deployment's status as they were last written. Their transition times are kept as long as the
    statuses of the conditions stay the same."""

    generation: int = 0
    router: ObservedRouter | None = None
    """The routers, or None if the deployment has no Deployment of routers yet."""

    old_routers: tuple[str, ...] = ()
    """Names of router Deployments that are left over, because the role of routers was renamed."""

    registrations_known: bool = False
    """True if it is known which workers are registered: a worker has a Lease, or a router has reported its workers."""

    partly_known: Mapping[str, tuple[str, ...]] = {}
    """The workers that only some routers know: the name of each worker's pod, with the routers that do not know it."""

    silent_routers: tuple[str, ...] = ()
    """Pods of ready routers that have not reported their workers, although other routers have."""

    evidence: ProbeEvidence | None = None
    """The results of probes, or None if the operator sends no probes."""

    proved: str = ""
    """Digest of the pods that have answered probes, as the status of the deployment records it."""

    troubles: tuple[PodTrouble, ...] = ()
    """The reasons why pods do not run, sorted by rule 3 of `operators.observed.pod_troubles`."""

    deletion_costs: Mapping[tuple[str, str], tuple[PodDeletionCost, ...]] = {}
    """Deletion costs of pods, by role and revision."""

    room: ClusterRoom | None = None
    """The room on all nodes. It is None if the room was not read, because no worker group has to be placed."""

    avoided: Mapping[str, tuple[str, ...]] = {}
    """Nodes, by role, on which groups of the role found room for only a part of their pods. New groups avoid these
    nodes if the operator has no right to list nodes. If it has this right, the field is not used."""

    failed_domains: Mapping[str, tuple[str, ...]] = {}
    """Domains, by role, in which pods of a group of the role found no nodes in the time `operators.controller.group_placer.FAILED`.
    The domain that failed first comes first."""

    refusals: tuple[ApiRefusal, ...] = ()
    """The writes of this reconcile that the API server has refused."""

    served: OptionalKinds = OptionalKinds()
    afresh: bool = False
    """True if every object that should exist has to be applied, even if it is up to date according to its digest."""
