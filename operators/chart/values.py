"""The values of the Helm chart in deploy/helm/fleet: their one definition. `values.yaml` and `values.schema.json` are made from it.

Rules:

1. What a process is told is its own settings type, under `settings`, with the names that its settings file has. What follows from
   the chart's other values (`OWNED`) is not among them.
2. An unknown key is refused by Helm itself, with its path. Open are only the parts that Kubernetes checks: resources, tolerations,
   affinities and the like.
3. Nothing secret is a value: values end in ConfigMaps and in Helm's own records. What is secret is named, by Secret and key.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fleet.router.settings.router import RouterSettings

OWNED: Mapping[str, tuple[str, ...]] = {
    "RouterSettings": (
        "router_id",
        "http_listen",
        "grpc_listen",
        "health_listen",
        "control_listen",
        "control_credentials",
        "drain_timeout_ms",
        "kserve_listen",
        "share_ports",
        "replicas",
        "replicas_listen",
        "replicas_credentials",
        "tenant_secret",
        "prompt_secret",
    ),
    "EndpointPickerSettings": ("host", "port", "router_endpoint"),
    "PickerLease": ("name", "namespace", "identity", "kubeconfig", "owner", "service", "endpoint"),
    "OperatorSettings": ("images", "identity", "namespaces", "listen", "kubeconfig", "control_secret"),
    "LeaseSettings": ("name", "namespace", "owner"),
    "ProbeSettings": ("keys",),
}
"""Settings that follow from the chart's values, or are secret, by type."""


