"""Import from vLLM's production stack (https://github.com/vllm-project/production-stack): converts Helm values files.

Rules:

1. Entries of `modelSpec` with the same model become roles of one deployment, because one router serves them all. Each
   further model becomes a deployment of its own.
2. If the router separates prefill from decode, the router's flags or the KV role of an entry say whether the entry
   becomes a prefill or a decode role.
3. Fields that only connect the components of the chart (ports, probes, addresses for KV transfers) are skipped, because
   Fleet sets these itself.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    EngineKind,
    KvTransfer,
    RoleSpec,
    RoleType,
    Routing,
    Scaling,
    ScalingMode,
)
from operators.api.fields import GpuVendor, ModelSource
from operators.imports.assembly import Imported, Names, document, drain, paired, spread, transferred
from operators.imports.document_reader import DocumentReader, Note, says_something
from operators.imports.engine_flags import Flags, flags_of, parallelism_of, passed_on, settings_of
from operators.imports.pod_templates import PodTemplate, gpus_called, gpus_of

SIGN = "servingEngineSpec"
"""Name of the field by which a values file of the production stack is recognised."""

POLICIES = {
    "roundrobin": "round_robin",
    "session": "sticky",
    "prefixaware": "fleet",
    "kvaware": "fleet",
    "disaggregated_prefill": "fleet",
    "disaggregated_prefill_orchestrated": "fleet",
}
SPLITTING = "disaggregated_prefill"
DEFAULT_GIGABYTES = 8

OWN_OF_ENGINES = dict.fromkeys(
    (
        "containerPort",
        "containerSecurityContext",
        "extraPorts",
        "imagePullPolicy",
        "livenessProbe",
        "readinessProbe",
        "securityContext",
        "servicePort",
        "sidecar",
        "startupProbe",
        "strategy",
    ),
    "",
)
OWN_OF_ROUTERS = dict.fromkeys(
    (
        "containerPort",
        "containerSecurityContext",
        "engineScrapeInterval",
        "imagePullPolicy",
        "k8sServiceDiscoveryType",
        "livenessProbe",
        "readinessProbe",
        "repository",
        "requestStatsWindow",
        "securityContext",
        "serviceDiscovery",
        "servicePort",
        "startupProbe",
        "strategy",
        "tag",
    ),
    "",
)
MONITORED = "a PodMonitor comes by itself where the API server has the kind"
ADAPTERS = (
    "adapters cannot be named in a DisaggDeployment; `adapters` is a setting of workers, for `--set` in a podTemplate"
)
TOKEN = "is written out; put it into a Secret under the key `token`, and name that in model.tokenSecret"  # noqa: S105 - none


class _ModelSpecEntry(Struct, frozen=True):
    """Holds what the import has read of one entry of `modelSpec`."""

    model: str
    served: str
    name: str
    role: RoleSpec
    secret: str
    direct: bool
    store_gigabytes: int


class _Splitting(Struct, frozen=True):
    """Holds the router's flags that decide which entries of `modelSpec` become prefill roles and which decode roles."""

    on: bool
    prefill: frozenset[str]
    decode: frozenset[str]


