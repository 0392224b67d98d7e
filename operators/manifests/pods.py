"""Pod templates: builds the pod template of each role, and merges it with the user's `podTemplate`.

Kubernetes ends a pod with SIGTERM, which begins the drain of the worker (`workers.machine`). The grace period of a pod
is the drain timeout of its role plus `GRACE_SECONDS`. This module also sets the startup, readiness and liveness probes
of all pods.

`operators.manifests.workloads` builds the workloads that contain the pod templates.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from fleet.core.roles import KvPath
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType
from operators.api.fields import GpuVendor
from operators.manifests.names import (
    CONTROL,
    GROUP_PORT,
    HEALTH,
    HTTP,
    LEADER,
    PEERS,
    RANK,
    REVISION,
    SPEAKS_TLS,
    WORKER,
    WORKER_CONTROL,
    DesiredDeployment,
    config_name,
    labels_of,
    selected,
)
from operators.manifests.objects import Manifest, from_field, mapping
from operators.manifests.resources import limited_by_user, resources
from operators.manifests.settings import (
    CLIENT_TLS,
    CONTROL_FOLDER,
    HUB_CACHE,
    HUB_SECRET,
    METRICS_TLS,
    MODELS,
    REDIS_FOLDER,
    SCRATCH,
    TRACING_AUTHORITY,
    TRACING_HEADERS,
    is_fetched,
    metrics_ports,
)

SETTINGS = "/etc/fleet/settings.json"

SHARED_MEMORY = "4Gi"

GRACE_SECONDS = 30
"""Seconds that a pod gets after the time limit of its drain, to close its connections and to tell its peers that it
ends."""

PRE_STOP_SECONDS = 5
"""Seconds between the deletion of a router's pod and the SIGTERM to the router. In this time, gateways and other
clients learn that the pod ends, and stop sending requests to it.
"""

LIVENESS = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
"""Liveness probe: a process that does not answer for a minute is restarted. The limit is long, because a busy machine
may pause for seconds, and a restart costs minutes.
"""

ROUTER_START = {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 660}
"""Startup probe of routers, which fetch a small tokenizer before they listen. The limit is longer than the time after which a router gives
up a hub that sends nothing (`fleet.core.hub.HubSettings.patience_seconds`). So such a router ends by itself and reports the cause."""

WORKER_START = {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 43_200}
"""Startup probe of workers, which listen only when their engine runs. The limit is a day, because a worker may have to
fetch and load hundreds of gigabytes. A worker that fails to load its model ends by itself."""

PRODUCT_LABELS = {GpuVendor.NVIDIA: "nvidia.com/gpu.product", GpuVendor.AMD: "amd.com/gpu.product-name"}

KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
}
"""Fields that identify an item of a list of the pod template. Two items with equal values of these fields are merged."""

DEFAULTS = {"protocol": "TCP"}
"""Values that the API server gives to fields in `KEYS` that an item leaves out."""


class Images(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the default container images of routers and workers, which come from the values of the Helm chart."""

    router: str
    """Image of routers."""

    worker_cpu: str
    """Image of workers on CPUs."""

    worker_cuda: str
    """Image of workers on NVIDIA GPUs."""

    worker_rocm: str
    """Image of workers on AMD GPUs."""

    def of(self, spec: DisaggDeploymentSpec, role: RoleSpec) -> str:
        if role.type is RoleType.ROUTER:
            return self.router
        if spec.image:
            return spec.image
        if not role.gpus.per_replica:
            return self.worker_cpu
        return self.worker_rocm if role.gpus.vendor is GpuVendor.AMD else self.worker_cuda


def is_foreign(role: RoleSpec) -> bool:
    """Return whether the pods of a role run a command of the user instead of Fleet's process.

    A process of the user may go on running when another pod of its worker group ends.
    """
    return bool(_users_main(role).get("command"))


def _users_main(role: RoleSpec) -> Manifest:
    """Return the container `main` of the user's podTemplate, or an empty object if it contains none."""
    containers = mapping(role.pod_template.get("spec")).get("containers")
    named = [mapping(each) for each in containers] if isinstance(containers, list) else []
    return next((each for each in named if each.get("name") == "main"), {})


def _with_users_limits(template: Manifest, role: RoleSpec) -> Manifest:
    """Return the merged template without the operator's requests for resources for which the user has set only a limit.

    `operators.manifests.resources.limited_by_user` removes these requests.
    """
    pod, theirs = template["spec"], _users_main(role)
    if not theirs or not isinstance(pod, Mapping) or not isinstance(pod.get("containers"), list):
        return template
    containers = [
        limited_by_user(each, theirs) if isinstance(each, Mapping) and each.get("name") == "main" else each
        for each in pod["containers"]
    ]
    return {**template, "spec": {**pod, "containers": containers}}


