"""Values of the Helm chart in deploy/helm/fleet.

They are defined only here; `values.yaml` and its schema are generated from these types.

Rules:

1. The settings of a process are under `settings`, with the names that they have in its settings file. The settings in
   `OWNED` are left out, because they follow from other values of the chart, or are secret.
2. Helm itself refuses an unknown key and names its path. Only fields that Kubernetes itself checks may have any content:
   resources, tolerations, affinities and similar.
3. No value is secret, because Helm writes values into ConfigMaps and into its own records. A secret is given by the name
   of a Secret and a key in it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fleet.router.settings.router import RouterSettings
from kvstore.security.metrics_access import Sha256Hex
from operators.chart.presets import ResourcePreset

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
        "replicas_name",
        "replicas_credentials",
        "tls",
        "tenant_secret",
        "prompt_secret",
    ),
    "EndpointPickerSettings": ("host", "port", "router_endpoint"),
    "PickerLease": ("name", "namespace", "identity", "kubeconfig", "owner", "service", "endpoint"),
    "OperatorSettings": (
        "images",
        "identity",
        "namespaces",
        "listen",
        "metrics_tls",
        "kubeconfig",
        "control_secret",
        "plans_obeyed",
    ),
    "KubePlannerSettings": (
        "identity",
        "namespaces",
        "listen",
        "metrics_tls",
        "control_listen",
        "control_credentials",
        "kubeconfig",
        "control_secret",
        "control_secret_namespace",
    ),
    "LeaseSettings": ("name", "namespace", "owner"),
    "PlannerLeaseSettings": ("name", "namespace", "owner"),
    "ProbeSettings": ("keys",),
}
"""Names of the settings that users cannot set under `settings`, by the settings type. The chart computes these settings
from other values, or they are secret."""


class _Values(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all types of values. Names are spelled as in Helm charts: the field `pull_policy` is the value `pullPolicy`."""


Texts = dict[str, str]
Open = dict[str, Any]
Replicas = Annotated[int, Meta(ge=0, le=1000)]
Name = Annotated[str, Meta(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")]
"""Name of a Kubernetes object; an empty text names no object."""

Repository = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9._/:]*[a-z0-9])?$")]
Tag = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_][-A-Za-z0-9._]{0,127})?$")]
Digest = Annotated[str, Meta(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTPE]i?)?$")]


class Crds(_Values, frozen=True):
    install: bool = True
    """Install and update custom resource definitions with the release. Off: they are installed separately (`fleet kube
    crds`)."""

    keep: bool = True
    """Keep the custom resource definitions when the release is removed, and with them all DisaggDeployments and
    their pods. Off: all of these are removed too."""

    roles: bool = True
    """With `install`: create ClusterRoles that Kubernetes adds to its own roles `view` and `edit`. Users with these
    roles in a namespace may then also view or edit the objects of Fleet's kinds there."""


class Image(_Values, frozen=True):
    repository: Repository
    """Repository of the image."""

    tag: Tag = ""
    """Tag of the image. Empty: for Fleet's own images, `images.tag`."""

    digest: Digest = ""
    """Digest of the image, which takes precedence over the tag. Empty: the tag is used."""


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ChartImages(_Values, frozen=True):
    registry: str = ""
    """Prefix of the repositories below, with a path if needed: `registry.example.org/team`."""

    tag: Tag = ""
    """Tag of the images that have no tag of their own; empty: the chart's `appVersion`."""

    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When nodes pull images: `Always`, `IfNotPresent` or `Never`."""

    pull_secrets: tuple[Name, ...] = ()
    """Names of Secrets with the credentials of the registry."""

    router: Image = Image(repository="fleet-router")
    operator: Image = Image(repository="fleet-operator")
    worker_cpu: Image = Image(repository="fleet-worker-cpu")
    """Image of workers on CPUs, for DisaggDeployments that name no image. `workerCuda` is the image of workers on NVIDIA
    GPUs, and `workerRocm` of workers on AMD GPUs."""

    worker_cuda: Image = Image(repository="fleet-worker-cuda")
    worker_rocm: Image = Image(repository="fleet-worker-rocm")


class ServiceAccount(_Values, frozen=True):
    create: bool = True
    """Create a service account for the component."""

    name: Name = ""
    """Name of the service account. Empty: the name of the component's Deployment, or `default` if no service account is created."""

    annotations: Texts = {}
    """Annotations of the service account."""