class _Values(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Spelt as charts are: `pullPolicy`."""


Texts = dict[str, str]
Open = dict[str, Any]
Replicas = Annotated[int, Meta(ge=0, le=1000)]
Name = Annotated[str, Meta(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")]
"""Of an object; empty: none."""

Repository = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9._/:]*[a-z0-9])?$")]
Tag = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_][-A-Za-z0-9._]{0,127})?$")]
Digest = Annotated[str, Meta(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTPE]i?)?$")]


class Crds(_Values, frozen=True):
    install: bool = True
    """Custom resource definitions come with the release, and change with it. Off: somebody else installs them (`fleet kube crds`)."""

    keep: bool = True
    """They stay when the release goes, and with them every DisaggDeployment and what it serves. Off: all of that goes too."""

    roles: bool = True
    """With `install`: whoever may view or edit what is in a namespace may do that with these kinds too, by ClusterRoles that Kubernetes adds
    to its own `view` and `edit`."""


class Image(_Values, frozen=True):
    repository: Repository
    tag: Tag = ""
    digest: Digest = ""
    """Counts more than a tag."""


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ChartImages(_Values, frozen=True):
    registry: str = ""
    """Goes before the repositories below, with a path if need be: `registry.example.org/team`."""

    tag: Tag = ""
    """Of images without a tag of their own; empty: the chart's `appVersion`."""

    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    pull_secrets: tuple[Name, ...] = ()
    router: Image = Image(repository="fleet-router")
    operator: Image = Image(repository="fleet-operator")
    worker_cpu: Image = Image(repository="fleet-worker-cpu")
    """Of workers for which a DisaggDeployment names no image: without GPUs, on NVIDIA's, on AMD's."""

    worker_cuda: Image = Image(repository="fleet-worker-cuda")
    worker_rocm: Image = Image(repository="fleet-worker-rocm")


class ServiceAccount(_Values, frozen=True):
    create: bool = True
    name: Name = ""
    """Empty: the component's own name, or `default` where none is made."""

    annotations: Texts = {}


class Pods(_Values, frozen=True):
    """What is Kubernetes' own, and goes into pods as it is."""

    labels: Texts = {}
    annotations: Texts = {}
    resources: Open = {}
    node_selector: Texts = {}
    tolerations: tuple[Open, ...] = ()
    affinity: Open = {}
    topology_spread_constraints: tuple[Open, ...] = ()
    priority_class_name: Name = ""


class SecretSetting(_Values, frozen=True):
    """One setting that is in a Secret."""

    setting: Annotated[str, Meta(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")]
    name: Annotated[Name, Meta(min_length=1)]
    key: Annotated[str, Meta(pattern=r"^[-._a-zA-Z0-9]{1,253}$")]


class Readiness(StrEnum):
    AUTO = "Auto"
    SERVING = "Serving"
    LISTENING = "Listening"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class Service(_Values, frozen=True):
    type: ServiceType = ServiceType.CLUSTER_IP
    annotations: Texts = {}


class Ingress(_Values, frozen=True):
    enabled: bool = False
    class_name: Name = ""
    host: str = ""
    """Empty: every host."""

    tls_secret: Name = ""
    """The Secret with the host's certificate; with cert-manager's annotation the one where that puts it. Empty: no TLS."""

    annotations: Texts = {}


class Autoscaling(_Values, frozen=True):
    enabled: bool = False
    least: Annotated[int, Meta(ge=1, le=1000)] = 2
    most: Annotated[int, Meta(ge=1, le=1000)] = 8
    cpu_percent: Annotated[int, Meta(ge=1, le=1000)] = 70
    """Of the CPUs requested in `pods.resources`."""


class DisruptionBudget(_Values, frozen=True):
    enabled: bool = True
    max_unavailable: Annotated[int, Meta(ge=1, le=1000)] = 1


class Routers(_Values, frozen=True):
    enabled: bool = True
    """Off: routers are those of DisaggDeployments alone."""

    replicas: Replicas = 2
    """Left to the autoscaler where that is enabled."""

    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Of each replica, behind one port."""

    settings: RouterSettings = RouterSettings()
    """As in a router's settings file (docs/router.md), `openai_workers` and `tenants` say. With `endpoint_picker`, `{}` at least, gateways
    ask on port 9002: of the routers' Service where `models` are named, else of `…-routers-picker`."""

    picker_lease: bool = True
    """With `endpoint_picker` and no `models`: gateways ask one router at a time, who holds a Lease, since routers do not know what the others
    have booked. Off: they ask all, on the routers' Service; for a single replica, or to have more of them at the price of worse choices."""

    secrets: tuple[SecretSetting, ...] = ()
    """Settings that are in Secrets: `{setting: tenant_secret, name: fleet, key: tenant-secret}`. A key that ends in `.json` holds JSON:
    `tenants` with their API keys say; any other is a text."""

    control_secret: Name = ""
    """Secret whose key `secret` (`openssl rand -hex 32`) workers and operators prove to the routers' control port, 50052. With `tls`, they show
    certificates as well. Without both the control port is a Unix socket in the pod: workers are found in `discovery`, and
    `kubectl exec` runs `fleet status`."""

    models_claim: Name = ""
    """A PersistentVolumeClaim with tokenizers, mounted read-only at /models, for folders in `settings.models`."""

    kserve: bool = False
    """Serve the Open Inference Protocol over gRPC, on port 8001."""

    readiness: Readiness = Readiness.AUTO
    """When a router gets requests. `Serving`: it knows a worker. `Listening`: it answers, if only by refusing. `Auto`: Serving, where
    `settings` name models or servers; otherwise there may be none yet, and an install that waits would wait for ever."""

    termination_seconds: Annotated[int, Meta(ge=20, le=3600)] = 60
    """From the word that a pod is to end to its end: 5 for everybody to hear of it, 5 to close, and between them answers that are being
    streamed are finished."""

    service: Service = Service()
    ingress: Ingress = Ingress()
    autoscaling: Autoscaling = Autoscaling()
    disruption_budget: DisruptionBudget = DisruptionBudget()
    service_account: ServiceAccount = ServiceAccount()
    pods: Pods = Pods(resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}})


class Scope(StrEnum):
    NAMESPACE = "Namespace"
    CLUSTER = "Cluster"


class Operator(_Values, frozen=True):
    enabled: bool = True
    replicas: Replicas = 2
    """One leads, by a Lease; the others wait."""

    scope: Scope = Scope.NAMESPACE
    """Whose DisaggDeployments it looks after: those of the release's namespace, by a Role, or all, by a ClusterRole."""

    create_roles: bool = True
    """Off: somebody else grants what the operator needs."""

    settings: Open = {}
    """As in an operator's settings file: `operators.settings.OperatorSettings`."""

    secrets: tuple[SecretSetting, ...] = ()
    """Settings that are in Secrets, as those of routers: `{setting: probe.keys, name: fleet-probes, key: keys.json}`, where the file says
    `{"namespace/name": "API key"}` of DisaggDeployments whose routers want one."""

    disruption_budget: DisruptionBudget = DisruptionBudget()
    service_account: ServiceAccount = ServiceAccount()
    pods: Pods = Pods(resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}})