def imported(values: Mapping[str, Any], name: str = "", namespace: str = "") -> Imported:
    """Convert a values file to DisaggDeployments, one for each model.

    Args:
        values: Content of the values file.
        name: Name of the deployment, if there is only one model. If it is empty, the name of the entry or of the model
            is used.
        namespace: Namespace of all deployments; if it is empty, the manifests name no namespace.

    Raises:
        ConfigurationRefused: No model is enabled, a field is missing or has an impossible value, or two fields contradict each other.
    """
    notes: list[Note] = []
    root = DocumentReader(values, "", notes)
    engines, routers = root.table(SIGN), root.table("routerSpec")
    routing, router, splitting = _routers(routers)
    entries = []
    for each in engines.tables("modelSpec"):
        if each.flag("enabled", default=True):
            entries.append(_entry(each, engines, splitting))
        else:
            each.skip_all()
    if not entries:
        raise ConfigurationRefused(f"{SIGN}.modelSpec: has no model in it that is enabled")
    suspend = not engines.flag("enableEngine", default=True)
    if suspend:
        engines.note("enableEngine", "is false: the deployment is suspended, its router too")
    # `_pod` has already used these two fields as defaults for entries without fields of these names.
    engines.skip("runtimeClassName", "schedulerName")
    keys = "keys of clients are a setting of the router (`tenants`)"
    engines.rest(OWN_OF_ENGINES | {"serviceMonitor": MONITORED, "vllmApiKey": keys})
    _beside(root)

    names, objects = Names("model"), []
    by_model: dict[str, list[_ModelSpecEntry]] = {}
    for entry in entries:
        by_model.setdefault(entry.model, []).append(entry)
    for model, alike in by_model.items():
        given = name if len(by_model) == 1 and name else alike[0].name if len(alike) == 1 else model.rpartition("/")[2]
        served = next((each.served for each in alike if each.served), model)
        roles = paired(_renamed(alike), f"{SIGN}.modelSpec", notes)
        spec = DisaggDeploymentSpec(
            model=ModelSource(
                name=served,
                uri="" if served == model else model,
                token_secret=next((each.secret for each in alike if each.secret), ""),
            ),
            roles=(*roles, *(() if router is None else (router,))),
            kv_transfer=transferred(_transfer(alike), EngineKind.VLLM, roles, f"{SIGN}.modelSpec", notes),
            routing=routing,
            suspend=suspend,
        )
        objects.append(document(names.give(given), spec, namespace))
    return Imported(tuple(objects), tuple(notes))


def _renamed(entries: list[_ModelSpecEntry]) -> list[RoleSpec]:
    names = Names("workers")
    return [structs.replace(each.role, name=names.give(each.name)) for each in entries]


def _beside(root: DocumentReader) -> None:
    """Add notes about the sections of the values file, besides engines and router, that have no equivalent in Fleet."""
    root.note_if(
        "cacheserverSpec",
        "has no equal: blocks that are kept for later are in the memory of each worker's own pod (kvTransfer.paths: store)",
    )
    for name in ("loraController", "loraAdapters"):
        root.note_if(name, ADAPTERS)
    root.note_if("sharedStorage", "has no equal; name a PersistentVolumeClaim with the weights in model.claim")
    root.rest()


def _routers(reader: DocumentReader) -> tuple[Routing, RoleSpec | None, _Splitting]:
    """Return the routing settings, the role of the routers (None: the default role), and the flags for prefill and decode."""
    logic = reader.text("routingLogic")
    routing = Routing()
    if logic in POLICIES:
        routing = Routing(policy=POLICIES[logic])
    elif logic:
        reader.note("routingLogic", "is not known; the default policy takes its place")
    reader.note_if("sessionKey", "a session is named in a request's body here, as `fleet.session`, and not in a header")
    flags = flags_of((), reader.texts("extraArgs"), {})
    for flag in flags.named:
        if flag not in ("prefill-model-labels", "decode-model-labels"):
            reader.notes.append(Note(reader.at("extraArgs"), f"--{flag}: has no equal here and is left out"))
    splitting = _Splitting(
        on=logic.startswith(SPLITTING) or reader.flag("enablePD"),
        prefill=frozenset(flags.get("prefill-model-labels").split(",")) - {""},
        decode=frozenset(flags.get("decode-model-labels").split(",")) - {""},
    )

    scaling, autoscaling = Scaling(), reader.table("autoscaling")
    if autoscaling.flag("enabled"):
        scaling = Scaling(
            mode=ScalingMode.EXTERNAL,
            least=autoscaling.number("minReplicas", 1),
            most=max(autoscaling.number("minReplicas", 1), autoscaling.number("maxReplicas", 3)),
        )
        autoscaling.note(
            "targetCPUUtilizationPercentage", "make a HorizontalPodAutoscaler whose target is the role's RoleScaler"
        )
    else:
        autoscaling.skip_all()
    template = PodTemplate()
    template.take(reader)
    _placed(template, reader)
    template.annotations |= reader.words("podAnnotations")
    template.labels |= reader.words("labels")
    resources = reader.table("resources")
    if says_something(reader.any("resources")):
        template.main["resources"] = {name: resources.words(name) for name in resources.names}
    replicas = reader.number("replicaCount", 1)
    if not reader.flag("enableRouter", default=True):
        reader.note("enableRouter", "is false, and a deployment always has a router; it is made with no replica")
        replicas = 0
    if reader.text("serviceType", "ClusterIP") != "ClusterIP":
        reader.note(
            "serviceType", "the router's Service is a ClusterIP; make another Service, or a Gateway, for clients"
        )
    otel = reader.table("otel")
    otel.note_if("endpoint")
    otel.rest({"serviceName": "", "secure": ""})
    if reader.text("hf_token"):
        reader.note("hf_token", TOKEN)
    reader.skip(*(name for name in reader.names if name.startswith(("lmcache", "nixl"))))
    reader.rest(OWN_OF_ROUTERS | {"serviceMonitor": MONITORED})
    role = RoleSpec(
        name="router", type=RoleType.ROUTER, replicas=replicas, scaling=scaling, pod_template=template.built()
    )
    usual = role == RoleSpec(name="router", type=RoleType.ROUTER)
    return routing, None if usual else role, splitting


