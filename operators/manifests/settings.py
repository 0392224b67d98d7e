"""Settings: builds the settings files of the routers and workers in the pods of a deployment."""

from collections.abc import Mapping
from decimal import Decimal

import msgspec

from fleet.core.hub import parse_repository
from fleet.core.roles import KvPath
from operators.api.disagg_deployment import EngineKind, RoleSpec, RoleType, ServedTask, WatchdogSpec
from operators.manifests.names import (
    CONTROL,
    CONTROL_SECRET_KEY,
    GROUP_PORT,
    GRPC,
    HEALTH,
    HTTP,
    METRICS,
    PEERS,
    STORE_METRICS,
    WORKER,
    WORKER_CONTROL,
    DesiredDeployment,
    config_name,
    control_host,
    labels_of,
)
from operators.manifests.objects import Manifest, object_of

SCRATCH = "/tmp"  # noqa: S108 - an emptyDir of the pod
MODELS = "/models"
HUB_CACHE = "/hub"
HUB_SECRET = "/etc/fleet-hub"  # noqa: S105 - the folder of a secret, not its value
REDIS_FOLDER = "/etc/fleet-redis"
METRICS_TLS = "/etc/fleet-metrics-tls"
CLIENT_TLS = "/etc/fleet-client-tls"
TRACING_HEADERS = "/etc/fleet-tracing-headers"
TRACING_AUTHORITY = "/etc/fleet-tracing-authority"
CONTROL_FOLDER = "/etc/fleet-control"

_CONTROL_FILE = f"{CONTROL_FOLDER}/{CONTROL_SECRET_KEY}"

CONNECTION_SECONDS = 4
"""Seconds after which a router asks a client to open a new connection, by closing the old one; the time varies by up to a
tenth. It is less than `operators.manifests.pods.PRE_STOP_SECONDS`. So when a pod gets SIGTERM, the connections that were
opened before its deletion have been closed."""

PATIENCE_SECONDS = 120.0
"""Seconds without data after which a router stops fetching a tokenizer, which has only a few megabytes. The router then
ends, and its last output line tells the operator the reason (`operators.observed.pod_troubles`). Workers fetch large
weights, so they use the longer default limit of the hub's client."""

ROLES = {RoleType.PREFILL: "prefill", RoleType.DECODE: "decode", RoleType.AGGREGATED: "both"}