class Pods(_Values, frozen=True):
    """Fields of pods, in the form that Kubernetes defines. The chart copies them into the pods of a component."""

    labels: Texts = {}
    """Further labels of the pods."""

    annotations: Texts = {}
    """Annotations of the pods."""

    resources: Open = {}
    """Resource requests and limits of the component's container."""

    node_selector: Texts = {}
    """Labels that a node must have to run the pods."""

    tolerations: tuple[Open, ...] = ()
    """Taints of nodes that the pods tolerate."""

    affinity: Open = {}
    """Affinity of the pods."""

    topology_spread_constraints: tuple[Open, ...] = ()
    """Rules for spreading the pods. A rule without a labelSelector applies to the pods of the component. Empty: the
    pods are spread over nodes if possible."""

    priority_class_name: Name = ""
    """PriorityClass of the pods."""


class SecretSetting(_Values, frozen=True):
    """A setting whose value is in a Secret."""

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


class ServiceValues(_Values, frozen=True):
    type: ServiceType = ServiceType.CLUSTER_IP
    """Type of the Service for clients: `ClusterIP`, `NodePort` or `LoadBalancer`."""

    annotations: Texts = {}
    """Annotations of the Service."""


class Ingress(_Values, frozen=True):
    enabled: bool = False
    """Create an Ingress to the routers' HTTP port, for paths below `/v1`."""

    class_name: Name = ""
    """IngressClass; empty: the cluster's default."""

    host: str = ""
    """Host name of the Ingress. Empty: every host."""

    tls_secret: Name = ""
    """The Secret with the certificate of the host. If `annotations` ask for it, cert-manager writes this Secret. Empty: the
    Ingress has no TLS."""

    annotations: Texts = {}
    """Annotations of the Ingress."""


class ChartClientTls(_Values, frozen=True):
    """TLS of the routers' ports for clients: HTTPS, and gRPC and the Open Inference Protocol over TLS."""

    secret: Name = ""
    """A Secret with the keys tls.crt and tls.key, as cert-manager writes it. Routers read a renewed Secret within about a minute, without a
    restart. The certificate must be valid for the names that clients use. For `helm test`, it must also be valid for
    `fleet-routers.NAMESPACE.svc`, and if your own authority has signed it, the Secret needs the certificate of this authority
    under the key ca.crt. Empty: these ports have no TLS."""

    client_authority: Annotated[str, Meta(pattern=r"^([-._a-zA-Z0-9]{1,253})?$")] = ""
    """The key in this Secret whose value is the certificate of the authority that signs clients' certificates (mTLS),
    such as `ca.crt`. Empty: clients need no certificate."""

    health: bool = False
    """Use TLS at the port 8080 for health and metrics too; probes and the PodMonitor then use HTTPS. This setting cannot be
    combined with `clientAuthority`, because probes of Kubernetes have no certificate."""

    endpoint_picker: bool = False
    """Use TLS at the port of the endpoint picker too, 9002, for gateways that call pickers over TLS."""


class Autoscaling(_Values, frozen=True):
    enabled: bool = False
    """Create a HorizontalPodAutoscaler for the routers."""

    least: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Minimum number of router replicas."""

    most: Annotated[int, Meta(ge=1, le=1000)] = 8
    """Maximum number of router replicas."""

    cpu_percent: Annotated[int, Meta(ge=1, le=1000)] = 70
    """Target of the autoscaler: mean CPU use of the routers, as a percentage of the CPU that their pods request."""


class DisruptionBudget(_Values, frozen=True):
    enabled: bool = True
    """Create a PodDisruptionBudget for the component."""

    max_unavailable: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Maximum number of the component's pods that may be evicted at the same time."""


