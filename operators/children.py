"""The objects that a DisaggDeployment becomes, as manifests. Pure: the same deployment gives the same bytes.

Rules:

1. Everything is named after the deployment and carries its labels and an owner reference, so that it goes when the deployment goes.
2. Workers have one child for each role and revision: a Deployment, or a LeaderWorkerSet where a replica has several nodes. Where that kind
   is not served, each such replica is a StatefulSet of its own, whose pods find the same variables as a LeaderWorkerSet's. Pods never
   change: another specification is another revision, and `operators.scaling` moves replicas from one to the other. Of Deployments and
   LeaderWorkerSets `replicas` is not part of the manifest: whoever applies this has to say it.
3. A worker finds its routers by their control Service, which has no address of its own but names all their pods, and registers with each
   by pod name and address. Nothing else is needed to be found. Settings are a file in a ConfigMap; what only the pod knows is put in by `--set`.
4. What a user's `podTemplate` says counts: lists that have names (containers, environment, volumes, ports, mounts) are merged by them, other values
   are replaced.
5. Pods run as nobody, without privileges, with a read-only root; what they write goes to memory or to an emptyDir, and models that they
   fetch to the claim that keeps them, if one is named.
"""

import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from fleet.hub import repository_of
from operators.kinds import Served
from operators.resources import (
    GROUP,
    VERSION,
    DisaggDeploymentSpec,
    EngineKind,
    GpuVendor,
    KvPath,
    Role,
    RoleType,
)

Manifest = dict[str, Any]

HTTP, GRPC, CONTROL, WORKER, WORKER_CONTROL = 8000, 50051, 50052, 50060, 50061
GROUP_PORT = 50063
"""Where the first pod of a replica of several nodes hears the others."""

PICKER = 9002
"""Where gateways ask for an endpoint, by custom."""

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
ROLE = f"{GROUP}/role"
COMPONENT = "app.kubernetes.io/component"
TYPE = f"{GROUP}/type"
REVISION = f"{GROUP}/revision"
GROUP_LABEL = f"{GROUP}/group"
"""Of the StatefulSet and the pods of one replica that has several nodes: which one it is."""

LEADER, RANK = "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"
"""Variables of a group's pods, as a LeaderWorkerSet calls them; commands have them put in."""

SETTINGS = "/etc/fleet/settings.json"
SCRATCH = "/tmp"  # noqa: S108 - an emptyDir of the pod's own
MODELS = "/models"
HUB_CACHE = "/hub"
HUB_SECRET = "/etc/fleet-hub"  # noqa: S105 - the folder of one
REDIS_FOLDER = "/etc/fleet-redis"
SHARED_MEMORY = "4Gi"
SERVED = Served()
GRACE_SECONDS = 30
"""Between the end of a drain and the end of the pod: closing, and telling the router."""

GOODBYE_SECONDS = 5
"""Between the word that a router's pod is to end and its SIGTERM: until then everybody who sends requests there has heard of it."""

CONNECTION_SECONDS = 4
"""How long connections to a router last, give or take a tenth: none that was there before that word is there at the SIGTERM."""

ROLES = {RoleType.PREFILL: "prefill", RoleType.DECODE: "decode", RoleType.AGGREGATED: "both"}
PRODUCT_LABELS = {GpuVendor.NVIDIA: "nvidia.com/gpu.product", GpuVendor.AMD: "amd.com/gpu.product-name"}
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}


