"""DisaggDeployment: the roles of one served model, and how they work together.

Its CRD is generated from these types; `operators.api` has the rules for them and the other kinds.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from fleet.core.roles import KvPath
from operators.api.fields import (
    MODEL_RULES,
    NAME_RULE,
    PROPOSED_NAME,
    Conditions,
    Count,
    Degree,
    GpuVendor,
    ModelSource,
    Name,
    NodeTopology,
    OpenObject,
    Resource,
    Seconds,
    Text,
    keyed_by,
    rules,
)

Ratio = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$", max_length=7)]
"""Type of a ratio of prefill to decode replicas, such as `1:4`."""

Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(k|Ki|[MGTPE]i?)?$", max_length=20)]


class RoleType(StrEnum):
    PREFILL = "prefill"
    """Workers compute prompts, and hand the KV blocks to decode workers."""

    DECODE = "decode"
    """Workers generate answers, and compute short prompts themselves."""

    AGGREGATED = "aggregated"
    """Workers compute prompts and generate answers."""

    ROUTER = "router"
    """Routers accept requests and choose workers. Without a role of this type, the deployment has one router."""


class ScalingMode(StrEnum):
    STATIC = "Static"
    """The field `replicas` of the role sets the number of replicas."""

    EXTERNAL = "External"
    """`kubectl scale`, an HPA or KEDA scales the role's RoleScaler."""

    PLANNER = "Planner"
    """A ServingPlan scales the role's RoleScaler."""