class Routers(_Values, frozen=True):
    enabled: bool = True
    """Run routers. Off: only DisaggDeployments have routers."""

    replicas: Replicas = 2
    """Number of replicas. If `autoscaling` is enabled, the autoscaler sets this number instead."""

    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of router processes in each pod, which listen on the same ports. With more than one, the processes of a pod share
    their state with each other, but not with other pods."""

    settings: RouterSettings = RouterSettings()
    """Settings of a router's settings file (docs/router.md), such as `openai_workers` and `tenants`. With
    `endpoint_picker` (`{}` at least), gateways ask the endpoint picker at port 9002. The port is in the routers'
    Service if `models` are named or `pickerLease` is off, and otherwise in the Service `…-routers-picker`."""

    picker_lease: bool = True
    """With `endpoint_picker` and no `models`: gateways ask only the router that holds a Lease, because routers do
    not know each other's reservations. Off: gateways ask all routers, by the routers' Service. This suits a single
    replica; with several replicas, placements are worse."""

    secrets: tuple[SecretSetting, ...] = ()
    """Settings whose values are in Secrets: `{setting: tenant_secret, name: fleet, key: tenant-secret}`. A key that ends
    in `.json` holds JSON, such as `tenants` with their API keys; any other key holds a text."""

    control_secret: Name = ""
    """Name of a Secret whose key `secret` holds a secret such as the output of `openssl rand -hex 32`. Workers and
    operators prove this secret at the routers' control port, 50052, and routers prove it to each other at port 50054.
    With the secret and one process in each pod, routers share their state (docs/router.md). With `tls`, workers,
    operators and routers also show certificates. Without the secret and without `tls`, the control port is a Unix
    socket in the pod: routers find workers in `discovery`, and `kubectl exec` runs `fleet status`."""

    models_claim: Name = ""
    """A PersistentVolumeClaim with tokenizers, mounted read-only at /models, for folders in `settings.models`."""

    tls: ChartClientTls = ChartClientTls()
    kserve: bool = False
    """Serve the Open Inference Protocol over gRPC, on port 8001."""

    readiness: Readiness = Readiness.AUTO
    """When a router is ready and so gets requests. `Serving`: when it knows a worker. `Listening`: when it answers, even if it
    rejects all requests. `Auto`: `Serving` if `settings` name models or servers; otherwise `Listening`, because there may be
    no worker yet, and `helm install --wait` would wait for ever."""

    termination_seconds: Annotated[int, Meta(ge=20, le=3600)] = 60
    """Seconds from the deletion of a router's pod until the pod is killed. In the first 5 s, clients learn that the pod ends.
    The last 5 s are for closing connections. In the time between, the router finishes the answers that it streams."""

    service: ServiceValues = ServiceValues()
    ingress: Ingress = Ingress()
    autoscaling: Autoscaling = Autoscaling()
    disruption_budget: DisruptionBudget = DisruptionBudget()
    service_account: ServiceAccount = ServiceAccount()
    preset: ResourcePreset = ResourcePreset.SMALL
    """Resources of the component's pods: `None`, `Small`, `Medium` or `Large`. Fields of `pods.resources` replace those of
    the preset."""

    pods: Pods = Pods()


class Scope(StrEnum):
    NAMESPACE = "Namespace"
    CLUSTER = "Cluster"


class OperatorValues(_Values, frozen=True):
    enabled: bool = True
    """Run the operator."""

    replicas: Replicas = 2
    """Number of replicas. One replica leads (a Lease decides which one), and the other replicas wait."""

    scope: Scope = Scope.NAMESPACE
    """The DisaggDeployments that the operator manages. `Namespace`: only DisaggDeployments in the release's namespace; the
    operator then has the rights of a Role. `Cluster`: all DisaggDeployments of the cluster; the operator then has the
    rights of a ClusterRole. Only with a ClusterRole can the operator list nodes, to choose domains for worker groups."""

    create_roles: bool = True
    """Create the Roles of the operator. Off: its rights are granted separately."""

    settings: Open = {}
    """Settings of an operator's settings file: `operators.settings.OperatorSettings`."""

    secrets: tuple[SecretSetting, ...] = ()
    """Settings whose values are in Secrets, like those of routers: `{setting: probe.keys, name: fleet-probes, key:
    keys.json}`, with the file `{"namespace/name": "API key"}` for DisaggDeployments whose routers require a key. The
    operator sends these keys only with `settings.probe.insecure`, because probes do not verify the routers' certificates."""

    disruption_budget: DisruptionBudget = DisruptionBudget()
    service_account: ServiceAccount = ServiceAccount()
    preset: ResourcePreset = ResourcePreset.SMALL
    """Resources of the component's pods: `None`, `Small`, `Medium` or `Large`. Fields of `pods.resources` replace those of
    the preset."""

    pods: Pods = Pods()


