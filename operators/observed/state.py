"""Observed state of one deployment, the input of `reconcile`. Pure."""

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
    """The observed workload of one role and revision."""

    kind: str
    """Empty: it has no controller any more, and only pods are left."""

    name: str
    role: str
    replicas: RevisionReplicas
    ready_pods: int = 0
    """Ready replicas, whether their router knows them or not."""

    registered: int = 0
    """Replicas that all routers know, whether they are ready or not."""

    serving: tuple[RunningPod, ...] = ()
    """Pods of ready replicas to which routers send requests; by name."""

    members: tuple[str, ...] = ()
    """The StatefulSets, if each replica has one; by name."""

    ready_members: tuple[str, ...] = ()
    """The StatefulSets that are ready and known to a router."""

    warm: Mapping[str, int] = {}
    """The known numbers of warm blocks of these StatefulSets, each for all its pods."""

    half_scheduled: tuple[str, ...] = ()
    """The StatefulSets of which some pods have a node, and others have found none for a while; and those of which none has
    one where they were placed."""

    placements: Mapping[str, GroupPlacement] = {}
    """Where pods of these StatefulSets may go."""

    nodes: Mapping[str, tuple[str, ...]] = {}
    """The nodes of their pods."""

    gated: tuple[GatedGroup, ...] = ()
    """The gates of these StatefulSets whose pods were made with a scheduling gate and all exist; by name."""

    left_behind: tuple[str, ...] = ()
    """Pods that go on although another pod of their group has restarted, and the group has not become ready since."""


class ObservedRouter(Struct, frozen=True, kw_only=True):
    """The Deployment of routers, and the status of its present specification."""

    name: str
    asked: int
    """The value of its `replicas` field."""

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    pods: tuple[RunningPod, ...] = ()
    """The ready pods, by name."""

    addresses: tuple[str, ...] = ()
    """Their IP addresses, as their nodes report them."""


class PodDeletionCost(Struct, frozen=True, kw_only=True):
    """Deletion cost of a pod: its number of warm blocks."""

    pod: str
    blocks: int | None
    """The number of its warm blocks; None: unknown."""

    said: str | None = None
    """The value of its annotation."""


class ApiRefusal(Struct, frozen=True, order=True):
    """A write that the API server refused."""

    kind: str
    name: str
    reason: str
    message: str


class ObservedState(Struct, frozen=True, kw_only=True):
    """All observed objects of one deployment, as `reconcile` reads them."""

    children: tuple[ObservedChild, ...] = ()
    digests: Mapping[tuple[str, str], str] = {}
    """Digests of the deployment's objects, by kind and name."""

    drifted: frozenset[tuple[str, str]] = frozenset()
    """Kinds and names of the deployment's objects that somebody else has changed."""

    orphans: frozenset[tuple[str, str]] = frozenset()
    """Kinds and names of the deployment's objects that have no owner."""

    foreign: Container[tuple[str, str]] = frozenset()
    """Kinds and names that the deployment would use, but that belong to others."""

    scalers: Mapping[str, int] = {}
    """Replicas that RoleScalers request, by role."""

    sizes: Mapping[str, int] = {}
    """Replicas that each role had to have before, by its RoleScaler or the status; a role without them is new."""

    own_scalers: frozenset[str] = frozenset()
    """Names of RoleScalers that were made for the deployment."""

    conditions: tuple[Condition, ...] = ()
    """The conditions as last written: a condition keeps its time while its status is the same."""

    generation: int = 0
    router: ObservedRouter | None = None
    """None: there is no Deployment of routers."""

    old_routers: tuple[str, ...] = ()
    """Deployments of routers whose role has another name by now."""

    registrations_known: bool = False
    """True if anybody has reported which workers routers know."""

    partly_known: Mapping[str, tuple[str, ...]] = {}
    """Routers that do not know a worker, by pod, for workers that other routers know."""

    silent_routers: tuple[str, ...] = ()
    """Pods of ready routers that have not reported their workers, although others have."""

    evidence: ProbeEvidence | None = None
    """The evidence of probes; None: no probes are sent."""

    proved: str = ""
    """Digest of the pods that have answered according to the status."""

    troubles: tuple[PodTrouble, ...] = ()
    """Why pods do not run, the most informative cause first."""

    deletion_costs: Mapping[tuple[str, str], tuple[PodDeletionCost, ...]] = {}
    """Deletion costs of pods, by role and revision."""

    room: ClusterRoom | None = None
    """The room on all nodes; None: it was not read, because no group has to be placed."""

    avoided: Mapping[str, tuple[str, ...]] = {}
    """Nodes, by role, where groups found too little room; only known if the operator may not read nodes."""

    refusals: tuple[ApiRefusal, ...] = ()
    """Refusals of the last writes."""

    served: OptionalKinds = OptionalKinds()
    afresh: bool = False
    """Apply every object that should exist, even if its digest says that it is up to date."""
