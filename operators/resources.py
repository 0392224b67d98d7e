"""What people write on Kubernetes: `DisaggDeployment`, `RoleScaler`, `ServingPlan`, `ServingRequest`. The one definition of them.

Rules:

1. CRDs are made from these types (`operators.crds`): bounds, defaults and CEL rules stand here and nowhere else. Each rule has a sample
   that it refuses in the tests.
2. Rules use the core of CEL and its strings only, so that the same text runs in the tests. Every list and string has a bound: the API
   server estimates what a rule costs, and refuses rules over things without one.
3. Replicas have one writer, named by `scaling.mode`. In External and Planner mode a role's `replicas` is where its RoleScaler starts,
   and is never written back.
4. `podTemplate` is not described here (a pod's schema is 700 KB, and what is larger than 256 KiB cannot be applied by clients): the API
   server checks it when the operator makes the child of it, and what it says becomes a condition.
5. No field is called n, y, on or off: YAML 1.1 reads these as booleans, and kubectl does.
"""

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

GROUP = "fleet-serving.io"
VERSION = "v1alpha1"


class _Resource(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Spelt as Kubernetes spells: `gpu_budget` is `gpuBudget`."""


def _rules(*pairs: tuple[str, str], **schema: Any) -> Meta:
    """CEL rules, as (rule, message), beside other parts of a schema."""
    validations = [{"rule": rule, "message": message} for rule, message in pairs]
    return Meta(extra_json_schema={"x-kubernetes-validations": validations, **schema})


_UNCHANGED = ("self == oldSelf", "cannot be changed; delete the object and make another one")

Name = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$", max_length=30)]
"""Short enough for `<deployment>-<role>-<ordinal>` to be a label."""

Text = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=10_000)]
Degree = Annotated[int, Meta(ge=1, le=1024)]
Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Milliseconds = Annotated[int, Meta(ge=1, le=600_000)]
Ratio = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$", max_length=7)]
"""Prefill to decode, as `1:4`."""

Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(k|Ki|[MGTPE]i?)?$", max_length=20)]
OpenObject = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]


class RoleType(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    ROUTER = "router"


class ScalingMode(StrEnum):
    STATIC = "Static"
    """`replicas` counts, and nothing else."""

    EXTERNAL = "External"
    """`kubectl scale`, an HPA or KEDA scale the role's RoleScaler."""

    PLANNER = "Planner"
    """A ServingPlan does."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class GpuVendor(StrEnum):
    NVIDIA = "nvidia.com/gpu"
    AMD = "amd.com/gpu"


class KvPath(StrEnum):
    DIRECT = "direct"
    STORE = "store"


class FailureMode(StrEnum):
    OPEN = "FailOpen"
    CLOSE = "FailClose"


class PlanMode(StrEnum):
    SHADOW = "Shadow"
    """Says what it would do."""

    ACTIVE = "Active"


class ModelSource(_Resource, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """What clients call it."""

    uri: Text = ""
    """A repository of the Hugging Face Hub (owner/name, with @revision after it if it is not to be the newest), which every pod fetches
    before it serves; or a folder in the image; or with `claim` one in that volume. Empty: `name`."""

    claim: Annotated[str, Meta(max_length=253)] = ""
    """A PersistentVolumeClaim with the weights, mounted read-only at /models. Nothing is fetched then."""

    cache_claim: Annotated[str, Meta(max_length=253)] = ""
    """A PersistentVolumeClaim that keeps what is fetched, for all pods that are let to write to it (ReadWriteMany, if they are on
    several nodes). Empty: each pod fetches the model for itself, and keeps it on its node's disk for as long as it is there."""

    token_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `token` opens the repository; pods read it from a file."""

    endpoint: Annotated[str, Meta(max_length=512, pattern=r"^(https?://[^/ ?#@]+(/[^ ?#@]*)?)?$")] = ""
    """Where the repository is fetched from: a mirror of the hub. Empty: https://huggingface.co."""


_MODEL = _rules(
    (
        "self.claim == '' || self.cacheClaim == ''",
        "cacheClaim: keeps what is fetched, and with claim nothing is",
    ),
)


class Scaling(_Resource, frozen=True):
    mode: ScalingMode = ScalingMode.STATIC

    least: Annotated[Count, Meta(description="Replicas that a scaler may go down to.")] = 0
    most: Annotated[Count, Meta(description="And up to.")] = 64


class Parallelism(_Resource, frozen=True):
    tensor: Degree = 1
    pipeline: Degree = 1
    data: Degree = 1
    expert: Degree = 1
    """Of the ranks of `tensor` and `data` together; more than 1 splits the experts among them all."""

    @property
    def by_heads(self) -> bool:
        """Whether every rank has whole layers, and all ranks the same requests."""
        return self.pipeline == self.data == 1

    def fits(self, nodes: int) -> bool:
        """Whether each node takes whole data parallel engines, or each such engine whole nodes."""
        each = self.tensor * self.pipeline
        return self.data % nodes == 0 or (nodes % self.data == 0 and each % (nodes // self.data) == 0)


class Rollout(_Resource, frozen=True):
    max_surge: Count = 1
    """New replicas beyond `replicas` while a role is updated; they need GPUs that nobody has."""

    max_unavailable: Count = 0
    """Replicas that may be missing meanwhile."""


class Drain(_Resource, frozen=True):
    timeout_seconds: Seconds = 300
    """A worker that is told to go finishes its requests within this, and is then ended."""


class Gpus(_Resource, frozen=True):
    vendor: GpuVendor = GpuVendor.NVIDIA
    product: Annotated[str, Meta(max_length=63)] = ""
    """As the node's label `nvidia.com/gpu.product` or `amd.com/gpu.product-name` says; empty: any."""

    per_replica: Count = 0
    """On all nodes of a replica together. 0: the engine runs on CPUs."""


class Topology(_Resource, frozen=True):
    domain: Annotated[str, Meta(max_length=317)] = ""
    """A node label; all nodes of one replica have the same value of it: `nvidia.com/gpu.clique` keeps one in an NVLink domain."""

    rdma: Annotated[str, Meta(max_length=253)] = ""
    """An extended resource, `rdma/hca` say, of which each pod gets as many as GPUs."""


_ROLE_RULES = _rules(
    ("self.type == oldSelf.type", "type: cannot be changed; add another role and remove this one"),
    ("self.scaling.least <= self.scaling.most", "scaling: least is more than most"),
    (
        "self.gpus.perReplica in [0, self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data]",
        "parallelism: tensor x pipeline x data must be gpus.perReplica",
    ),
    (
        "self.gpus.perReplica % self.nodesPerReplica == 0",
        "nodesPerReplica: must divide gpus.perReplica",
    ),
    (
        (
            "self.parallelism.data % self.nodesPerReplica == 0 || (self.nodesPerReplica % self.parallelism.data == 0 && "
            "self.parallelism.tensor * self.parallelism.pipeline % (self.nodesPerReplica / self.parallelism.data) == 0)"
        ),
        "nodesPerReplica: each node takes whole data parallel engines, or each such engine whole nodes",
    ),
    (
        "self.rollout.maxSurge + self.rollout.maxUnavailable > 0",
        "rollout: maxSurge and maxUnavailable are both 0, so nothing could ever be updated",
    ),
    ("self.type != 'router' || self.gpus.perReplica == 0", "gpus: a router needs none"),
    ("self.type != 'router' || self.scaling.mode != 'Planner'", "scaling: a ServingPlan scales workers, not routers"),
)


class Role(_Resource, frozen=True):
    """A pool of alike pods."""

    name: Name
    type: RoleType
    replicas: Count = 1
    """With a scaling mode other than Static: where the RoleScaler starts."""

    scaling: Scaling = Scaling()
    parallelism: Parallelism = Parallelism()
    nodes_per_replica: Annotated[int, Meta(ge=1, le=64)] = 1
    """More than 1: a group of pods that is placed, lives and dies together, and runs one engine. The first of them leads: it serves, and
    the others compute for it."""

    gpus: Gpus = Gpus()
    topology: Topology = Topology()
    rollout: Rollout = Rollout()
    drain: Drain = Drain()
    pod_template: OpenObject = {}
    """A pod template; its container `main` gets what it does not say: image, command, ports, probes, resources."""


class KvTransfer(_Resource, frozen=True):
    paths: Annotated[
        tuple[KvPath, ...],
        Meta(min_length=1, max_length=2, extra_json_schema={"x-kubernetes-list-type": "set"}),
    ] = (KvPath.DIRECT,)
    """How blocks come to a worker. `direct`: from engine to engine, between prefill and decode. `store`: a worker also keeps blocks in memory
    of its pod, for prompts that begin alike."""

    store_memory: Quantity = "8Gi"
    """For these blocks."""

    redis: Annotated[str, Meta(pattern=r"^(rediss?://[^@/?#]+(/[0-9]+)?)?$", max_length=512)] = ""
    """A Redis or Valkey server, as in `redis://host:6379`, where stores keep blocks that were used again, for each other; a worker that goes
    leaves its warm ones there. Empty: none, and what is in a pod's memory goes with it."""

    redis_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `password` opens it."""


class InferencePool(_Resource, frozen=True):
    create: bool = False
    """Make an InferencePool whose endpoint picker is this deployment's router."""

    failure_mode: FailureMode = FailureMode.CLOSE


class Routing(_Resource, frozen=True):
    policy: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet"
    disaggregate_above_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 512
    """Prompt tokens still to be computed from which on a prefill worker does it. While there is none, decode workers do."""

    inference_pool: InferencePool = InferencePool()


class RatioBounds(_Resource, frozen=True):
    """Of prefill to decode replicas, held at every moment of a change."""

    least: Ratio = "1:999"
    most: Ratio = "999:1"


class Balance(_Resource, frozen=True):
    gpu_budget: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """GPUs of all workers together, old and new ones of a rollout too; 0: as many as there are."""

    ratio: RatioBounds = RatioBounds()
    max_step: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Replicas that one change adds or takes."""


_ROLES = _rules(
    (
        "self.exists(r, r.type == 'prefill') == self.exists(r, r.type == 'decode')",
        "prefill and decode need each other; a single pool has the type aggregated",
    ),
    ("self.exists(r, r.type != 'router')", "at least one role of workers is needed"),
    ("self.filter(r, r.type == 'router').size() <= 1", "one role of routers at most"),
    (
        "oldSelf.all(o, o.type == 'router' || o.replicas == 0 || self.exists(r, r.name == o.name))",
        "scale a role to 0 before removing it, so that its requests are finished",
    ),
    **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
)

DEPLOYMENT_RULES = _rules(
    (
        "self.kvTransfer.redis == '' ? self.kvTransfer.redisSecret == '' : 'store' in self.kvTransfer.paths",
        "kvTransfer.redis: takes blocks of stores, so 'store' must be among kvTransfer.paths; and redisSecret is for redis only",
    ),
    (
        "self.balance.gpuBudget == 0 || self.roles.all(r, r.replicas * r.gpus.perReplica <= self.balance.gpuBudget)",
        "balance.gpuBudget: a role alone needs more",
    ),
    (
        (
            "self.engine != 'vllm' || !('store' in self.kvTransfer.paths) || "
            "self.roles.all(r, r.nodesPerReplica == 1 && r.parallelism.pipeline == 1 && r.parallelism.data == 1)"
        ),
        "kvTransfer.paths: a store takes blocks of engines on one node, without pipeline stages and data parallelism",
    ),
)

OBJECT_RULES = _rules(
    (
        "self.spec.roles.all(r, self.metadata.name.size() + r.name.size() <= (r.nodesPerReplica > 1 ? 38 : 54))",
        "metadata.name: too long beside the name of a role; together 54 characters, 38 with nodesPerReplica above 1",
    ),
)
"""Services are called `<deployment>-<role>-control`, in 63 characters; StatefulSets `<deployment>-<role>-<revision>-<index>`, and the
name of one and a hash are a label of its pods."""


class DisaggDeploymentSpec(_Resource, frozen=True):
    model: Annotated[ModelSource, _MODEL]
    roles: Annotated[tuple[Annotated[Role, _ROLE_RULES], ...], Meta(min_length=1, max_length=16), _ROLES]
    engine: EngineKind = EngineKind.VLLM
    image: Text = ""
    """Of the workers; empty: what the chart was installed with for the engine and vendor."""

    kv_transfer: KvTransfer = KvTransfer()
    routing: Routing = Routing()
    balance: Balance = Balance()
    suspend: bool = False
    """Scale everything to 0 and keep it there."""


class Condition(_Resource, frozen=True):
    type: Annotated[str, Meta(max_length=316)]
    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$", max_length=7)]
    reason: Annotated[str, Meta(max_length=1024)]
    message: Annotated[str, Meta(max_length=32_768)] = ""
    observed_generation: int = 0
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"}, max_length=40)] = ""


Conditions = Annotated[
    tuple[Condition, ...],
    Meta(
        max_length=16,
        extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


class RoleStatus(_Resource, frozen=True):
    name: Name
    desired: int = 0
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    registered: int = 0
    """Workers that all routers know and give requests to."""

    draining: int = 0


class DisaggDeploymentStatus(_Resource, frozen=True):
    observed_generation: int = 0
    current_revision: Annotated[str, Meta(max_length=63)] = ""
    update_revision: Annotated[str, Meta(max_length=63)] = ""
    roles: Annotated[
        tuple[RoleStatus, ...],
        Meta(
            max_length=16,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    ratio: Annotated[str, Meta(max_length=16)] = ""
    gpus: int = 0
    ready_roles: Annotated[str, Meta(max_length=16)] = ""
    proved: Annotated[str, Meta(max_length=16)] = ""
    """Digest of the pods that have answered a probe: none is sent as long as these are the same."""

    conditions: Conditions = ()


class RoleReference(_Resource, frozen=True):
    deployment: Annotated[str, Meta(min_length=1, max_length=253)]
    role: Name


class RoleScalerSpec(_Resource, frozen=True):
    target: Annotated[RoleReference, _rules(_UNCHANGED)]
    replicas: Count = 1


class RoleScalerStatus(_Resource, frozen=True):
    observed_generation: int = 0
    replicas: int = 0
    selector: Annotated[str, Meta(max_length=1024)] = ""
    """Of the role's pods: what an HPA looks at."""

    last_scale_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"}, max_length=40)] = ""
    conditions: Conditions = ()


class Objective(_Resource, frozen=True):
    ttft_ms: Milliseconds = 2000
    tpot_ms: Milliseconds = 50
    percentile: Annotated[int, Meta(ge=50, le=99)] = 90


class RoleBounds(_Resource, frozen=True):
    role: Name
    least: Count = 0
    most: Count = 64


_BOUNDS = _rules(("self.least <= self.most", "least is more than most"))


class ServingPlanSpec(_Resource, frozen=True):
    deployment: Annotated[str, Meta(min_length=1, max_length=253), _rules(_UNCHANGED)]
    mode: PlanMode = PlanMode.SHADOW
    objective: Objective = Objective()
    interval_seconds: Seconds = 60
    roles: Annotated[
        tuple[Annotated[RoleBounds, _BOUNDS], ...],
        Meta(
            max_length=16,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role"]},
        ),
    ] = ()


class Recommendation(_Resource, frozen=True):
    role: Name
    replicas: int = 0
    reason: Annotated[str, Meta(max_length=1024)] = ""


class ServingPlanStatus(_Resource, frozen=True):
    observed_generation: int = 0
    recommendations: Annotated[tuple[Recommendation, ...], Meta(max_length=16)] = ()
    ttft_ms: int = 0
    tpot_ms: int = 0
    conditions: Conditions = ()


class Hardware(_Resource, frozen=True):
    gpu: Annotated[str, Meta(min_length=1, max_length=63)]
    """As `fleet hardware list` calls it."""

    count: Annotated[int, Meta(ge=1, le=100_000)]
    """That may be used: the budget, of a rollout too."""

    per_node: Annotated[int, Meta(ge=1, le=72)] = 8
    """Engines lie within a node."""

    product: Annotated[str, Meta(max_length=63)] = ""
    """As the node's label `nvidia.com/gpu.product` or `amd.com/gpu.product-name` says; empty: any GPU of the vendor."""


_WORKLOAD = _rules(
    (
        "(self.requestsPerMinute > 0) != (self.concurrency > 0)",
        "one of requestsPerMinute and concurrency must be above 0",
    )
)


class Workload(_Resource, frozen=True):
    prompt_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    """Of a request, on average."""

    answer_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    cached_percent: Annotated[int, Meta(ge=0, le=99)] = 0
    """Of prompt tokens that a worker has already, since prompts begin alike."""

    requests_per_minute: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """That come by chance, whatever becomes of those before them."""

    concurrency: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Clients, each of which waits for its answer and asks again."""


REQUEST_RULES = _rules(
    (
        "self.metadata.name.size() <= 47 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name: the deployment and its Services are called after it: 47 letters, digits and dashes at most, first a letter",
    ),
)


class ServingRequestSpec(_Resource, frozen=True):
    model: Annotated[ModelSource, _MODEL]
    hardware: Hardware
    workload: Annotated[Workload, _WORKLOAD]
    objective: Objective = Objective()
    model_config: OpenObject = {}
    """Content of the model's config.json, where its repository is not one that is known."""

    image: Text = ""
    """Of the workers; empty: what the chart was installed with for the vendor."""

    topology: Topology = Topology()
    """Of all workers."""

    pod_template: OpenObject = {}
    """Of all workers, as in a DisaggDeployment."""

    apply: bool = False
    """Make the DisaggDeployment as well, not only the proposal of it in the status. False again: it stays as it is."""


class Target(StrEnum):
    TTFT = "ttftMs"
    TPOT = "tpotMs"
    GPUS = "gpus"
    GPUS_PER_NODE = "gpusPerNode"
    CONTEXT = "contextTokens"
    RATE = "requestsPerMinute"
    CONCURRENCY = "concurrency"


class Figure(_Resource, frozen=True):
    """Of a proposal, or of the best that there is."""

    goal: Target
    asked: int
    """That it may be at most; of requestsPerMinute and concurrency at least."""

    predicted: int
    """Times at the objective's percentile, rounded up; of requestsPerMinute and concurrency the most that these GPUs would do for."""

    error_percent: int = 0
    """Median of such predictions; half of them err by more."""

    met: bool = False


class ServingRequestStatus(_Resource, frozen=True):
    observed_generation: int = 0
    phase: Annotated[str, Meta(max_length=32)] = ""
    """Proposed, Deploying, Ready, or Infeasible."""

    deployment: Annotated[str, Meta(max_length=253)] = ""
    """That was made for it."""

    figures: Annotated[
        tuple[Figure, ...],
        Meta(
            max_length=8,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["goal"]},
        ),
    ] = ()
    basis: Text = ""
    """What the predictions rest on."""

    proposal: OpenObject = {}
    """A DisaggDeployment, as `kubectl apply` takes it."""

    conditions: Conditions = ()
