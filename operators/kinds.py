"""The kinds of objects that the operator reads and writes, and where they are in the API. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from operators.resources.parts import GROUP, VERSION


class Kind(Struct, frozen=True):
    """One kind in one version of its API."""

    group: str
    """Empty: Kubernetes' core."""

    version: str
    plural: str
    name: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        """Of an object, or of all of them: in a namespace, or in all where that is empty. `part`: a subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"{root}/namespaces/{namespace}" if namespace else root
        return "/".join(each for each in (within, self.plural, name, part) if each)


DISAGG_DEPLOYMENT = Kind(GROUP, VERSION, "disaggdeployments", "DisaggDeployment")
ROLE_SCALER = Kind(GROUP, VERSION, "rolescalers", "RoleScaler")
SERVING_PLAN = Kind(GROUP, VERSION, "servingplans", "ServingPlan")
SERVING_REQUEST = Kind(GROUP, VERSION, "servingrequests", "ServingRequest")
CUSTOM = (DISAGG_DEPLOYMENT, ROLE_SCALER, SERVING_PLAN, SERVING_REQUEST)

DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
STATEFUL_SET = Kind("apps", "v1", "statefulsets", "StatefulSet")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
SCALED = (DEPLOYMENT, STATEFUL_SET, LEADER_WORKER_SET)

CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
SERVICE = Kind("", "v1", "services", "Service")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
INFERENCE_POOL = Kind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
NAMED = (CONFIG_MAP, SERVICE, DISRUPTION_BUDGET, NETWORK_POLICY, POD_MONITOR, INFERENCE_POOL)
"""Of which names, owners and digests are all that is looked at."""

POD = Kind("", "v1", "pods", "Pod")
SECRET = Kind("", "v1", "secrets", "Secret")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
EVENT = Kind("events.k8s.io", "v1", "events", "Event")

OPTIONAL = (LEADER_WORKER_SET, POD_MONITOR, INFERENCE_POOL)
"""That a cluster may lack."""

BY_NAME: Mapping[str, Kind] = {each.name: each for each in (*CUSTOM, *SCALED, *NAMED, POD, LEASE, EVENT)}


class Served(Struct, frozen=True, kw_only=True):
    """Which of the optional kinds the API server has."""

    leader_worker_sets: bool = True
    pod_monitors: bool = False
    inference_pools: bool = False

    def has(self, kind: Kind) -> bool:
        by_kind = {
            LEADER_WORKER_SET: self.leader_worker_sets,
            POD_MONITOR: self.pod_monitors,
            INFERENCE_POOL: self.inference_pools,
        }
        return by_kind.get(kind, True)