class ExtraEgress(_Values, frozen=True):
    """Rules as a NetworkPolicy has them, by component."""

    routers: tuple[Open, ...] = ()
    operator: tuple[Open, ...] = ()
    etcd: tuple[Open, ...] = ()
    redis: tuple[Open, ...] = ()


class Egress(_Values, frozen=True):
    restricted: bool = False
    """Pods of the release reach nothing but what they need, as far as the values say it: names, the API server, each other and the pods of
    DisaggDeployments, and what `routers.settings` and `etcd` name, by its port. Off, as charts usually have it: what else pods need is the
    cluster's own, and what is not allowed just never answers. Before it is set, `extra` has to allow what there is of: the control plane of a
    service mesh, the hub that routers fetch models from (443), a Redis whose URL is in a Secret, workers and gateways that the values do not
    name. Pods of DisaggDeployments stay open outwards: they fetch models from wherever those are."""

    dns: tuple[Open, ...] = ()
    """Who answers for names, as a NetworkPolicy names peers; empty: whoever listens on the ports for that, 53 and OpenShift's 5353."""

    api_server: tuple[Open, ...] = ()
    """Where the API server is: `{ipBlock: {cidr: 10.0.0.1/32}}`. Empty: at any address, on the ports below."""

    api_server_ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = (443, 6443, 8443, 16443)
    """Of the API server itself, which is not that of its Service: most plug-ins look at where a connection ends."""

    extra: ExtraEgress = ExtraEgress()
    """What is needed besides: a Redis whose URL is in a Secret, and workers and gateways of your own that the values do not name."""


class NetworkPolicy(_Values, frozen=True):
    enabled: bool = True
    """Routers are open to `clients` on the ports for clients, and to Fleet's own pods on the one for workers; the others only to those
    who need them."""

    clients: tuple[Open, ...] = ()
    """Peers as a NetworkPolicy names them; empty: everybody."""

    monitoring: tuple[Open, ...] = ()
    """Peers that may read metrics besides `clients`. Empty: everybody may read those of the operator, and whoever may send requests those of
    routers."""

    egress: Egress = Egress()


class Monitors(_Values, frozen=True):
    enabled: bool = True
    """PodMonitors for routers and the operator, where the cluster has this kind."""

    labels: Texts = {}
    """Such as a Prometheus selects."""

    interval_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15


class Alerts(_Values, frozen=True):
    enabled: bool = True
    """A PrometheusRule for routers that cannot reach the directory of their workers, where the cluster has this kind."""

    labels: Texts = {}
    """Such as a Prometheus selects."""


class Dashboards(_Values, frozen=True):
    enabled: bool = True
    """As ConfigMaps, for Grafana's sidecar."""

    labels: Texts = field(default_factory=lambda: {"grafana_dashboard": "1"})
    annotations: Texts = {}


class Monitoring(_Values, frozen=True):
    monitors: Monitors = Monitors()
    alerts: Alerts = Alerts()
    dashboards: Dashboards = Dashboards()


class TlsSource(StrEnum):
    NONE = "None"
    SECRET = "Secret"  # noqa: S105 - a kind of Kubernetes
    CERT_MANAGER = "CertManager"