class PlannerValues(_Values, frozen=True):
    enabled: bool = False
    """Run a planner, which obeys the ServingPlans of the namespaces that the operator manages (`operator.scope`)."""

    replicas: Replicas = 2
    """Number of replicas. One of them applies plans (a Lease decides which one). The others watch the same demand, and
    one of them continues the plan if the replica that applies plans ends."""

    create_roles: bool = True
    """Create the Roles of the planner. Off: its rights are granted separately."""

    settings: Open = {}
    """Settings of a planner's settings file: `operators.planner.settings.KubePlannerSettings`."""

    control_secret: Name = ""
    """Name of a Secret whose key `secret` holds a secret such as the output of `openssl rand -hex 32`. Callers of the planner's
    control port, 50053, prove this secret (`fleet plan --planner`). Empty: the control port is a Unix socket in the pod, and
    `kubectl exec` runs `fleet plan`."""

    disruption_budget: DisruptionBudget = DisruptionBudget()
    service_account: ServiceAccount = ServiceAccount()
    preset: ResourcePreset = ResourcePreset.SMALL
    """Resources of the component's pods: `None`, `Small`, `Medium` or `Large`. Fields of `pods.resources` replace those of
    the preset."""

    pods: Pods = Pods()


class ExtraEgress(_Values, frozen=True):
    """Egress rules of a NetworkPolicy, by component."""

    routers: tuple[Open, ...] = ()
    """Egress rules of the routers' pods."""

    operator: tuple[Open, ...] = ()
    """Egress rules of the operator's pods."""

    planner: tuple[Open, ...] = ()
    """Egress rules of the planner's pods."""

    etcd: tuple[Open, ...] = ()
    """Egress rules of etcd's pods."""

    redis: tuple[Open, ...] = ()
    """Egress rules of the Redis pod."""


class Egress(_Values, frozen=True):
    restricted: bool = False
    """Allow the pods of the release to connect only to what they need according to the values: DNS, the API server,
    each other, the pods of DisaggDeployments, and the ports in `routers.settings` and `etcd`. Off by default, as
    usual in charts, because other needs depend on the cluster, and a connection that is not allowed just gets no
    answer. Before you set it, add to `extra` whatever your cluster has of this list: the control plane of a service
    mesh, the hub from which routers fetch models (443), a Redis whose URL is in a Secret, and workers and gateways that
    the values do not name. Pods of DisaggDeployments may always connect outwards, because they fetch models from anywhere."""

    dns: tuple[Open, ...] = ()
    """The DNS servers, as peers of a NetworkPolicy; empty: any address on the ports for DNS, 53 and OpenShift's 5353."""

    api_server: tuple[Open, ...] = ()
    """The API server: `{ipBlock: {cidr: 10.0.0.1/32}}`. Empty: any address, on the ports in `apiServerPorts`."""

    api_server_ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = (443, 6443, 8443, 16443)
    """Ports of the API server itself, not of its Service: most network plug-ins check the port to which the Service has
    forwarded a connection."""

    extra: ExtraEgress = ExtraEgress()
    """Egress rules for further connections: to a Redis whose URL is in a Secret, and to your own workers and
    gateways that the values do not name."""


class NetworkPolicy(_Values, frozen=True):
    enabled: bool = True
    """Create NetworkPolicies. Routers accept connections from `clients` on the ports for clients, and from Fleet's
    own pods on the port for workers. Other pods accept connections only from pods that need them, and on their ports for
    metrics from the peers in `monitoring`."""

    clients: tuple[Open, ...] = ()
    """Clients of the routers, as peers of a NetworkPolicy; empty: everybody."""

    monitoring: tuple[Open, ...] = ()
    """Peers that may connect to the ports for metrics; `clients` too may connect to those of the routers. Empty: everybody may
    connect to the ports for metrics of the operator and the planner, and everybody who may send requests may connect to the
    routers' ports for metrics. `monitoring.access` says what these peers may read."""

    egress: Egress = Egress()