def worker_settings(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    spec = deployment.spec
    settings: Manifest = {
        "engine": spec.engine.value,
        "role": ROLES[role.type],
        "model": spec.model.name,
        "model_dir": _model_dir(deployment),
        **_hub(deployment),
        "registry": f"{control_host(deployment)}:{CONTROL}",
        **({"registry_credentials": {"secret_file": _CONTROL_FILE}} if deployment.control_secret else {}),
        "listen": f"0.0.0.0:{WORKER}",
        # Without a control secret that both sides prove, only the deployment's NetworkPolicy protects the port.
        "credentials": {"secret_file": _CONTROL_FILE} if deployment.control_secret else {"insecure": True},
        "control_listen": f"0.0.0.0:{WORKER_CONTROL}",
        "control_credentials": {"secret_file": _CONTROL_FILE} if deployment.control_secret else {"insecure": True},
        "drain_timeout_ms": role.drain.timeout_seconds * 1000,
        "kv_paths": [path.value for path in spec.kv_transfer.paths],
        **_tracing(deployment),
        **_metrics(deployment, METRICS),
    }
    if spec.task is not ServedTask.GENERATE:
        settings |= {"task": spec.task.value, "kv_paths": []}
    if KvPath.STORE in spec.kv_transfer.paths:
        settings["embedded_store"] = {
            "store_id": "",  # each pod fills in its own name
            "listen": [f"unix:{SCRATCH}/store.sock"],
            "shm_socket": f"{SCRATCH}/store-memory.sock",
            "capacity_bytes": in_bytes(spec.kv_transfer.store_memory),
            **_tracing(deployment),
            **_metrics(deployment, STORE_METRICS),
        }
        if spec.kv_transfer.redis:
            secret = {"password_file": f"{REDIS_FOLDER}/password"} if spec.kv_transfer.redis_secret else {}
            settings["embedded_store"]["tiers"] = [{"kind": "redis", "url": spec.kv_transfer.redis} | secret]
    if role.nodes_per_replica > 1:
        # Only the pod knows its rank and the leader's address, so arguments of its command add these two settings.
        settings["group"] = {"nodes": role.nodes_per_replica, "listen": f"0.0.0.0:{GROUP_PORT}"}
    if spec.watchdog != WatchdogSpec():
        settings["watchdog"] = {
            "enabled": spec.watchdog.enabled,
            "floor_seconds": spec.watchdog.floor_seconds,
            "ceiling_seconds": spec.watchdog.ceiling_seconds,
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
        settings["vllm"] = {"enforce_eager": not role.gpus.per_replica, "extra_args": extra}
    return settings


def router_settings(deployment: DesiredDeployment) -> Manifest:
    routing, spec = deployment.spec.routing, deployment.spec
    return {
        "http_listen": f"0.0.0.0:{HTTP}",
        "grpc_listen": f"0.0.0.0:{GRPC}",
        "health_listen": f"0.0.0.0:{HEALTH}",
        "control_listen": f"0.0.0.0:{CONTROL}",
        # Without a control secret, only the NetworkPolicy of the deployment protects the port.
        "control_credentials": {"secret_file": _CONTROL_FILE} if deployment.control_secret else {"insecure": True},
        **(_proven_by_routers(deployment) if deployment.control_secret else {}),
        "connection_seconds": CONNECTION_SECONDS,
        "models": {spec.model.name: _model_dir(deployment)},
        **_hub(deployment, patience_seconds=PATIENCE_SECONDS),
        "policy": routing.policy,
        "remote_prefill_min_tokens": routing.disaggregate_above_tokens,
        "prefer_direct": spec.kv_transfer.paths[0] is KvPath.DIRECT,
        "drain_timeout_ms": deployment.router.drain.timeout_seconds * 1000,
        **_client_tls(deployment),
        **_tracing(deployment),
    }


def _client_tls(deployment: DesiredDeployment) -> Manifest:
    """Return the section `tls` of a router's settings; empty if its ports do not speak TLS."""
    if not deployment.spec.routing.tls_secret:
        return {}
    return {"tls": {"certificate": f"{CLIENT_TLS}/tls.crt", "key": f"{CLIENT_TLS}/tls.key", "health": True}}


def _tracing(deployment: DesiredDeployment) -> Manifest:
    """Return the section `tracing` of a settings file, equal for all processes; empty if tracing is off."""
    tracing = deployment.spec.tracing
    if not tracing.endpoint:
        return {}
    section = {
        "endpoint": tracing.endpoint,
        "protocol": tracing.protocol.value,
        "sample_ratio": tracing.sample_percent / 100,
        "keep_errors": tracing.keep_errors,
        "slow_first_token_seconds": tracing.slow_first_token_seconds,
        "slow_seconds": tracing.slow_seconds,
    }
    if tracing.headers_secret:
        section["headers_file"] = f"{TRACING_HEADERS}/headers"
    if tracing.authority_secret:
        section["certificate"] = f"{TRACING_AUTHORITY}/ca.crt"
    return {"tracing": section}


def metrics_ports(deployment: DesiredDeployment) -> Mapping[str, int]:
    """Return the metrics ports of a worker's pod by name; empty if the deployment does not open them."""
    spec = deployment.spec
    if not spec.worker_metrics.key_sha256:
        return {}
    stored = {"store-metrics": STORE_METRICS} if KvPath.STORE in spec.kv_transfer.paths else {}
    return {"metrics": METRICS, **stored}


def _metrics(deployment: DesiredDeployment, port: int) -> Manifest:
    """Return the settings of a metrics port in a worker's pod; empty if the deployment does not open the port."""
    asked = deployment.spec.worker_metrics
    if not asked.key_sha256:
        return {}
    settings: Manifest = {"metrics_listen": f"0.0.0.0:{port}", "metrics_access": {"key_sha256": list(asked.key_sha256)}}
    if asked.tls_secret:
        settings["metrics_tls"] = {"certificate": f"{METRICS_TLS}/tls.crt", "key": f"{METRICS_TLS}/tls.key"}
    return settings


def _proven_by_routers(deployment: DesiredDeployment) -> Manifest:
    """Return the settings by which routers prove the control secret to workers and to each other.

    Without a control secret, the routers of a deployment exchange nothing, because a network policy cannot prove who
    has sent a message. Each pod adds its own address (`operators.manifests.pods`).
    """
    proof = {"secret_file": _CONTROL_FILE}
    return {
        "worker_credentials": proof,
        "replicas_name": f"{control_host(deployment)}:{PEERS}",
        "replicas_credentials": proof,
    }


def _model_dir(deployment: DesiredDeployment) -> str:
    model = deployment.spec.model
    if model.claim:
        return f"{MODELS}/{model.uri}".rstrip("/")
    return model.uri or model.name


def is_fetched(deployment: DesiredDeployment) -> bool:
    """Return whether pods fetch the model from the hub, because the specification names a repository and no folder."""
    return parse_repository(_model_dir(deployment)) is not None


def _hub(deployment: DesiredDeployment, **more: float) -> Manifest:
    """Return the section `hub` of a settings file, with the further settings in `more`.

    The section is empty if pods do not fetch the model.
    """
    if not is_fetched(deployment):
        return {}
    model = deployment.spec.model
    settings: Manifest = {"cache": HUB_CACHE} | more
    if model.endpoint:
        settings["endpoint"] = model.endpoint
    if model.token_secret:
        settings["token_file"] = f"{HUB_SECRET}/token"
        if model.insecure:
            settings["insecure"] = True
    return {"hub": settings}


def in_bytes(quantity: str) -> int:
    """Convert a quantity of memory to bytes: ``8Gi``, ``500M``, ``1.5G``, ``1024``."""
    number = quantity.rstrip("kKMGTPEi")
    suffix = quantity[len(number) :]
    power = " kMGTPE".index(suffix[0].replace("K", "k")) if suffix else 0
    return int(Decimal(number) * (1024 if suffix.endswith("i") else 1000) ** power)


def config_map(deployment: DesiredDeployment, role: RoleSpec, settings: Manifest, of_revision: str = "") -> Manifest:
    made = object_of(
        deployment, "v1", "ConfigMap", config_name(deployment, role, of_revision), labels_of(deployment, role), {}
    )
    del made["spec"]
    return made | {"data": {"settings.json": msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()}}