class Images(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What pods run where a deployment does not say it: the chart's values."""

    router: str
    worker_cpu: str
    worker_cuda: str
    worker_rocm: str

    def of(self, spec: DisaggDeploymentSpec, role: Role) -> str:
        if role.type is RoleType.ROUTER:
            return self.router
        if spec.image:
            return spec.image
        if not role.gpus.per_replica:
            return self.worker_cpu
        return self.worker_rocm if role.gpus.vendor is GpuVendor.AMD else self.worker_cuda


class Deployment(Struct, frozen=True, kw_only=True):
    """A DisaggDeployment as far as its children depend on it."""

    name: str
    namespace: str
    spec: DisaggDeploymentSpec
    uid: str = ""
    """Empty: it is not on a server, so nothing can be owned by it."""

    @property
    def workers(self) -> tuple[Role, ...]:
        return tuple(role for role in self.spec.roles if role.type is not RoleType.ROUTER)

    @property
    def router(self) -> Role:
        """The role of routers; one of a single replica where none is described."""
        given = (role for role in self.spec.roles if role.type is RoleType.ROUTER)
        return next(given, Role(name="router", type=RoleType.ROUTER))


def revision(deployment: Deployment, images: Images, served: Served = SERVED) -> str:
    """Of all workers, in 8 characters: the same for as long as nothing changes that a pod would have to be made anew for."""
    roles = sorted(deployment.workers, key=lambda role: role.name)
    pods: list[Any] = [[_pod(deployment, role, images, ""), _worker_settings(deployment, role)] for role in roles]
    pods += [GROUP_LABEL for role in roles if grouped(role, served)]
    return hashlib.sha256(msgspec.json.encode(pods, order="sorted")).hexdigest()[:8]


def grouped(role: Role, served: Served) -> bool:
    """Whether each replica is a StatefulSet of its own."""
    return role.nodes_per_replica > 1 and not served.leader_worker_sets


def is_foreign(role: Role) -> bool:
    """Whether a user's own command runs in its pods, of which nobody knows whether it ends when another pod of its group does."""
    pod = _mapping(role.pod_template.get("spec"))
    containers = pod.get("containers")
    mains = (
        [each for each in containers if _mapping(each).get("name") == "main"] if isinstance(containers, list) else []
    )
    return any(_mapping(each).get("command") for each in mains)


def child_name(deployment: Deployment, role: str, of_revision: str) -> str:
    """Of the settings of a role in a revision, of its child, and at the beginning of each of its StatefulSets."""
    return f"{deployment.name}-{role}-{of_revision}"


def shared(
    deployment: Deployment, images: Images, served: Served = SERVED, *, routers: int | None = None
) -> list[Manifest]:
    """What there is once: the router with its Services, and for each role a disruption budget, names for its pods, and who may reach them.

    Args:
        deployment: What is wished.
        images: Where it names none.
        served: Which kinds the API server has.
        routers: Replicas of the router; None: as the deployment says.
    """
    router, spec = deployment.router, deployment.spec
    picks = spec.routing.inference_pool.create and served.inference_pools
    settings = _router_settings(deployment) | ({"endpoint_picker": {"port": PICKER}} if picks else {})
    digest = hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:8]
    labels = _labels(deployment, router)
    doors = {"http": HTTP, "grpc": GRPC} | ({"picker": PICKER} if picks else {})
    made = [
        _config(deployment, router, settings),
        _object(
            deployment,
            "apps/v1",
            "Deployment",
            _child(deployment, router),
            labels,
            {
                "replicas": 0 if spec.suspend else router.replicas if routers is None else routers,
                "selector": {"matchLabels": _selected(deployment, router)},
                "strategy": {
                    "rollingUpdate": {
                        "maxSurge": router.rollout.max_surge,
                        "maxUnavailable": router.rollout.max_unavailable,
                    }
                },
                "template": _pod(deployment, router, images, digest, doors),
            },
        ),
        _service(deployment, router, _child(deployment, router), doors),
        _service(deployment, router, f"{_child(deployment, router)}-control", {"control": CONTROL}, unready=True),
    ]
    made += [_pod_names(deployment, role) for role in deployment.workers]
    made += [_disruption_budget(deployment, role) for role in (*deployment.workers, router)]
    made += [_to_workers(deployment), _to_router(deployment, doors)]
    if served.pod_monitors:
        made.append(_pod_monitor(deployment))
    if picks:
        made.append(_inference_pool(deployment))
    return made