class Issuer(_Values, frozen=True):
    name: Name = ""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    group: Name = "cert-manager.io"


class Tls(_Values, frozen=True):
    source: TlsSource = TlsSource.NONE
    """Of the certificate that routers show to workers and KV store nodes on other hosts, and of the authority that has to have signed
    theirs. TLS towards clients is the Ingress', or the Gateway's."""

    secret: Name = ""
    """With `source: Secret`: has the keys tls.crt, tls.key and ca.crt."""

    issuer: Issuer = Issuer()
    """With `source: CertManager`."""


class DiscoverySource(StrEnum):
    NONE = "None"
    KUBERNETES = "Kubernetes"
    ETCD = "Etcd"


class DiscoveryOfWorkers(_Values, frozen=True):
    source: DiscoverySource = DiscoverySource.NONE
    """Where the release's routers find workers that do not register with them: Leases in this namespace, or etcd."""

    cluster: Annotated[str, Meta(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")] = ""
    """Whose workers: the name of a DisaggDeployment. Empty: the release's name."""


class Etcd(_Values, frozen=True):
    endpoints: tuple[Annotated[str, Meta(pattern=r"^[^\s/]+:[0-9]{1,5}$")], ...] = ()
    """Of the etcd that is there, `host:port` each."""

    tls: bool = False
    """Speak TLS with it, by the certificate that `tls` names."""

    install: bool = False
    """A small one of the release's own, for trying things out. In production, bring one that is backed up and watched."""

    replicas: Literal[1, 3, 5] = 1
    image: Image = Image(repository="quay.io/coreos/etcd", tag="v3.5.21")
    storage: Quantity = "8Gi"
    storage_class: Name = ""
    """Empty: the cluster's default."""

    pods: Pods = Pods(resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}})


class Redis(_Values, frozen=True):
    install: bool = False
    """A single one of the release's own, in memory, for trying things out; routers keep tenants' limits together in it. In production
    bring one: its URL is `routers.settings.tenants_redis`, or with a password in it an entry of `routers.secrets`."""

    image: Image = Image(repository="valkey/valkey", tag="8.1-alpine")
    memory_mib: Annotated[int, Meta(ge=16, le=1 << 20)] = 256
    """For what it keeps; the pod may take twice as much."""

    pods: Pods = Pods()


class ApiKey(_Values, frozen=True):
    name: Name = ""
    """Of a Secret; empty: no key is sent."""

    key: str = "api-key"


class Test(_Values, frozen=True):
    enabled: bool = True
    model: str = ""
    """`helm test` asks it for a token; empty: it asks for the routers' status."""

    api_key: ApiKey = ApiKey()


class Values(_Values, frozen=True):
    """All of them."""

    name_override: Name = ""
    """In place of `fleet` in names and labels."""

    fullname_override: Name = ""
    """In place of the release's and the chart's name, at the beginning of every object's name."""

    labels: Texts = {}
    """On every object."""

    user: Annotated[int, Meta(ge=0)] = 65532
    """That processes run as; 0: whoever the platform says (OpenShift), never root."""

    restricted_endpoint_slices: bool = False
    """Whoever writes EndpointSlices, workers with `discovery.source: Kubernetes` and the routers that gateways ask, may also create
    `endpointslices/restricted`: without that OpenShift may refuse addresses of pods. Off: it is a way to lead traffic past
    NetworkPolicies where cluster and platform rely on that check."""

    crds: Crds = Crds()
    images: ChartImages = ChartImages()
    routers: Routers = Routers()
    operator: Operator = Operator()
    network_policy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    tls: Tls = Tls()
    discovery: DiscoveryOfWorkers = DiscoveryOfWorkers()
    etcd: Etcd = Etcd()
    redis: Redis = Redis()
    test: Test = Test()

    global_: Open = field(default_factory=dict, name="global")
    """Not used here; a chart that contains this one sets it."""