def _entry(reader: DocumentReader, engines: DocumentReader, splitting: _Splitting) -> _ModelSpecEntry:
    model = reader.text("modelURL")
    if not model:
        raise ConfigurationRefused(f"{reader.at('modelURL')}: is missing")
    name = reader.text("name") or model.rpartition("/")[2]
    transfers = reader.table("lmcacheConfig")
    kind = _type(reader, transfers, splitting)
    template = PodTemplate()
    flags, over_nodes = _engine(reader, template)
    parallelism = parallelism_of(flags, reader.at("vllmConfig"), reader.notes)
    wished = parallelism.pipeline if over_nodes else 1
    each, vendor = _resources(reader, template)
    gpus, nodes = spread(parallelism, each * wished, wished, vendor, reader.path, reader.notes)
    _pod(reader, engines, template)
    role = RoleSpec(
        name=name,
        type=kind,
        replicas=reader.number("replicaCount", 1),
        scaling=_scaling(reader),
        parallelism=parallelism,
        nodes_per_replica=nodes,
        gpus=gpus,
        drain=drain(template.grace_seconds),
        pod_template=template.built(),
    )
    direct = transfers.flag("enableNixl") or kind is not RoleType.AGGREGATED
    gigabytes = _kept(transfers, direct=direct)
    secret = _secret(reader)
    reader.note_if("repository", "workers run an image with Fleet in it; `image` names another")
    reader.skip("tag")
    reader.note_if("pvcStorage", "no claim is made here; name one with the weights in model.claim")
    reader.note_if("initContainer", "waits for parts of the other stack, or loads weights; left out")
    reader.note_if("enableLoRA", ADAPTERS)
    reader.rest(
        {
            "annotations": "",
            "chatTemplate": "the model's own is used; write it into its tokenizer_config.json",
            "chatTemplateConfigMap": "",
            "enableTool": "tools become part of the prompt; calls are not read out of answers",
            "toolCallParser": "",
            **dict.fromkeys(("pvcAccessMode", "pvcAnnotations", "pvcLabels", "pvcMatchLabels", "storageClass"), ""),
        }
    )
    served = flags.get("served-model-name").partition(" ")[0]  # a flag may list several names; the first is used
    return _ModelSpecEntry(
        model=model, served=served, name=name, role=role, secret=secret, direct=direct, store_gigabytes=gigabytes
    )


def _kept(transfers: DocumentReader, *, direct: bool) -> int:
    """Return the size in gigabytes of the blocks that a pod keeps for later requests; 0 if it keeps none."""
    on, local = transfers.flag("enabled"), transfers.flag("localCpu", default=True)
    said = max(_gigabytes(transfers, "cpuOffloadingBufferSize"), _gigabytes(transfers, "maxLocalCpuSize"))
    for field in ("diskOffloadingBufferSize", "maxLocalDiskSize"):
        transfers.note_if(field, "blocks on disks have no field here; `embedded_store.tiers` is a setting of workers")
    transfers.skip_all()
    if not on or (direct and not said):
        return 0
    return said or (DEFAULT_GIGABYTES if local else 0)