def workers(
    deployment: Deployment, role: Role, of_revision: str, images: Images, served: Served = SERVED
) -> list[Manifest]:
    """The settings and the child of one role in one revision, without replicas; of `grouped` roles the settings alone."""
    name = child_name(deployment, role.name, of_revision)
    labels = _labels(deployment, role) | {REVISION: of_revision}
    config = _config(deployment, role, _worker_settings(deployment, role), of_revision)
    if grouped(role, served):
        return [config]
    template = _pod(deployment, role, images, of_revision)
    if role.nodes_per_replica > 1:
        # The leader's address is put in by its controller; of the rank only newer ones say it.
        rank = _field(RANK, "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']")
        template["spec"] = merged(template["spec"], {"containers": [{"name": "main", "env": [rank]}]})
        spec: Manifest = {
            "leaderWorkerTemplate": {
                "size": role.nodes_per_replica,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
            "startupPolicy": "LeaderCreated",
        }
        return [config, _object(deployment, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels, spec)]
    spec = {
        "selector": {"matchLabels": _selected(deployment, role) | {REVISION: of_revision}},
        "strategy": {"type": "Recreate"},  # its pods never change
        "template": template,
    }
    return [config, _object(deployment, "apps/v1", "Deployment", name, labels, spec)]


def group(deployment: Deployment, role: Role, of_revision: str, index: int, images: Images) -> Manifest:
    """One replica of several nodes as a StatefulSet. Its pods come and go at once, and know each other as in a LeaderWorkerSet."""
    name = f"{child_name(deployment, role.name, of_revision)}-{index}"
    labels = _labels(deployment, role) | {REVISION: of_revision, GROUP_LABEL: str(index)}
    template = _pod(deployment, role, images, of_revision)
    template["metadata"]["labels"] = template["metadata"]["labels"] | {GROUP_LABEL: str(index)}
    own = [
        {"name": LEADER, "value": f"{name}-0.{_child(deployment, role)}.{deployment.namespace}"},
        {"name": "LWS_GROUP_SIZE", "value": str(role.nodes_per_replica)},
        _field(RANK, "metadata.labels['apps.kubernetes.io/pod-index']"),
    ]
    template["spec"] = merged(template["spec"], {"containers": [{"name": "main", "env": own}]})
    if role.topology.domain:
        for term in template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]:
            if "matchLabelKeys" in term:
                term["matchLabelKeys"] = [GROUP_LABEL]
    spec: Manifest = {
        "serviceName": _child(deployment, role),
        "replicas": role.nodes_per_replica,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _selected(deployment, role) | {REVISION: of_revision, GROUP_LABEL: str(index)}},
        "template": template,
    }
    return _object(deployment, "apps/v1", "StatefulSet", name, labels, spec)


def role_scaler(deployment: Deployment, role: Role) -> Manifest:
    """What scales a role that its specification does not; from then on whoever scales it writes it."""
    spec = {"target": {"deployment": deployment.name, "role": role.name}, "replicas": role.replicas}
    api = f"{GROUP}/{VERSION}"
    return _object(deployment, api, "RoleScaler", _child(deployment, role), _labels(deployment, role), spec)


def router_service(deployment: Deployment) -> str:
    """Where clients bring their requests."""
    return _child(deployment, deployment.router)


def pod_selector(deployment: Deployment, role: str) -> str:
    """Of a role's pods, as `kubectl get -l` takes it."""
    return ",".join(f"{key}={value}" for key, value in {INSTANCE: deployment.name, ROLE: role}.items())


def _worker_settings(deployment: Deployment, role: Role) -> Manifest:
    spec = deployment.spec
    settings: Manifest = {
        "engine": spec.engine.value,
        "role": ROLES[role.type],
        "model": spec.model.name,
        "model_dir": _model_dir(deployment),
        **_hub(deployment),
        "registry": f"{_child(deployment, deployment.router)}-control.{deployment.namespace}:{CONTROL}",
        "listen": f"0.0.0.0:{WORKER}",
        "control_listen": f"0.0.0.0:{WORKER_CONTROL}",
        "drain_timeout_ms": role.drain.timeout_seconds * 1000,
        "kv_paths": [path.value for path in spec.kv_transfer.paths],
    }
    if KvPath.STORE in spec.kv_transfer.paths:
        settings["embedded_store"] = {
            "store_id": "",  # the pod's name, put in by it
            "listen": [f"unix:{SCRATCH}/store.sock"],
            "shm_socket": f"{SCRATCH}/store-memory.sock",
            "capacity_bytes": in_bytes(spec.kv_transfer.store_memory),
        }
        if spec.kv_transfer.redis:
            secret = {"password_file": f"{REDIS_FOLDER}/password"} if spec.kv_transfer.redis_secret else {}
            settings["embedded_store"]["tiers"] = [{"kind": "redis", "url": spec.kv_transfer.redis} | secret]
    if role.nodes_per_replica > 1:
        # Its rank and where the first is, only the pod knows.
        settings["group"] = {"nodes": role.nodes_per_replica, "listen": f"0.0.0.0:{GROUP_PORT}"}
    degree = role.parallelism
    if spec.engine is EngineKind.VLLM:
        given = {
            "tensor_parallel_size": degree.tensor,
            "pipeline_parallel_size": degree.pipeline,
            "data_parallel_size": degree.data,
        }
        extra: Manifest = {key: value for key, value in given.items() if value > 1}
        if degree.expert > 1:
            extra["enable_expert_parallel"] = True
        settings["vllm"] = {"enforce_eager": not role.gpus.per_replica, "extra_args": extra}
    return settings