class Monitors(_Values, frozen=True):
    enabled: bool = True
    """Create PodMonitors for the routers, the operator and the planner, if the cluster has this kind. The operator and
    the planner get one only if `access.open` or `access.secret` is set, or their own `settings` contain `metrics_access`."""

    labels: Texts = {}
    """Labels by which a Prometheus selects the PodMonitors."""

    interval_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15
    """Time between two scrapes."""


class MetricsKey(_Values, frozen=True):
    name: Name = ""
    """Name of a Secret in the release's namespace. Empty: the PodMonitors send no key, and the operator and the planner have a PodMonitor only
    if `open` is true or their own `settings` contain `metrics_access`."""

    key: str = "key"
    """Key in the Secret whose value is the metrics key."""


class MetricsReaders(_Values, frozen=True):
    """Readers of the metrics of routers, operator and planner at port 8080.

    Without `keySha256` and `open`, nobody can read the metrics of the operator and the planner. The metrics of routers
    can then be read only as long as no tenant has an API key.
    """

    key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each key that may read the metrics (`printf %s KEY | sha256sum`). Scrapers send `Authorization: Bearer KEY`."""

    secret: MetricsKey = MetricsKey()
    """The Secret with a key whose SHA-256 is in `keySha256`. The PodMonitors tell Prometheus to send this key. With
    `routers.tls.health`, Prometheus sends it to routers over TLS."""

    tls_secret: Name = ""
    """A Secret of the type `kubernetes.io/tls` with the certificate of port 8080 of the operator and the planner; probes and PodMonitors
    then use HTTPS. Empty: these ports have no TLS. For routers, set `routers.tls.health`."""

    open: bool = False
    """Let everybody whom the NetworkPolicy admits read the metrics without a key. The metrics contain the names of
    models, workers and tenants."""


class Alerts(_Values, frozen=True):
    enabled: bool = True
    """Create a PrometheusRule for the routers, if the cluster has this kind. Its alerts report that a router cannot
    reach the directory of its workers, that a certificate ends soon, or that a renewed certificate cannot be used."""

    labels: Texts = {}
    """Labels by which a Prometheus selects the PrometheusRule."""


class Dashboards(_Values, frozen=True):
    enabled: bool = True
    """Create ConfigMaps with dashboards, which the sidecar of Grafana loads."""

    labels: Texts = field(default_factory=lambda: {"grafana_dashboard": "1"})
    """Labels by which the sidecar of Grafana selects the ConfigMaps."""

    annotations: Texts = {}
    """Annotations of the ConfigMaps, such as the folder of the dashboards."""


class Monitoring(_Values, frozen=True):
    access: MetricsReaders = MetricsReaders()
    monitors: Monitors = Monitors()
    alerts: Alerts = Alerts()
    dashboards: Dashboards = Dashboards()


class TlsSource(StrEnum):
    NONE = "None"
    SECRET = "Secret"  # noqa: S105 - a kind of Kubernetes
    CERT_MANAGER = "CertManager"


class Issuer(_Values, frozen=True):
    name: Name = ""
    """Name of the cert-manager issuer."""

    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of the issuer."""

    group: Name = "cert-manager.io"
    """API group of the issuer's kind."""


class Tls(_Values, frozen=True):
    source: TlsSource = TlsSource.NONE
    """Source of the certificate that routers show to workers and KV store nodes on other hosts, and of the authority
    that must have signed the certificates of these workers and nodes. TLS for clients is `routers.tls`, or belongs to
    the Ingress or the Gateway."""

    secret: Name = ""
    """With `source: Secret`: name of a Secret with the keys tls.crt, tls.key and ca.crt."""

    issuer: Issuer = Issuer()
    """With `source: CertManager`: the issuer that signs the certificate."""