def _type(reader: DocumentReader, transfers: DocumentReader, splitting: _Splitting) -> RoleType:
    label = reader.words("labels").get("model", "")
    role, end = transfers.text("kvRole"), transfers.text("nixlRole")
    if not splitting.on:
        return RoleType.AGGREGATED
    if label in splitting.prefill or "producer" in role or end == "sender":
        return RoleType.PREFILL
    if label in splitting.decode or "consumer" in role or end == "receiver":
        return RoleType.DECODE
    reader.notes.append(Note(reader.path, "says neither that it prefills nor that it decodes; it does both"))
    return RoleType.AGGREGATED


def _engine(reader: DocumentReader, template: PodTemplate) -> tuple[Flags, bool]:
    """Return the engine's flags, and whether one engine runs on several nodes. Set the worker's arguments in the pod template."""
    config = reader.table("vllmConfig")
    path = config.path
    said = {
        "max-model-len": config.text("maxModelLen"),
        "dtype": config.text("dtype"),
        "tensor-parallel-size": config.text("tensorParallelSize"),
        "pipeline-parallel-size": config.text("pipelineParallelSize"),
        "max-num-seqs": config.text("maxNumSeqs"),
        "gpu-memory-utilization": config.text("gpuMemoryUtilization"),
    }
    given = flags_of((), config.texts("extraArgs"), {})
    flags = Flags((), {name: value for name, value in said.items() if value} | dict(given.named))
    if config.any("enablePrefixCaching") is False or flags.get("no-enable-prefix-caching"):
        config.note("enablePrefixCaching", "stays on: the router goes by what workers have cached")
    if config.any("enableChunkedPrefill") is False:
        config.note("enableChunkedPrefill", "stays on")
    config.note_if("maxLoras", ADAPTERS)
    config.skip("v0", "v1")  # these fields choose between two engines of old vLLM versions; only one engine is left
    for name in ("runner", "convert"):
        config.note_if(name, "workers generate text and nothing else")
    config.rest()
    left = {
        name: value
        for name, value in flags.named.items()
        if name not in ("enable-prefix-caching", "no-enable-prefix-caching", "enable-chunked-prefill")
    }
    template.arguments = settings_of(left, f"{path}.extraArgs", reader.notes)
    for name in passed_on(given.named):
        if name in left:
            reader.notes.append(Note(f"{path}.extraArgs", f"--{name}: goes to the engine as it is (vllm.extra_args)"))
    if not flags.get("max-model-len"):
        reader.notes.append(
            Note(f"{path}.maxModelLen", "is not said; workers then take 4096 tokens, prompt and answer together")
        )
    ray = reader.table("raySpec")
    ray.skip_all()
    return flags, ray.flag("enabled")


def _resources(reader: DocumentReader, template: PodTemplate) -> tuple[int, GpuVendor]:
    """Return the number and the vendor of a pod's GPUs, and copy its other resources to the pod template."""
    resources = reader.any("resources")
    if says_something(resources) and isinstance(resources, dict):
        for name in ("requestCPU", "requestMemory", "requestGPU", "requestGPUType", "limitCPU", "limitMemory"):
            reader.any(name)
        gpus, vendor, rest = gpus_of(resources, reader.at("resources"), reader.notes)
    else:
        kind = reader.text("requestGPUType") or GpuVendor.NVIDIA.value
        wanted = reader.any("requestGPU")
        known = gpus_called(kind, wanted, reader.at("requestGPU"), reader.notes) if wanted else (0, GpuVendor.NVIDIA)
        if known is None:
            reader.note("requestGPUType", "is no GPU that is known here; taken as nvidia.com/gpu")
            known = gpus_called(GpuVendor.NVIDIA, wanted, reader.at("requestGPU"), reader.notes)
        assert known is not None, "NVIDIA's are known"
        gpus, vendor = known
        rest = {}
        for section in ("request", "limit"):
            said = {name.lower(): value for name in ("CPU", "Memory") if (value := reader.text(f"{section}{name}"))}
            if said:
                rest[f"{section}s"] = said
    for field in (
        "requestGPUMem",
        "requestGPUMemPercentage",
        "requestGPUCores",
        "limitGPUMem",
        "limitGPUMemPercentage",
        "limitGPUCores",
    ):
        reader.note_if(field, "parts of a GPU cannot be asked for; a worker has its GPUs to itself")
    if rest:
        template.main["resources"] = rest
    return gpus, vendor


