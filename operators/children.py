"""The objects that a DisaggDeployment becomes, as manifests. Pure: the same deployment gives the same bytes.

Rules:

1. Everything is named after the deployment and carries its labels and an owner reference, so that it goes when the deployment goes.
2. Workers have one child for each role and revision: a Deployment, or a LeaderWorkerSet where a replica has several nodes. Its pods never
   change: another specification is another revision, and `operators.scaling` moves replicas from one to the other. Its `replicas` is
   not part of the manifest: whoever applies this has to say it.
3. A worker finds its router by the router's control Service, and registers there by pod name and address. Nothing else is needed to
   be found. Settings are a file in a ConfigMap; what only the pod knows is put in by `--set`.
4. What a user's `podTemplate` says counts: lists that have names (containers, environment, volumes, ports, mounts) are merged by them, other values
   are replaced.
5. Pods run as nobody, without privileges, with a read-only root; what they write goes to memory or to an emptyDir.
"""

import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct

from operators.resources import (
    GROUP,
    VERSION,
    DisaggDeploymentSpec,
    EngineKind,
    Fallback,
    GpuVendor,
    KvPath,
    Role,
    RoleType,
)

Manifest = dict[str, Any]

HTTP, GRPC, CONTROL, WORKER = 8000, 50051, 50052, 50060
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
ROLE = f"{GROUP}/role"
TYPE = f"{GROUP}/type"
REVISION = f"{GROUP}/revision"
SETTINGS = "/etc/fleet/settings.json"
SCRATCH = "/tmp"  # noqa: S108 - an emptyDir of the pod's own
MODELS = "/models"
SHARED_MEMORY = "4Gi"
GRACE_SECONDS = 30
"""Between the end of a drain and the end of the pod: closing, and telling the router."""

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


class Images(Struct, frozen=True, kw_only=True):
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


def revision(deployment: Deployment, images: Images) -> str:
    """Of all workers, in 8 characters: the same for as long as nothing changes that a pod would have to be made anew for."""
    roles = sorted(deployment.workers, key=lambda role: role.name)
    pods = [[_pod(deployment, role, images, ""), _worker_settings(deployment, role)] for role in roles]
    return hashlib.sha256(msgspec.json.encode(pods, order="sorted")).hexdigest()[:8]


def shared(deployment: Deployment, images: Images) -> list[Manifest]:
    """What there is once: the router with its Services, and a disruption budget for each role of workers."""
    router = deployment.router
    settings = _router_settings(deployment)
    digest = hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:8]
    labels = _labels(deployment, router)
    template = _pod(deployment, router, images, digest)
    made = [
        _config(deployment, router, settings),
        _object(
            deployment,
            "apps/v1",
            "Deployment",
            _child(deployment, router),
            labels,
            {
                "replicas": 0 if deployment.spec.suspend else router.replicas,
                "selector": {"matchLabels": _selected(deployment, router)},
                "strategy": {
                    "rollingUpdate": {
                        "maxSurge": router.rollout.max_surge,
                        "maxUnavailable": router.rollout.max_unavailable,
                    }
                },
                "template": template,
            },
        ),
        _service(deployment, router, _child(deployment, router), {"http": HTTP, "grpc": GRPC}),
        _service(deployment, router, f"{_child(deployment, router)}-control", {"control": CONTROL}, unready=True),
    ]
    made += [_disruption_budget(deployment, role) for role in (*deployment.workers, router)]
    return made


def workers(deployment: Deployment, role: Role, of_revision: str, images: Images) -> list[Manifest]:
    """The children of one role in one revision, without replicas."""
    name = f"{_child(deployment, role)}-{of_revision}"
    labels = _labels(deployment, role) | {REVISION: of_revision}
    template = _pod(deployment, role, images, of_revision)
    config = _config(deployment, role, _worker_settings(deployment, role), of_revision)
    if role.nodes_per_replica > 1:
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


def _worker_settings(deployment: Deployment, role: Role) -> Manifest:
    spec = deployment.spec
    settings: Manifest = {
        "engine": spec.engine.value,
        "role": ROLES[role.type],
        "model": spec.model.name,
        "model_dir": _model_dir(deployment),
        "registry": f"{_child(deployment, deployment.router)}-control.{deployment.namespace}:{CONTROL}",
        "listen": f"0.0.0.0:{WORKER}",
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
        if role.nodes_per_replica > 1:
            extra["nnodes"] = role.nodes_per_replica
        settings["vllm"] = {"enforce_eager": not role.gpus.per_replica, "extra_args": extra}
    return settings


def _router_settings(deployment: Deployment) -> Manifest:
    routing, spec = deployment.spec.routing, deployment.spec
    settings: Manifest = {
        "http_listen": f"0.0.0.0:{HTTP}",
        "grpc_listen": f"0.0.0.0:{GRPC}",
        "control_listen": f"0.0.0.0:{CONTROL}",
        "models": {spec.model.name: _model_dir(deployment)},
        "policy": routing.policy,
        "remote_prefill_min_tokens": routing.disaggregate_above_tokens,
        "prefer_direct": spec.kv_transfer.paths[0] is KvPath.DIRECT,
    }
    if routing.fallback is Fallback.REJECT:
        settings["max_queued"] = 0
    return settings


def _pod(deployment: Deployment, role: Role, images: Images, of_revision: str) -> Manifest:
    """The pod template, with what the user's says over it."""
    routes = role.type is RoleType.ROUTER
    ports = {"http": HTTP, "grpc": GRPC, "control": CONTROL} if routes else {"worker": WORKER}
    own = ["router_id=$(POD_NAME)"] if routes else ["worker_id=$(POD_NAME)", f"advertise=$(POD_IP):{WORKER}"]
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
        "env": [_field("POD_NAME", "metadata.name"), _field("POD_IP", "status.podIP")],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
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
    else:
        container["readinessProbe"] = {"tcpSocket": {"port": "worker"}, "periodSeconds": 2}
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
    if secret := deployment.spec.model.token_secret:
        reference = {"secretKeyRef": {"name": secret, "key": "token"}}
        container["env"].append({"name": "HF_TOKEN", "valueFrom": reference})
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
    metadata = template.get("metadata", {})
    # What selects pods is not the user's to change.
    template["metadata"] = metadata | {"labels": metadata.get("labels", {}) | labels}
    return template


def merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """`theirs` over `ours`, as rule 4 has it."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {name: merged(ours.get(name), theirs.get(name), name) for name in dict.fromkeys((*ours, *theirs))}
    if theirs is None:
        return ours
    if isinstance(ours, Sequence) and not isinstance(ours, str) and (by := KEYS.get(key)):
        named = {item[by]: item for item in ours}
        for item in theirs:
            named[item[by]] = merged(named.get(item[by]), item)
        return list(named.values())
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
                "blockOwnerDeletion": True,
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
    """`unready`: workers register before the router is ready, which it is when it has workers."""
    spec: Manifest = {
        "selector": _selected(deployment, role),
        "ports": [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()],
    }
    if unready:
        spec["publishNotReadyAddresses"] = True
    return _object(deployment, "v1", "Service", name, _labels(deployment, role), spec)


def _disruption_budget(deployment: Deployment, role: Role) -> Manifest:
    """As many as a rollout may take away, and one at least, or no node could ever be emptied."""
    spec = {
        "maxUnavailable": max(1, role.rollout.max_unavailable),
        "selector": {"matchLabels": _selected(deployment, role)},
    }
    return _object(
        deployment, "policy/v1", "PodDisruptionBudget", _child(deployment, role), _labels(deployment, role), spec
    )