class DiscoverySource(StrEnum):
    NONE = "None"
    KUBERNETES = "Kubernetes"
    ETCD = "Etcd"


class DiscoveryOfWorkers(_Values, frozen=True):
    source: DiscoverySource = DiscoverySource.NONE
    """Directory in which the release's routers find workers that do not register with the routers: Leases in the
    release's namespace, or etcd. `None`: there is no directory."""

    cluster: Annotated[str, Meta(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")] = ""
    """The name of the DisaggDeployment whose workers are used. Empty: the release's name."""


class Etcd(_Values, frozen=True):
    endpoints: tuple[Annotated[str, Meta(pattern=r"^[^\s/]+:[0-9]{1,5}$")], ...] = ()
    """Endpoints of an existing etcd, each as `host:port`; empty: no existing etcd is used."""

    tls: bool = False
    """Use TLS with the certificate of the top-level value `tls`."""

    install: bool = False
    """Install a small etcd for trials. For production, use one with backups and monitoring."""

    replicas: Literal[1, 3, 5] = 1
    """Number of members of the installed etcd."""

    image: Image = Image(repository="quay.io/coreos/etcd", tag="v3.5.21")
    """Image of the installed etcd."""

    storage: Quantity = "8Gi"
    """Size of each member's volume."""

    storage_class: Name = ""
    """Storage class of the volumes. Empty: the cluster's default."""

    pods: Pods = Pods(resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}})


class Redis(_Values, frozen=True):
    install: bool = False
    """Install a single Redis in memory for trials; routers share tenants' limits in it. For production, use your own Redis:
    set its URL in `routers.settings.tenants_redis`. If the URL contains a password, use an entry of `routers.secrets`."""

    image: Image = Image(repository="valkey/valkey", tag="8.1-alpine")
    """Image of the installed Redis."""

    memory_mib: Annotated[int, Meta(ge=16, le=1 << 20)] = 256
    """Memory in MiB for the content of the installed Redis. The pod may use twice as much."""

    pods: Pods = Pods()


class ApiKey(_Values, frozen=True):
    name: Name = ""
    """Name of a Secret with the API key that `helm test` sends to the routers; empty: no API key is sent."""

    key: str = "api-key"
    """Key in the Secret whose value is the API key."""

    insecure: bool = False
    """Send the key unencrypted. Use it only on a network that nobody else can read. It is needed if `routers.tls.secret` is
    empty."""


class Test(_Values, frozen=True):
    enabled: bool = True
    """Create the pod of `helm test`."""

    model: str = ""
    """`helm test` requests a token of this model. Empty: it fetches `/openapi.json` from the routers."""

    api_key: ApiKey = ApiKey()


class Values(_Values, frozen=True):
    """All values of the chart."""

    name_override: Name = ""
    """Replaces the chart's name, `fleet`, in names of objects and in the label `app.kubernetes.io/name`."""

    fullname_override: Name = ""
    """Replaces the release's and the chart's name at the beginning of every object's name."""

    labels: Texts = {}
    """Further labels of every object of the release."""

    user: Annotated[int, Meta(ge=0)] = 65532
    """User id of all processes. 0: the platform, such as OpenShift, chooses the user id; the processes never run as root."""

    restricted_endpoint_slices: bool = False
    """Allow the writers of EndpointSlices (workers with `discovery.source: Kubernetes`, and routers that gateways
    ask) to create `endpointslices/restricted` too. Without this right, OpenShift may refuse addresses of pods. Off
    by default: if the cluster relies on this refusal, this right allows traffic that NetworkPolicies forbid."""

    crds: Crds = Crds()
    images: ChartImages = ChartImages()
    routers: Routers = Routers()
    operator: OperatorValues = OperatorValues()
    planner: PlannerValues = PlannerValues()
    network_policy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    tls: Tls = Tls()
    discovery: DiscoveryOfWorkers = DiscoveryOfWorkers()
    etcd: Etcd = Etcd()
    redis: Redis = Redis()
    test: Test = Test()

    global_: Open = field(default_factory=dict, name="global")
    """Not used by this chart. Helm passes the global values of a parent chart here."""
