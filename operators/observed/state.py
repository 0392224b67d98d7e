"""What a cluster has of one deployment, as `reconcile` looks at it. Pure."""

from collections.abc import Container, Mapping

from msgspec import Struct

from fleet.net.kubernetes.kinds import OptionalKinds
from operators.api.fields import Condition
from operators.observed.pod_troubles import PodTrouble
from operators.probes.evidence import ProbeEvidence, RunningPod
from operators.scaling import RevisionReplicas


class ObservedChild(Struct, frozen=True, kw_only=True):
    """Of one role and revision, as it is."""

    kind: str
    """Empty: it has no controller any more, and only pods are left."""

    name: str
    role: str
    replicas: RevisionReplicas
    ready_pods: int = 0
    """Replicas that are ready, whether their router knows them or not."""

    registered: int = 0
    """Replicas that all routers know, whether they are ready or not."""

    serving: tuple[RunningPod, ...] = ()
    """Pods that routers give requests to, of replicas that are ready; by name."""

    members: tuple[str, ...] = ()
    """StatefulSets, one for each replica, where it is made of these; by name."""

    ready_members: tuple[str, ...] = ()
    """Of these, those that are ready and known to a router."""

    warm: Mapping[str, int] = {}
    """Warm blocks of these, each with all of its pods, where it is known."""

    halves: tuple[str, ...] = ()
    """Of these, those of which some pods have a node, and others have found none for a while."""

    left_behind: tuple[str, ...] = ()
    """Pods that go on although one of their group has begun anew, and the group has not come together since."""


class ObservedRouter(Struct, frozen=True, kw_only=True):
    """The Deployment of routers, and what is reported of its present specification."""

    name: str
    asked: int
    """What its `replicas` says."""

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    pods: tuple[RunningPod, ...] = ()
    """Ready ones, by name."""

    addresses: tuple[str, ...] = ()
    """IP addresses of these, as their nodes say."""


class PodDeletionCost(Struct, frozen=True, kw_only=True):
    """What it would cost to lose a pod."""

    pod: str
    blocks: int | None
    """Warm ones; None: not known."""

    said: str | None = None
    """What its annotation says."""


class ApiRefusal(Struct, frozen=True, order=True):
    """A write that the API server will not do."""

    kind: str
    name: str
    reason: str
    message: str


class ObservedState(Struct, frozen=True, kw_only=True):
    """What a cluster has of a deployment."""

    children: tuple[ObservedChild, ...] = ()
    digests: Mapping[tuple[str, str], str] = {}
    """Of what the deployment owns, by kind and name."""

    foreign: Container[tuple[str, str]] = frozenset()
    """Kinds and names of what it does not own, though it would have that name."""

    scalers: Mapping[str, int] = {}
    """Replicas that RoleScalers ask for, by role."""

    own_scalers: frozenset[str] = frozenset()
    """Names of RoleScalers that were made for it."""

    conditions: tuple[Condition, ...] = ()
    """As last written: a condition keeps its instant for as long as its status is the same."""

    generation: int = 0
    router: ObservedRouter | None = None
    """None: there is no Deployment of routers."""

    old_routers: tuple[str, ...] = ()
    """Deployments of routers of a role that has another name by now."""

    registrations_known: bool = False
    """Whether anybody has said which workers routers know."""

    partly: Mapping[str, tuple[str, ...]] = {}
    """Pods of workers that some routers know and others do not: these, by pod."""

    silent: tuple[str, ...] = ()
    """Pods of routers that are ready, and have not said which workers they know although others have."""

    shown: ProbeEvidence | None = None
    """What probes have shown; None: none are sent."""

    proved: str = ""
    """Digest of the pods of which the status says that they have answered."""

    troubles: tuple[PodTrouble, ...] = ()
    """Why pods do not run, the most telling first."""

    worths: Mapping[tuple[str, str], tuple[PodDeletionCost, ...]] = {}
    """Of pods, by role and revision."""

    refusals: tuple[ApiRefusal, ...] = ()
    """Of the last attempts."""

    served: OptionalKinds = OptionalKinds()
    afresh: bool = False
    """Take nothing for granted: what should be there is applied, even if its digest says that it is."""