def _router_settings(deployment: Deployment) -> Manifest:
    routing, spec = deployment.spec.routing, deployment.spec
    return {
        "http_listen": f"0.0.0.0:{HTTP}",
        "grpc_listen": f"0.0.0.0:{GRPC}",
        "control_listen": f"0.0.0.0:{CONTROL}",
        "connection_seconds": CONNECTION_SECONDS,
        "models": {spec.model.name: _model_dir(deployment)},
        **_hub(deployment),
        "policy": routing.policy,
        "remote_prefill_min_tokens": routing.disaggregate_above_tokens,
        "prefer_direct": spec.kv_transfer.paths[0] is KvPath.DIRECT,
        "drain_timeout_ms": deployment.router.drain.timeout_seconds * 1000,
    }


def _pod(
    deployment: Deployment, role: Role, images: Images, of_revision: str, doors: Mapping[str, int] | None = None
) -> Manifest:
    """The pod template, with what the user's says over it. `doors`: a router's ports for those who bring requests."""
    routes = role.type is RoleType.ROUTER
    ports = {**(doors or {}), "control": CONTROL} if routes else {"worker": WORKER}
    own = ["router_id=$(POD_NAME)"]
    if not routes:
        own = ["worker_id=$(POD_NAME)", f"advertise=$(POD_IP):{WORKER}", "generation=$(REVISION)"]
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
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            *([] if routes else [_field("REVISION", f"metadata.labels['{REVISION}']")]),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        # The last line of what it wrote says why it ended; nothing else of it is read (`operators.diagnosis`, rule 2).
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/fleet", "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH},
        ],
    }
    if routes:
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2}
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": GOODBYE_SECONDS}}}
    else:
        # A worker says that it is ready when it serves and its router knows it.
        container["readinessProbe"] = {"grpc": {"port": WORKER_CONTROL}, "periodSeconds": 2}
    if resources := _resources(role):
        container["resources"] = resources
    volumes: list[Manifest] = [
        {"name": "settings", "configMap": {"name": _config_name(deployment, role, of_revision)}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if not routes:
        # Ranks of an engine talk to each other there, and a container's own is 64 MiB.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - likewise
    if claim := deployment.spec.model.claim:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
    if not routes and (secret := deployment.spec.kv_transfer.redis_secret):
        volumes.append({"name": "redis", "secret": {"secretName": secret}})
        container["volumeMounts"].append({"name": "redis", "mountPath": REDIS_FOLDER, "readOnly": True})
    if _is_fetched(deployment):
        kept = deployment.spec.model.cache_claim
        source: Manifest = {"persistentVolumeClaim": {"claimName": kept}} if kept else {"emptyDir": {}}
        volumes.append({"name": "hub", **source})
        container["volumeMounts"].append({"name": "hub", "mountPath": HUB_CACHE})
        if secret := deployment.spec.model.token_secret:
            # Nothing else that may be in it; and where it is missing, the process says so, for which a pod would only wait.
            only = {"items": [{"key": "token", "path": "token"}], "optional": True}
            volumes.append({"name": "hub-token", "secret": {"secretName": secret} | only})
            container["volumeMounts"].append({"name": "hub-token", "mountPath": HUB_SECRET, "readOnly": True})
    pod: Manifest = {
        "containers": [container],
        "volumes": volumes,
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
                        "labelSelector": {"matchLabels": _selected(deployment, role)},
                        "matchLabelKeys": ["leaderworkerset.sigs.k8s.io/group-key"],
                    }
                ]
            }
        }
    labels = _labels(deployment, role) | ({REVISION: of_revision} if of_revision else {})
    template: Manifest = merged({"spec": pod}, role.pod_template)
    metadata = _mapping(template.get("metadata"))
    # What selects pods is not the user's to change.
    template["metadata"] = metadata | {"labels": _mapping(metadata.get("labels")) | labels}
    return template