class EngineKind(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class ServedTask(StrEnum):
    GENERATE = "generate"
    """The model generates tokens."""

    EMBED = "embed"
    """The model computes a vector of each text, for `/v1/embeddings`, reranking and scores."""

    CLASSIFY = "classify"
    """The model computes a number for each class. With one class it scores pairs of texts."""


class FailureMode(StrEnum):
    OPEN = "FailOpen"
    """The gateway chooses a pod itself while the endpoint picker does not answer."""

    CLOSE = "FailClose"
    """The gateway rejects requests while the endpoint picker does not answer."""


class Scaling(Resource, frozen=True):
    """Scaling of a role: what sets its number of replicas, and the bounds of this number."""

    mode: ScalingMode = ScalingMode.STATIC
    """The source of the number of replicas: this specification, an external scaler, or a ServingPlan."""

    least: Count = 0
    """Minimum number of replicas that a scaler may request. A lower request counts as this number."""

    most: Count = 64
    """Maximum number of replicas that a scaler may request. A higher request counts as this number."""


class Parallelism(Resource, frozen=True):
    """Distribution of an engine over GPUs."""

    tensor: Degree = 1
    """Number of GPUs over which each layer is split."""

    pipeline: Degree = 1
    """Number of pipeline stages. Each stage is a group of GPUs with a part of the layers."""

    data: Degree = 1
    """Number of engines in a replica. Each engine has all layers, and each request goes to one engine."""

    expert: Degree = 1
    """Expert parallelism. With more than 1, the experts are split over all ranks of `tensor` and `data` together."""

    @property
    def by_heads(self) -> bool:
        """True if the engine is split by attention heads only: every rank has a part of every layer, and all ranks compute the same requests."""
        return self.pipeline == self.data == 1

    def fits(self, nodes: int) -> bool:
        """Return whether a replica fits on this number of nodes.

        It fits if each node holds a whole number of data-parallel engines, or if each such engine fills a whole
        number of nodes.
        """
        each = self.tensor * self.pipeline
        return self.data % nodes == 0 or (nodes % self.data == 0 and each % (nodes // self.data) == 0)


class Rollout(Resource, frozen=True):
    """How many replicas may be added beyond the target, or be missing, while the pods of a role are replaced."""

    max_surge: Count = 1
    """Maximum number of new replicas beyond `replicas` during the update of a role; they need free GPUs."""

    max_unavailable: Count = 0
    """Maximum number of ready replicas that may be missing from `replicas` during the update of a role."""


class Drain(Resource, frozen=True):
    """How long a worker or router may finish its requests before it ends."""

    timeout_seconds: Seconds = 300
    """The time in which a draining worker or router has to finish its requests. It then ends, even if requests still run."""


class Gpus(Resource, frozen=True):
    """Vendor, product and number of the GPUs of a replica."""

    vendor: GpuVendor = GpuVendor.NVIDIA
    """Vendor of the GPUs, as the name of the extended resource that pods request."""

    product: Annotated[str, Meta(max_length=63)] = ""
    """The value of the node's label `nvidia.com/gpu.product` or `amd.com/gpu.product-name`; empty: any product."""

    per_replica: Count = 0
    """GPUs on all nodes of a replica together. 0: the engine runs on CPUs."""


_ROLE_RULES = rules(
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


class RoleSpec(Resource, frozen=True):
    """One role of a deployment: a pool of equal pods, such as the decode workers or the routers."""

    name: Name
    """Name of the role; the pods are called after deployment and role."""

    type: RoleType
    """The kind of work that the pods do. It cannot be changed."""

    replicas: Count = 1
    """Number of replicas. In the scaling modes External and Planner, it is only the first value of the role's RoleScaler."""

    scaling: Scaling = Scaling()
    """The source of the role's number of replicas, and the bounds of this number."""

    parallelism: Parallelism = Parallelism()
    """Distribution of the engine over the GPUs of a replica."""

    nodes_per_replica: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of nodes of a replica. With more than 1, a replica is a group of pods that run one engine together, one pod on each node. These
    pods are placed together, and end together. The first pod serves requests, and the others compute for it."""

    gpus: Gpus = Gpus()
    """Vendor, product and number of the GPUs of a replica."""

    topology: NodeTopology = NodeTopology()
    """Nodes that fit a replica: their domain, and their network devices."""

    rollout: Rollout = Rollout()
    """How many replicas may be added beyond the target, or be missing, while the pods of a role are replaced."""

    drain: Drain = Drain()
    """How long a worker or router may finish its requests before it ends."""

    pod_template: OpenObject = field(default_factory=dict)
    """A pod template, which overrides the operator's pod template. Its container `main` gets the image, command, ports, probes and
    resources that this template does not set."""


class KvTransfer(Resource, frozen=True):
    """How KV blocks reach a worker."""

    paths: Annotated[
        tuple[KvPath, ...],
        Meta(min_length=1, max_length=2, extra_json_schema={"x-kubernetes-list-type": "set"}),
    ] = (KvPath.DIRECT,)
    """The KV paths to a worker. `direct`: from engine to engine, between prefill and decode. `store`: a worker also keeps
    blocks in its pod's memory, for prompts with the same beginning. The order counts: a handoff that can use both paths takes the
    first one."""

    store_memory: Quantity = "8Gi"
    """Memory in each worker's pod for the blocks of the KV path `store`."""

    redis: Annotated[str, Meta(pattern=r"^(rediss?://[^@/?#]+(/[0-9]+)?)?$", max_length=512)] = ""
    """A Redis or Valkey server such as `redis://host:6379`, through which the workers' stores share reused blocks. A
    draining worker copies its warm blocks to this server. Empty: there is no server, and the blocks in a pod's memory are
    lost when the pod ends."""

    redis_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `password` holds the password of the server in `redis`. Empty: the server needs no password."""


class InferencePool(Resource, frozen=True):
    """An InferencePool of the Gateway API, for gateways that ask the router as an endpoint picker."""

    create: bool = False
    """Create an InferencePool whose endpoint picker is this deployment's router."""

    failure_mode: FailureMode = FailureMode.CLOSE
    """How a gateway handles requests while the endpoint picker does not answer."""


class Routing(Resource, frozen=True):
    """How routers choose workers."""

    policy: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet"
    """The routing policy, by its name in `fleet router policies`."""

    disaggregate_above_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 512
    """If a prompt has at least this number of uncached tokens, a prefill worker computes it. Decode workers compute shorter
    prompts, and also longer prompts while no compatible prefill worker has room."""

    inference_pool: InferencePool = InferencePool()
    """The InferencePool through which gateways send requests to this deployment."""

    tls_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret of the type `kubernetes.io/tls` with the certificate that routers show to clients, at the ports for HTTP, gRPC, health and
    metrics. Empty: these ports do not speak TLS."""


class RatioBounds(Resource, frozen=True):
    """Bounds of the ratio of prefill to decode replicas.

    The operator keeps these bounds between the steps of a change, too. In a rollout, a role counts with its target if its
    number of replicas differs from the target by at most `maxSurge` or `maxUnavailable`.
    """

    least: Ratio = "1:999"
    """Minimum ratio of prefill to decode replicas, such as `1:4`."""

    most: Ratio = "999:1"
    """Maximum ratio of prefill to decode replicas, such as `1:2`."""


class Balance(Resource, frozen=True):
    """Limits for all roles: the GPU budget, the ratio of prefill to decode replicas, and the size of a step."""

    gpu_budget: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Maximum number of GPUs of all workers together, including old and new workers during a rollout; 0: no limit."""

    ratio: RatioBounds = RatioBounds()
    """Bounds of the ratio of prefill to decode replicas."""

    max_step: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Maximum number of replicas of a role that one step adds or removes, unless the ratio allows only a larger change
    of prefill and decode replicas together."""


class WatchdogSpec(Resource, frozen=True):
    """Limits after which a worker whose engine makes no progress is ended and started again."""

    enabled: bool = True
    """End a worker whose engine makes no progress. Off: the worker stays, and its requests fail when their deadlines pass."""

    floor_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    """Smallest time limit for the next step of an engine with work, however fast its earlier steps were."""

    ceiling_seconds: Seconds = 300
    """Largest time limit for the next step of an engine with work. It also applies to first steps and to work of a new kind,
    for which no step has been measured."""


PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""Regular expression of the port numbers from 1 to 65535."""


class TraceProtocol(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


class TracingSpec(Resource, frozen=True):
    """Traces of requests in the format of OpenTelemetry (OTLP)."""

    endpoint: Annotated[
        str,
        Meta(
            pattern=r"^(https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
            rf"(:{PORT})?(/[^?#@]*)?)?$",
            max_length=512,
        ),
    ] = ""
    """URL of the collector: `http://collector.observability:4317` for gRPC, `http://collector.observability:4318/v1/traces` for HTTP. Empty:
    nothing is traced."""

    headers_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `headers` has the headers that are sent with each export, such as an API key of the collector. Each header is a
    line `name: value`. Needs an endpoint with https. Empty: no such headers."""

    authority_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret whose key `ca.crt` has the certificate of the authority (CA) that signed the certificate of a collector with https. Empty:
    the authorities that the image trusts are used."""

    protocol: TraceProtocol = TraceProtocol.GRPC
    """Protocol to the collector. `grpc`: OTLP over gRPC. `http`: OTLP as protobuf over HTTP."""

    sample_percent: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Percentage of the requests without a header `traceparent` that are traced. Otherwise this header says whether a request is traced."""

    keep_errors: bool = True
    """Trace requests that fail, sampled or not. A cancellation by the client does not count as a failure. A rejection before the
    answer began does not count either if its reason is `draining`, or if it is HTTP 4xx with another reason than `kv_mismatch`."""

    slow_first_token_seconds: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    """Requests whose first token takes longer than this are traced, sampled or not. 0: no request is traced for this reason."""

    slow_seconds: Annotated[int, Meta(ge=0, le=1_000_000)] = 60
    """Requests that take longer than this from arrival to end are traced, sampled or not. 0: no request is traced for this reason."""


class WorkerMetricsSpec(Resource, frozen=True):
    """Ports for the metrics of workers and of their stores. Routers export what workers report to them even if these ports are closed."""

    key_sha256: Annotated[
        tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...],
        Meta(max_length=16, extra_json_schema={"x-kubernetes-list-type": "set"}),
    ] = ()
    """SHA-256 of each key that may read the metrics, in hex (`printf %s KEY | sha256sum`). Scrapers send `Authorization: Bearer KEY`. Empty:
    the ports are closed."""

    tls_secret: Annotated[str, Meta(max_length=253)] = ""
    """A Secret of the type `kubernetes.io/tls` with the certificate of the metrics ports. Empty: the metrics ports do not speak TLS."""


_ROLES = rules(
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
    **keyed_by("name"),
)

DEPLOYMENT_RULES = rules(
    ("self.task == oldSelf.task", "task: cannot be changed; create another deployment"),
    (
        "self.task == 'generate' || self.roles.all(r, r.type in ['aggregated', 'router'])",
        "task: workers of a model that does not generate have the type aggregated",
    ),
    (
        "self.task == 'generate' || !('store' in self.kvTransfer.paths)",
        "kvTransfer.paths: a model that does not generate has no blocks to store; leave store out",
    ),
    (
        "self.task == 'generate' || self.roles.all(r, r.scaling.mode != 'Planner')",
        "scaling: a ServingPlan scales workers that generate; use External",
    ),
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
    (
        "self.watchdog.floorSeconds <= self.watchdog.ceilingSeconds",
        "watchdog.ceilingSeconds: is below watchdog.floorSeconds",
    ),
    (
        "self.tracing.protocol != 'grpc' || self.tracing.endpoint.matches('^(https?://[^/]+/?)?$')",
        "tracing.endpoint: has a path, which gRPC does not use; leave it out, or set tracing.protocol to http",
    ),
    (
        "(self.tracing.headersSecret == '' && self.tracing.authoritySecret == '') || self.tracing.endpoint.startsWith('https:')",
        "tracing.endpoint: headersSecret and authoritySecret are for a collector with https",
    ),
    (
        "self.routing.tlsSecret == '' || !self.routing.inferencePool.create",
        "routing.tlsSecret: gateways speak plain HTTP to the pods of an InferencePool; set one of the two",
    ),
    (
        "self.workerMetrics.tlsSecret == '' || self.workerMetrics.keySha256.size() > 0",
        "workerMetrics.tlsSecret: without keySha256 the ports are closed; set both",
    ),
)

_LONGEST = "((r.nodesPerReplica > 1 ? 38 : 54) - r.name.size())"
_OTHERS = _LONGEST.replace("r.", "o.")
_STRICTEST = f"self.spec.roles.filter(r, self.spec.roles.all(o, {_OTHERS} >= {_LONGEST})).map(r, {_LONGEST})[0]"
"""CEL expression for the maximum length of the deployment's name, which depends on the names of its roles."""

_DASHED = f"self.metadata.name.replace('.', '-').substring(0, {_STRICTEST})"
_CUT = f"({_DASHED}.endsWith('-') ? {_DASHED}.substring(0, {_STRICTEST} - 1) : {_DASHED})"

OBJECT_RULES = rules(
    (
        NAME_RULE,
        "metadata.name: Services are named after it, so it has letters, digits and dashes only, first a letter",
        f"'metadata.name: Services are named after it, so it has no dots and begins with a letter; use ' + {PROPOSED_NAME}",
    ),
    (
        "self.spec.roles.all(r, self.metadata.name.size() + r.name.size() <= (r.nodesPerReplica > 1 ? 38 : 54))",
        "metadata.name: too long beside the name of a role; together 54 characters, 38 with nodesPerReplica above 1",
        f"'metadata.name: too long beside the name of a role; use at most ' + string({_STRICTEST}) + ' characters, such as ' + {_CUT}",
    ),
    (
        "self.metadata.name.size() <= 48 || self.spec.roles.exists(r, r.type == 'router')",
        "metadata.name: too long beside the name of the routers' role, which is router; use at most 48 characters",
    ),
)
"""Rules about the name of the deployment. They limit its length, because names of child objects contain it. A Service is
called `<deployment>-<role>-control`, and this name may have 63 characters. A StatefulSet is called
`<deployment>-<role>-<revision>-<index>`. Kubernetes labels its pods with this name and a hash, and a label may have 63
characters too."""


class DisaggDeploymentSpec(Resource, frozen=True):
    """The desired state of the deployment."""

    model: Annotated[ModelSource, MODEL_RULES]
    """The served model."""

    roles: Annotated[tuple[Annotated[RoleSpec, _ROLE_RULES], ...], Meta(min_length=1, max_length=16), _ROLES]
    """Pools of pods: prefill and decode workers, or aggregated ones, and at most one role of routers."""

    engine: EngineKind = EngineKind.VLLM
    """Engine of the workers. The simulated engine computes nothing, and is for tests."""

    task: ServedTask = ServedTask.GENERATE
    """Task of the model: it generates tokens, embeds or classifies. Workers of a model that does not generate have the type `aggregated`,
    and they neither transfer nor store KV blocks. The task cannot be changed."""

    image: Text = ""
    """Image of the workers; empty: the chart's image for the engine and vendor."""

    kv_transfer: KvTransfer = KvTransfer()
    """How KV blocks reach a worker."""

    routing: Routing = Routing()
    """How routers choose workers."""

    balance: Balance = Balance()
    """Limits for all roles: the GPU budget, the ratio of prefill to decode replicas, and the size of a step."""

    watchdog: WatchdogSpec = WatchdogSpec()
    """When a worker whose engine makes no progress is ended and started again."""

    tracing: TracingSpec = TracingSpec()
    """The collector to which routers, workers and their stores send traces, and which requests are traced."""

    worker_metrics: WorkerMetricsSpec = WorkerMetricsSpec()
    """Ports for the metrics of workers and of their stores: who may read the metrics, and the certificate of the
    ports."""

    suspend: bool = False
    """Scale all roles, the routers too, to 0 replicas, and keep them there."""


class RoleStatus(Resource, frozen=True):
    """Numbers of replicas of one role."""

    name: Name
    """Name of the role."""

    desired: int = 0
    """Requested number of replicas, lowered as far as the GPU budget and the ratio bounds demand."""

    replicas: int = 0
    """Existing replicas of all revisions, without those that are being removed."""

    ready: int = 0
    """Replicas whose pods are all ready."""

    updated: int = 0
    """Existing replicas of the present revision, without those that are being removed."""

    registered: int = 0
    """Replicas of workers that all routers know and send requests to. For the role of routers: the ready replicas."""

    draining: int = 0
    """Replicas that are being removed and still finish their requests."""


class DisaggDeploymentStatus(Resource, frozen=True):
    """The observed state of the deployment."""

    observed_generation: int = 0
    """The `metadata.generation` of the specification that the status is about."""

    current_revision: Annotated[str, Meta(max_length=63)] = ""
    """Revision of all workers; empty while replicas of another revision are still requested, as in a rollout."""

    update_revision: Annotated[str, Meta(max_length=63)] = ""
    """Revision that the present specification gives the workers."""

    roles: Annotated[
        tuple[RoleStatus, ...],
        Meta(max_length=16, extra_json_schema=keyed_by("name")),
    ] = ()
    """Numbers of replicas of each role."""

    ratio: Annotated[str, Meta(max_length=16)] = ""
    """Ratio of prefill to decode replicas by the roles' `desired`, such as `1:4`; empty: both numbers are 0."""

    gpus: int = 0
    """GPUs of all workers together that exist, are requested, or drain."""

    ready_roles: Annotated[str, Meta(max_length=16)] = ""
    """Number of roles that have all their replicas in the present revision, ready and registered, and the number of all roles, as `2/3`."""

    proved: Annotated[str, Meta(max_length=16)] = ""
    """Digest of the deployment's pods at the time when all needed probes had been answered. While the pods stay the same, probes are
    sent only to decode workers that have not taken over the blocks of a prefill worker."""

    conditions: Conditions = ()
    """The conditions `Ready` and `Available`, and conditions that explain why `Ready` or `Available` is False."""