def pod_template(
    deployment: DesiredDeployment,
    role: RoleSpec,
    images: Images,
    of_revision: str,
    client_ports: Mapping[str, int] | None = None,
) -> Manifest:
    """Return the pod template of a role, merged with the user's `podTemplate`.

    For the role of routers, `client_ports` are the ports to which clients send requests, by name.
    """
    mounted = list(_mounted(deployment, role, of_revision))
    ports = (
        {
            **(client_ports or {}),
            "health": HEALTH,
            "control": CONTROL,
            **({"peers": PEERS} if deployment.control_secret else {}),
        }
        if role.type is RoleType.ROUTER
        else {"worker": WORKER, **metrics_ports(deployment)}
    )
    mounts = [{"name": name, **mount} for name, _, mount in mounted]
    pod: Manifest = {
        "containers": [_container(deployment, role, images, ports, mounts)],
        "volumes": [{"name": name, **volume} for name, volume, _ in mounted],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": role.drain.timeout_seconds + GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if role.gpus.product:
        pod["nodeSelector"] = {PRODUCT_LABELS[role.gpus.vendor]: role.gpus.product}
    if role.topology.domain and role.nodes_per_replica > 1:
        pod["affinity"] = {
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": role.topology.domain,
                        "labelSelector": {"matchLabels": selected(deployment, role)},
                        "matchLabelKeys": ["leaderworkerset.sigs.k8s.io/group-key"],
                    }
                ]
            }
        }
    labels = labels_of(deployment, role) | ({REVISION: of_revision} if of_revision else {})
    if role.type is RoleType.ROUTER and deployment.spec.routing.tls_secret:
        labels[SPEAKS_TLS] = "true"
    template: Manifest = _with_users_limits(merged({"spec": pod}, role.pod_template), role)
    if isinstance(spec := template["spec"], Mapping) and spec.get("hostNetwork") and "dnsPolicy" not in spec:
        # With `hostNetwork` and without this setting, pods would use the node's DNS resolver, which knows no Services.
        template["spec"] = {**spec, "dnsPolicy": "ClusterFirstWithHostNet"}
    metadata = mapping(template.get("metadata"))
    # These labels come last, because the user must not change the labels by which Services and controllers select pods.
    template["metadata"] = metadata | {"labels": mapping(metadata.get("labels")) | labels}
    return template


def _container(
    deployment: DesiredDeployment, role: RoleSpec, images: Images, ports: Mapping[str, int], mounts: list[Manifest]
) -> Manifest:
    """Return the operator's container `main`, which runs Fleet's process. The user's `podTemplate` is merged over it later."""
    routes = role.type is RoleType.ROUTER
    own = ["router_id=$(POD_NAME)"]
    if not routes:
        # The value is quoted, because a digest such as 4407e947 would be read as a number.
        own = ["worker_id=$(POD_NAME)", f"advertise=$(POD_IP):{WORKER}", 'generation="$(REVISION)"']
    if routes and deployment.control_secret:
        own.append(f"replicas_listen=$(POD_IP):{PEERS}")
    if "picker" in ports:
        own.append(f"endpoint_picker.router_endpoint=$(POD_IP):{HTTP}")
    if not routes and role.nodes_per_replica > 1:
        own += [f"group.rank=$({RANK})", f"group.leader=$({LEADER}):{GROUP_PORT}"]
    if not routes and KvPath.STORE in deployment.spec.kv_transfer.paths:
        own.append("embedded_store.store_id=$(POD_NAME)")
    container: Manifest = {
        "name": "main",
        "image": images.of(deployment.spec, role),
        "command": [
            "fleet",
            "serve",
            "router" if routes else "worker",
            "--config",
            SETTINGS,
            *(part for each in own for part in ("--set", each)),
        ],
        "env": [
            from_field("POD_NAME", "metadata.name"),
            from_field("POD_IP", "status.podIP"),
            *([] if routes else [from_field("REVISION", f"metadata.labels['{REVISION}']")]),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        # The last output line has the reason why a process ended (`operators.observed.pod_troubles`, rule 2).
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }
    scheme = {"scheme": "HTTPS"} if deployment.spec.routing.tls_secret else {}
    # A container with a command of the user gets no startup and liveness probes: the command may not answer them, and the
    # kubelet would then restart the container.
    if not is_foreign(role):
        live = (
            # Clients cannot use up the connections of this port, so a healthy router always answers the probe.
            {"httpGet": {"path": "/live", "port": "health"} | scheme}
            if routes
            else {"grpc": {"port": WORKER_CONTROL, "service": "liveness"}}
        )
        container["startupProbe"] = live | (ROUTER_START if routes else WORKER_START)
        container["livenessProbe"] = live | LIVENESS
    if routes:
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": "health"} | scheme,
            "periodSeconds": 2,
        }
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}}
    else:
        # A worker reports that it is ready when it serves requests and at least one router knows it.
        container["readinessProbe"] = {"grpc": {"port": WORKER_CONTROL}, "periodSeconds": 2}
    container["resources"] = resources(deployment, role)
    return container