def _pod(reader: DocumentReader, engines: DocumentReader, template: PodTemplate) -> None:
    """Copy the fields of an entry about scheduling, volumes, environment variables and labels to the pod template."""
    template.take(reader)
    for name in ("runtimeClassName", "schedulerName"):
        if name not in template.spec and (value := engines.text(name)):
            template.spec[name] = value
    common, own = engines.objects("tolerations"), reader.objects("tolerations")
    override = reader.text("tolerationsPolicy") == "override"
    if tolerations := (own if override else [*common, *own]):
        template.spec["tolerations"] = tolerations
    _placed(template, reader)
    if secret := reader.text("imagePullSecret"):
        template.spec["imagePullSecrets"] = [{"name": secret}]
    if volumes := reader.objects("extraVolumes"):
        template.spec["volumes"] = list(volumes)
    if size := reader.text("shmSize"):
        shared = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        template.spec.setdefault("volumes", []).append(shared)
    if mounts := reader.objects("extraVolumeMounts"):
        template.main["volumeMounts"] = list(mounts)
    template.add_variables(reader, "env")
    if secret := reader.table("envFromSecret").text("name"):
        template.main.setdefault("envFrom", []).append({"secretRef": {"name": secret}})
    template.annotations |= reader.words("podAnnotations")
    labels = engines.words("labels") | reader.words("labels")
    template.labels |= {name: value for name, value in labels.items() if name != "model"}


def _placed(template: PodTemplate, reader: DocumentReader) -> None:
    """Convert the chart's list of node selector terms to a node affinity, unless the pod has an affinity already."""
    terms = reader.objects("nodeSelectorTerms")
    if terms and "affinity" not in template.spec:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        template.spec["affinity"] = {"nodeAffinity": required}


def _scaling(reader: DocumentReader) -> Scaling:
    keda = reader.table("keda")
    enabled = keda.flag("enabled")
    least, most = keda.number("minReplicaCount", 1), keda.number("maxReplicaCount", 5)
    keda.skip_all()
    if not enabled:
        return Scaling()
    keda.note("triggers", "make a ScaledObject whose target is the role's RoleScaler, which has the scale subresource")
    return Scaling(mode=ScalingMode.EXTERNAL, least=least, most=max(least, most))


def _secret(reader: DocumentReader) -> str:
    """Return the name of the Secret with the access token for the model's repository; empty if none is named."""
    access_token = reader.any("hf_token")
    if isinstance(access_token, dict):
        token = reader.table("hf_token")
        secret, key = token.text("secretName"), token.text("secretKey")
        if secret and key != "token":
            token.note("secretKey", "the token has to be under the key `token` of the Secret")
        return secret
    if access_token:
        reader.note("hf_token", TOKEN)
    return ""


def _transfer(entries: list[_ModelSpecEntry]) -> KvTransfer:
    gigabytes = max(each.store_gigabytes for each in entries)
    paths = (
        *((KvPath.DIRECT,) if any(each.direct for each in entries) else ()),
        *((KvPath.STORE,) if gigabytes else ()),
    )
    if not paths:
        return KvTransfer()
    return KvTransfer(paths=paths, store_memory=f"{gigabytes}G") if gigabytes else KvTransfer(paths=paths)


def _gigabytes(reader: DocumentReader, name: str) -> int:
    """Return the size in a field in whole gigabytes; a fraction is rounded down, and an absent field gives 0."""
    text = reader.text(name)
    whole = text.partition(".")[0]
    if not text:
        return 0
    if not (whole.isascii() and whole.isdigit() and len(whole) <= 6):
        raise ConfigurationRefused(f"{reader.at(name)}: must be a number of gigabytes")
    return int(whole)