def _mapping(value: Any) -> Manifest:
    """A part of a user's template, which nobody has checked."""
    return dict(value) if isinstance(value, Mapping) else {}


def merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """`theirs` over `ours`, as rule 4 has it."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {name: merged(ours.get(name), theirs.get(name), name) for name in dict.fromkeys((*ours, *theirs))}
    if theirs is None:
        return ours
    if isinstance(ours, Sequence) and not isinstance(ours, str) and (by := KEYS.get(key)):
        if not isinstance(theirs, Sequence) or isinstance(theirs, str):
            return theirs
        named, nameless = {item[by]: item for item in ours}, []
        for item in theirs:
            name = item.get(by) if isinstance(item, Mapping) else None
            if isinstance(name, str | int):
                named[name] = merged(named.get(name), item)
            else:
                nameless.append(item)  # the API server says what is wrong with it
        return [*named.values(), *nameless]
    return theirs


def _resources(role: Role) -> Manifest:
    """Of one pod: its share of the replica's GPUs, and as many RDMA devices."""
    if role.type is RoleType.ROUTER or not role.gpus.per_replica:
        return {}
    each = role.gpus.per_replica // role.nodes_per_replica
    limits: Manifest = {role.gpus.vendor.value: each}
    if role.topology.rdma:
        limits[role.topology.rdma] = each
    return {"limits": limits}


def _model_dir(deployment: Deployment) -> str:
    model = deployment.spec.model
    if model.claim:
        return f"{MODELS}/{model.uri}".rstrip("/")
    return model.uri or model.name


def _is_fetched(deployment: Deployment) -> bool:
    """Whether pods fetch the model from the hub, which is not so of folders in a volume or an image: their paths begin at the root."""
    return repository_of(_model_dir(deployment)) is not None


def _hub(deployment: Deployment) -> Manifest:
    """Where processes fetch the model from, where they do."""
    if not _is_fetched(deployment):
        return {}
    model = deployment.spec.model
    settings = {"cache": HUB_CACHE}
    if model.endpoint:
        settings["endpoint"] = model.endpoint
    if model.token_secret:
        settings["token_file"] = f"{HUB_SECRET}/token"
    return {"hub": settings}


def in_bytes(quantity: str) -> int:
    """Of a quantity of memory: ``8Gi``, ``500M``, ``1.5G``, ``1024``."""
    number = quantity.rstrip("kKMGTPEi")
    suffix = quantity[len(number) :]
    power = " kMGTPE".index(suffix[0].replace("K", "k")) if suffix else 0
    return int(Decimal(number) * (1024 if suffix.endswith("i") else 1000) ** power)


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _child(deployment: Deployment, role: Role) -> str:
    return f"{deployment.name}-{role.name}"


def _config_name(deployment: Deployment, role: Role, of_revision: str) -> str:
    """A router's keeps its name: what counts is the revision in the labels of its pods."""
    base = _child(deployment, role)
    return base if role.type is RoleType.ROUTER or not of_revision else f"{base}-{of_revision}"


def _selected(deployment: Deployment, role: Role) -> dict[str, str]:
    return {INSTANCE: deployment.name, ROLE: role.name}


def _labels(deployment: Deployment, role: Role) -> dict[str, str]:
    return _selected(deployment, role) | {NAME: "fleet", MANAGED_BY: "fleet-operator", TYPE: role.type.value}


def _object(
    deployment: Deployment, api: str, kind: str, name: str, labels: Mapping[str, str], spec: Manifest
) -> Manifest:
    metadata: Manifest = {"name": name, "namespace": deployment.namespace, "labels": dict(labels)}
    if deployment.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "DisaggDeployment",
                "name": deployment.name,
                "uid": deployment.uid,
                "controller": True,
                "blockOwnerDeletion": False,  # see operators.access, rule 4
            }
        ]
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _config(deployment: Deployment, role: Role, settings: Manifest, of_revision: str = "") -> Manifest:
    made = _object(
        deployment, "v1", "ConfigMap", _config_name(deployment, role, of_revision), _labels(deployment, role), {}
    )
    del made["spec"]
    return made | {"data": {"settings.json": msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()}}