def _mounted(
    deployment: DesiredDeployment, role: RoleSpec, of_revision: str
) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Yield the name, the source and the mount of each volume of a pod."""
    routes, model, transfer = role.type is RoleType.ROUTER, deployment.spec.model, deployment.spec.kv_transfer
    settings = {"name": config_name(deployment, role, of_revision)}
    yield "settings", {"configMap": settings}, {"mountPath": "/etc/fleet", "readOnly": True}
    yield "scratch", {"emptyDir": {}}, {"mountPath": SCRATCH}
    if not routes:
        # The ranks of an engine exchange data in shared memory, and the default size in a container is only 64 MiB.
        memory = {"medium": "Memory", "sizeLimit": SHARED_MEMORY}
        yield "shm", {"emptyDir": memory}, {"mountPath": "/dev/shm"}  # noqa: S108 - a volume of the pod
    if deployment.control_secret:
        control = {"secretName": deployment.control_secret}
        yield "control", {"secret": control}, {"mountPath": CONTROL_FOLDER, "readOnly": True}
    if model.claim:
        claim = {"claimName": model.claim, "readOnly": True}
        yield "models", {"persistentVolumeClaim": claim}, {"mountPath": MODELS, "readOnly": True}
    if not routes and transfer.redis_secret:
        password = {"secretName": transfer.redis_secret}
        yield "redis", {"secret": password}, {"mountPath": REDIS_FOLDER, "readOnly": True}
    if not routes and (secret_name := deployment.spec.worker_metrics.tls_secret):
        yield "metrics-tls", {"secret": {"secretName": secret_name}}, {"mountPath": METRICS_TLS, "readOnly": True}
    if routes and (secret_name := deployment.spec.routing.tls_secret):
        yield "client-tls", {"secret": {"secretName": secret_name}}, {"mountPath": CLIENT_TLS, "readOnly": True}
    tracing = deployment.spec.tracing
    if tracing.headers_secret:
        headers = {"secretName": tracing.headers_secret}
        yield "tracing-headers", {"secret": headers}, {"mountPath": TRACING_HEADERS, "readOnly": True}
    if tracing.authority_secret:
        # Only the certificate of the authority is mounted, because such a Secret often holds a private key too.
        authority = {"secretName": tracing.authority_secret, "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        yield "tracing-authority", {"secret": authority}, {"mountPath": TRACING_AUTHORITY, "readOnly": True}
    if is_fetched(deployment):
        kept: Manifest = {"persistentVolumeClaim": {"claimName": model.cache_claim}}
        yield "hub", kept if model.cache_claim else {"emptyDir": {}}, {"mountPath": HUB_CACHE}
        if model.token_secret:
            # Only the token is mounted. A pod starts even if the token is missing, and its process then reports this.
            only = {"items": [{"key": "token", "path": "token"}], "optional": True}
            secret = {"secretName": model.token_secret} | only
            yield "hub-token", {"secret": secret}, {"mountPath": HUB_SECRET, "readOnly": True}


def merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """Merge a part of the user's pod template over the operator's part (rule 4 of `operators.manifests`)."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {name: merged(ours.get(name), theirs.get(name), name) for name in dict.fromkeys((*ours, *theirs))}
    if theirs is None:
        return ours
    if isinstance(ours, Sequence) and not isinstance(ours, str) and (by := KEYS.get(key)):
        if not isinstance(theirs, Sequence) or isinstance(theirs, str):
            return theirs
        (named, faulty), (their_named, their_faulty) = _by_key(ours, by), _by_key(theirs, by)
        for key_values, item in their_named.items():
            named[key_values] = merged(named.get(key_values), item)
        return [*named.values(), *faulty, *their_faulty]
    return theirs


def _by_key(items: Sequence[Any], fields: Sequence[str]) -> tuple[dict[tuple[Any, ...], Any], list[Any]]:
    """Return the items by the values of the fields that identify them, and a list of the faulty items.

    An item without a key, or with a repeated key, is faulty. It is kept as it is, and the API server judges it.
    """
    named: dict[tuple[Any, ...], Any] = {}
    faulty = []
    for item in items:
        key_values = _item_key(item, fields)
        if key_values is None or key_values in named:
            faulty.append(item)
        else:
            named[key_values] = item
    return named, faulty


def _item_key(item: Any, fields: Sequence[str]) -> tuple[Any, ...] | None:
    """Return the values of the fields that identify an item of a list. Return None if the item has no such values."""
    if not isinstance(item, Mapping):
        return None
    values = tuple(item.get(field) or DEFAULTS.get(field) for field in fields)
    return values if all(isinstance(each, str | int) for each in values) else None
