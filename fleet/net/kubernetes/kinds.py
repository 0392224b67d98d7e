"""Kinds of Kubernetes objects that Fleet reads and writes, and their API paths."""

from collections.abc import Mapping

from msgspec import Struct

GROUP = "fleet-serving.io"


VERSION = "v1alpha1"


class ApiKind(Struct, frozen=True):
    """One kind in one version of its API."""

    group: str
    """The API group; empty for the core group of Kubernetes."""

    version: str
    plural: str
    name: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """Return the API path of an object; without a name, the path of all objects. An empty namespace means all namespaces.

        `part` is the name of a subresource, such as `status`.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"{root}/namespaces/{namespace}" if namespace else root
        return "/".join(each for each in (within, self.plural, name, part) if each)


DISAGG_DEPLOYMENT = ApiKind(GROUP, VERSION, "disaggdeployments", "DisaggDeployment")
ROLE_SCALER = ApiKind(GROUP, VERSION, "rolescalers", "RoleScaler")
SERVING_PLAN = ApiKind(GROUP, VERSION, "servingplans", "ServingPlan")
SERVING_REQUEST = ApiKind(GROUP, VERSION, "servingrequests", "ServingRequest")
CUSTOM_KINDS = (DISAGG_DEPLOYMENT, ROLE_SCALER, SERVING_PLAN, SERVING_REQUEST)

DEPLOYMENT = ApiKind("apps", "v1", "deployments", "Deployment")
STATEFUL_SET = ApiKind("apps", "v1", "statefulsets", "StatefulSet")
LEADER_WORKER_SET = ApiKind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
WORKLOAD_KINDS = (DEPLOYMENT, STATEFUL_SET, LEADER_WORKER_SET)

CONFIG_MAP = ApiKind("", "v1", "configmaps", "ConfigMap")
SERVICE = ApiKind("", "v1", "services", "Service")
DISRUPTION_BUDGET = ApiKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = ApiKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
POD_MONITOR = ApiKind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
INFERENCE_POOL = ApiKind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
SUPPORTING_KINDS = (CONFIG_MAP, SERVICE, DISRUPTION_BUDGET, NETWORK_POLICY, POD_MONITOR, INFERENCE_POOL)
"""Kinds of child objects of which only the metadata is read."""

POD = ApiKind("", "v1", "pods", "Pod")
NODE = ApiKind("", "v1", "nodes", "Node")
SECRET = ApiKind("", "v1", "secrets", "Secret")
LEASE = ApiKind("coordination.k8s.io", "v1", "leases", "Lease")
EVENT = ApiKind("events.k8s.io", "v1", "events", "Event")

OPTIONAL_KINDS = (LEADER_WORKER_SET, POD_MONITOR, INFERENCE_POOL)
"""Kinds that may be missing in a cluster."""

BY_NAME: Mapping[str, ApiKind] = {
    each.name: each for each in (*CUSTOM_KINDS, *WORKLOAD_KINDS, *SUPPORTING_KINDS, POD, LEASE, EVENT)
}


class OptionalKinds(Struct, frozen=True, kw_only=True):
    """The optional kinds and fields that the API server has."""

    leader_worker_sets: bool = True
    pod_monitors: bool = False
    inference_pools: bool = False
    scheduling_gates: bool = False
    """True if pods may have `schedulingGates`, which are stable since Kubernetes 1.30."""

    def has(self, kind: ApiKind) -> bool:
        by_kind = {
            LEADER_WORKER_SET: self.leader_worker_sets,
            POD_MONITOR: self.pod_monitors,
            INFERENCE_POOL: self.inference_pools,
        }
        return by_kind.get(kind, True)
