"""Resources of pods: GPUs, and the CPU and memory that follow from engine, model and store. Pure.

Rules:

1. GPUs and RDMA devices are limits, because Kubernetes shares neither. CPU and memory are requests without a limit: the
   scheduler finds a node that has them, and a pod that needs more for a while is not ended.
2. On GPUs an engine needs memory of the host for its processes, and CPUs for its processes and its API server. On CPUs
   it needs the weights twice (the file cache and its copy), its KV cache, and its processes.
3. Blocks of a worker's own store are in its pod's memory, so `storeMemory` is added.
4. A user's podTemplate overrides each of these. If it limits CPU or memory and requests nothing, the limit is the request,
   as everywhere in Kubernetes.
"""

import re
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from fleet.core.hub import parse_repository
from fleet.core.roles import KvPath
from fleet.hardware.known_models import model_by_repository
from operators.api.disagg_deployment import EngineKind, RoleSpec, RoleType
from operators.manifests.names import DesiredDeployment
from operators.manifests.objects import Manifest, mapping
from operators.manifests.settings import in_bytes

GIB = 1 << 30
MIB = 1 << 20

ROUTER = {"cpu": "500m", "memory": "512Mi"}
SIMULATED = (250, 512 * MIB)
"""Thousandths of a CPU, and bytes."""

GPU_ENGINE_CPUS = 2
"""An engine's API server and scheduler need one CPU each, and each GPU one more (vLLM's guide to optimization and tuning,
"CPU resources for GPU deployments")."""

GPU_HOST_BYTES = 8 * GIB
"""Memory of the host for each GPU: CUDA's context, pinned buffers, the process of the rank."""

CPU_ENGINE_CPUS = 2
CPU_ENGINE_BYTES = 2 * GIB
"""Processes of an engine on CPUs, without weights and KV (`workers.engines.vllm.launch.ENGINE_OVERHEAD_BYTES`)."""

KV_CACHE_GIB = 1.0
"""The default of `workers.settings.VllmSettings.kv_cache_gib`."""

KV_CACHE = re.compile(r"(?:--set=)?vllm\.kv_cache_gib=([0-9]+(?:\.[0-9]+)?)")
PARAMETERS = re.compile(r"(?<![0-9a-z.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])", re.IGNORECASE)
"""Billions of parameters in a model's name, such as `Llama-3.3-70B`."""

BF16_BYTES = 2


def resources(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    """Return the resources of the main container of one of a role's pods."""
    if role.type is RoleType.ROUTER:
        return {"requests": dict(ROUTER)}
    gpus = role.gpus.per_replica // role.nodes_per_replica
    thousandths, size = _needed(deployment, role, gpus)
    transfer = deployment.spec.kv_transfer
    if KvPath.STORE in transfer.paths:
        size += in_bytes(transfer.store_memory)
    made: Manifest = {"requests": {"cpu": _cpus(thousandths), "memory": f"{ceil(size / MIB)}Mi"}}
    if gpus:
        made["limits"] = {role.gpus.vendor.value: gpus}
        if role.topology.rdma:
            made["limits"][role.topology.rdma] = gpus
    return made


def limited_by_user(container: Mapping[str, Any], theirs: Mapping[str, Any]) -> Manifest:
    """Return a container without our requests of what the user's container limits without a request (rule 4)."""
    given = mapping(theirs.get("resources"))
    limits, requests = mapping(given.get("limits")), mapping(given.get("requests"))
    merged = mapping(container.get("resources"))
    kept = {
        name: value
        for name, value in mapping(merged.get("requests")).items()
        if name in requests or name not in limits or limits[name] is None
    }
    return {**container, "resources": {**merged, "requests": kept}} if limits else dict(container)


def _needed(deployment: DesiredDeployment, role: RoleSpec, gpus: int) -> tuple[int, int]:
    """Return the thousandths of a CPU and the bytes of memory that an engine needs beside its GPUs."""
    if gpus:
        return 1000 * (GPU_ENGINE_CPUS + gpus), gpus * GPU_HOST_BYTES
    if deployment.spec.engine is EngineKind.SIMULATED:
        return SIMULATED
    kv = max(map(float, _kv_caches(role)), default=KV_CACHE_GIB)
    return 1000 * CPU_ENGINE_CPUS, CPU_ENGINE_BYTES + round(kv * GIB) + 2 * _weights(deployment)


def _kv_caches(role: RoleSpec) -> Iterator[str]:
    """Yield the sizes of a CPU engine's KV cache in GiB that the arguments of the role's container give."""
    containers = mapping(role.pod_template.get("spec")).get("containers")
    for each in containers if isinstance(containers, list) else ():
        given = mapping(each).get("args")
        for argument in given if isinstance(given, list) and mapping(each).get("name") == "main" else ():
            if isinstance(argument, str) and (found := KV_CACHE.fullmatch(argument)):
                yield found[1]


def _weights(deployment: DesiredDeployment) -> int:
    """Return the bytes of the model's weights: of a known model, or by the parameters in its name; 0: unknown."""
    model = deployment.spec.model
    repository = parse_repository(model.uri or model.name)
    known = None if repository is None else model_by_repository(repository.name)
    if known is not None:
        return ceil(known.model.weights_bytes)
    billions = [float(each) for text in (model.uri, model.name) for each in PARAMETERS.findall(text)]
    return round(billions[0] * 1e9 * BF16_BYTES) if billions else 0


def _cpus(thousandths: int) -> str:
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