def _service(
    deployment: Deployment, role: Role, name: str, ports: Mapping[str, int], *, unready: bool = False
) -> Manifest:
    """`unready`: workers register with every router, and before it is ready, which it is when it has workers: names for its pods."""
    spec: Manifest = {
        "selector": _selected(deployment, role),
        "ports": [
            {"name": port, "port": number, "targetPort": port, "protocol": "TCP"} for port, number in ports.items()
        ],
    }
    if unready:
        spec |= {"publishNotReadyAddresses": True, "clusterIP": "None"}
    return _object(deployment, "v1", "Service", name, _labels(deployment, role), spec)


def _disruption_budget(deployment: Deployment, role: Role) -> Manifest:
    """As many pods as a rollout may take replicas away, and one at least, or no node could ever be emptied."""
    spec = {
        "maxUnavailable": max(1, role.rollout.max_unavailable),
        # What is not ready serves nobody, and must not keep a node from being emptied.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _selected(deployment, role)},
    }
    return _object(
        deployment, "policy/v1", "PodDisruptionBudget", _child(deployment, role), _labels(deployment, role), spec
    )


def _pod_names(deployment: Deployment, role: Role) -> Manifest:
    """A headless Service: pods of one replica find each other before any of them is ready."""
    made = _service(deployment, role, _child(deployment, role), {"worker": WORKER}, unready=True)
    made["spec"]["clusterIP"] = "None"
    return made


def _to_workers(deployment: Deployment) -> Manifest:
    """Who reaches workers: their routers, and each other, on whatever ports engines hand blocks over."""
    spec = {
        "podSelector": _workers_of(deployment),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": _workers_of(deployment)}]},
            {
                "from": [{"podSelector": {"matchLabels": _selected(deployment, deployment.router)}}],
                "ports": [{"port": "worker", "protocol": "TCP"}],
            },
        ],
    }
    return _of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-workers", spec)


def _to_router(deployment: Deployment, doors: Mapping[str, int]) -> Manifest:
    """Who reaches routers: clients where requests come in; where workers register, only our own pods: workers, other routers, the operator."""
    ours = [
        {"podSelector": {"matchLabels": {INSTANCE: deployment.name, NAME: "fleet"}}},
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {COMPONENT: "operator", PART_OF: "fleet"}}},
    ]
    spec = {
        "podSelector": {"matchLabels": _selected(deployment, deployment.router)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"port": door, "protocol": "TCP"} for door in doors]},
            {"from": ours, "ports": [{"port": "control", "protocol": "TCP"}]},
        ],
    }
    return _of_all(deployment, "networking.k8s.io/v1", "NetworkPolicy", f"{deployment.name}-router", spec)


def _pod_monitor(deployment: Deployment) -> Manifest:
    """Routers have metrics; what workers do is in them."""
    spec = {
        "selector": {"matchLabels": _selected(deployment, deployment.router)},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
    }
    return _of_all(deployment, "monitoring.coreos.com/v1", "PodMonitor", f"{deployment.name}-router", spec)


def _inference_pool(deployment: Deployment) -> Manifest:
    """Gateways send requests to what this selects: the routers, which carry out what their endpoint picker has placed."""
    router = deployment.router
    spec = {
        "selector": {"matchLabels": _selected(deployment, router)},
        "targetPorts": [{"number": HTTP}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": _child(deployment, router),
            "port": {"number": PICKER},
            "failureMode": deployment.spec.routing.inference_pool.failure_mode.value,
        },
    }
    return _of_all(deployment, "inference.networking.k8s.io/v1", "InferencePool", deployment.name, spec)


def _workers_of(deployment: Deployment) -> Manifest:
    types = sorted({role.type.value for role in deployment.workers})
    return {
        "matchLabels": {INSTANCE: deployment.name},
        "matchExpressions": [{"key": TYPE, "operator": "In", "values": types}],
    }


def _of_all(deployment: Deployment, api: str, kind: str, name: str, spec: Manifest) -> Manifest:
    """Something that is of no single role."""
    labels = {INSTANCE: deployment.name, NAME: "fleet", MANAGED_BY: "fleet-operator"}
    return _object(deployment, api, kind, name, labels, spec)
