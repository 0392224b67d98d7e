"""Resources of pods: computes their GPUs, CPU and memory from the engine, the model and the store. Pure.

Rules:

1. GPUs and RDMA devices are set as limits, because Kubernetes does not share them between pods. CPU and memory are
   requested without a limit. So the scheduler finds a node with enough free CPU and memory, and a pod that uses more
   memory than it requests is killed only if the node runs out of memory.
2. An engine on GPUs needs host memory for its processes, and CPUs for its processes and its API server. An engine on
   CPUs needs memory for its processes, its KV cache, and the weights twice: the file cache of the operating system has
   a second copy.
3. The blocks of an embedded store are in the memory of the worker's pod, so `storeMemory` is added.
4. The user's podTemplate overrides each of these values. If it sets a limit for CPU or memory and no request, the limit
   is also the request, as everywhere in Kubernetes.
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
"""CPU (in thousandths) and memory (in bytes) of a worker with the simulated engine."""

GPU_ENGINE_CPUS = 2
"""CPUs that an engine needs besides one for each GPU: its API server and its scheduler need one CPU each (vLLM's guide
to optimization and tuning, "CPU resources for GPU deployments")."""

GPU_HOST_BYTES = 8 * GIB
"""Bytes of host memory that an engine needs for each GPU: the CUDA context, pinned buffers, and the process of the
rank."""

CPU_ENGINE_CPUS = 2
CPU_ENGINE_BYTES = 2 * GIB
"""Bytes that the processes of an engine on CPUs need besides weights and KV
(`workers.engines.vllm.launch.ENGINE_OVERHEAD_BYTES`)."""

KV_CACHE_GIB = 1.0
"""Size in GiB of the KV cache of an engine on CPUs, if the arguments do not set it. It equals the default of
`workers.settings.VllmSettings.kv_cache_gib`."""

KV_CACHE = re.compile(r"(?:--set=)?vllm\.kv_cache_gib=([0-9]+(?:\.[0-9]+)?)")
PARAMETERS = re.compile(r"(?<![0-9a-z.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])", re.IGNORECASE)
"""Pattern that finds the number of parameters, in billions, in the name of a model such as `Llama-3.3-70B`."""

BF16_BYTES = 2


def resources(deployment: DesiredDeployment, role: RoleSpec) -> Manifest:
    """Return the resources of the container `main` in a pod of a role."""
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
    """Return a container without requests for the resources for which the user has set only a limit (rule 4)."""
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
    """Return what an engine needs besides its GPUs: thousandths of a CPU, and bytes of memory."""
    if gpus:
        return 1000 * (GPU_ENGINE_CPUS + gpus), gpus * GPU_HOST_BYTES
    if deployment.spec.engine is EngineKind.SIMULATED:
        return SIMULATED
    kv = max(map(float, _kv_caches(role)), default=KV_CACHE_GIB)
    return 1000 * CPU_ENGINE_CPUS, CPU_ENGINE_BYTES + round(kv * GIB) + 2 * _weights(deployment)


def _kv_caches(role: RoleSpec) -> Iterator[str]:
    """Yield each size in GiB that the arguments of the role's container set for the KV cache of an engine on CPUs."""
    containers = mapping(role.pod_template.get("spec")).get("containers")
    for each in containers if isinstance(containers, list) else ():
        given = mapping(each).get("args")
        for argument in given if isinstance(given, list) and mapping(each).get("name") == "main" else ():
            if isinstance(argument, str) and (found := KV_CACHE.fullmatch(argument)):
                yield found[1]


def _weights(deployment: DesiredDeployment) -> int:
    """Return the size of the model's weights in bytes, or 0 if it is unknown.

    The size comes from the list of known models, or else from the number of parameters in the model's name.
    """
    model = deployment.spec.model
    repository = parse_repository(model.uri or model.name)
    known = None if repository is None else model_by_repository(repository.name)
    if known is not None:
        return ceil(known.model.weights_bytes)
    billions = [float(each) for text in (model.uri, model.name) for each in PARAMETERS.findall(text)]
    return round(billions[0] * 1e9 * BF16_BYTES) if billions else 0


def _cpus(thousandths: int) -> str:
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
