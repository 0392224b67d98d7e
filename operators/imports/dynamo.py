"""Import from NVIDIA Dynamo (https://github.com/ai-dynamo/dynamo): converts DynamoGraphDeployments.

Rules:

1. Two versions are supported. v1alpha1 has the field `services`, an object. v1beta1 has the field `components`, a list
   of objects with a pod template each. Objects of both versions are read into the same records, and then converted by
   the same code.
2. The type of a service decides which role it becomes. If the type is `worker` or an unknown one, the flags of its command
   decide. If it has no type, the flags decide first, and then its name.
3. A frontend becomes the router, because Fleet's router does the work of Dynamo's frontend. An endpoint picker becomes
   the endpoint picker of the router. Planners are left out with a note, because a ServingPlan takes their place. Encoders
   are left out with a note too, because Fleet has no separate workers for images.
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    EngineKind,
    InferencePool,
    KvTransfer,
    RoleSpec,
    RoleType,
    Routing,
    Scaling,
    ScalingMode,
)
from operators.api.fields import ModelSource
from operators.imports.assembly import Imported, Names, document, drain, paired, spread, transferred
from operators.imports.document_reader import DocumentReader, Note
from operators.imports.engine_flags import Flags, flags_of, parallelism_of, passed_on, settings_of
from operators.imports.pod_templates import MAIN, PodTemplate, gpus_of, variables_of, without_secrets

KIND = "DynamoGraphDeployment"
GROUP = "nvidia.com"
VERSIONS = ("v1alpha1", "v1beta1")

FRONTEND, PLANNER, PICKER, ENCODER, WORKER = "frontend", "planner", "epp", "encode", "worker"
LEFT_OUT = {
    PLANNER: "is left out; a ServingPlan takes its place, with roles in scaling mode Planner",
    ENCODER: "is left out; there are no workers for images",
}
MODES = {"kv": "fleet", "round-robin": "round_robin", "random": "random", "direct": "fleet"}
"""The routing policy of Fleet for each router mode of Dynamo's frontend."""

STORES = ("kvbm", "lmcache", "flexkv", "dynamoconnector", "offloading")
"""Parts of the names of those KV connectors that keep blocks for later requests."""

OWN = dict.fromkeys(
    (
        "command",
        "image",
        "lifecycle",
        "livenessProbe",
        "ports",
        "readinessProbe",
        "securityContext",
        "startupProbe",
        "tty",
        "workingDir",
    ),
    "",
)
"""Fields of containers that are not imported and get no note, because Fleet sets its own values for them."""


class _DynamoService(Struct, frozen=True):
    """Holds what the import has read about one service (v1alpha1) or component (v1beta1) of a Dynamo deployment."""

    name: str
    kind: str
    reader: DocumentReader
    args: str
    """Path of the container's arguments in the document, for notes."""

    template: PodTemplate
    flags: Flags
    gpus: int
    vendor: Any
    nodes: int
    replicas: int
    scaling: Scaling


def imported(manifest: Mapping[str, Any], name: str = "", namespace: str = "") -> Imported:
    """Convert a DynamoGraphDeployment to a DisaggDeployment.

    Args:
        manifest: A DynamoGraphDeployment.
        name: Name of the deployment; if it is empty, the name in the manifest is used.
        namespace: Namespace of the deployment; if it is empty, the namespace in the manifest is used.

    Raises:
        ConfigurationRefused: The manifest has an unsupported version, no worker or no model. Or a field has an impossible value, or
            two fields contradict each other.
    """
    notes: list[Note] = []
    root = DocumentReader(manifest, "", notes)
    group, _, version = root.text("apiVersion").partition("/")
    if group != GROUP or version not in VERSIONS:
        raise ConfigurationRefused(f"{root.at('apiVersion')}: must be {GROUP}/{' or '.join(VERSIONS)}")
    root.any("kind")
    metadata = root.table("metadata")
    given = Names("model").give(name or metadata.text("name"))
    place = namespace or metadata.text("namespace")
    metadata.skip_all()
    root.any("status")
    spec = root.table("spec")
    parts = _services(spec) if version == "v1alpha1" else _components(spec)
    workers = [part for part in parts if part.kind not in (FRONTEND, PLANNER, PICKER, ENCODER)]
    if not workers:
        raise ConfigurationRefused(f"{spec.path}: has no worker in it")
    engine = _engine(spec, workers, notes)
    model = _model(spec, workers, notes)
    roles = paired(_roles(workers, engine, notes), spec.path, notes)
    router, routing = _router([part for part in parts if part.kind == FRONTEND], notes)
    if pickers := [part for part in parts if part.kind == PICKER]:
        routing = Routing(policy=routing.policy, inference_pool=InferencePool(create=True))
        for part in pickers:
            part.reader.note_if("eppConfig", "the router picks by its own policy; `routing.policy` names another")
    for part in parts:
        if part.kind in LEFT_OUT:
            notes.append(Note(part.reader.path, LEFT_OUT[part.kind]))
            part.reader.skip_all()
        part.reader.rest({"frontendSidecar": "", "dynamoNamespace": "", "globalDynamoNamespace": "", "serviceName": ""})
    _spec_rest(spec)
    root.rest()
    made = DisaggDeploymentSpec(
        model=model,
        engine=engine,
        roles=(*roles, *(() if router is None else (router,))),
        kv_transfer=transferred(_transfer(workers, notes), engine, roles, spec.path, notes),
        routing=routing,
    )
    # Each service adds the same notes about the variables that all services share, so repeated notes are removed.
    return Imported((document(given, made, place),), tuple(dict.fromkeys(notes)))


def _services(spec: DocumentReader) -> list[_DynamoService]:
    """Read the services of a DynamoGraphDeployment in the version v1alpha1."""
    services = spec.table("services").named()
    common = spec.objects("envs")
    spec.any("envs")
    parts = []
    for name, service in services.items():
        pod = service.table("extraPodSpec")
        main = pod.table("mainContainer")
        template = PodTemplate()
        template.labels |= service.words("labels")
        template.annotations |= service.words("annotations")
        for owner in (spec, service):
            template.add_variables(owner, "envs")
        if secret := service.text("envFromSecret"):
            template.main["envFrom"] = [{"secretRef": {"name": secret}}]
        _mounts(service, template)
        _shared_memory(service.table("sharedMemory"), template)
        variables = variables_of(common, service.objects("envs"), main.objects("env"))
        flags = flags_of(main.texts("command"), main.texts("args"), variables)
        template.take(pod)
        gpus, vendor, rest = gpus_of(
            _merged(service.any("resources"), main.any("resources")), service.at("resources"), service.notes
        )
        template.take_container(main)
        if rest:
            template.main["resources"] = rest
        template.others = [
            without_secrets(given, f"{pod.at('containers')}[{index}]", pod.notes)
            for index, given in enumerate(pod.objects("containers"))
        ]
        main.rest(OWN | {"name": "", "resources": ""})
        pod.rest({"securityContext": ""})
        kind = service.text("componentType")
        sub = service.text("subComponentType")
        service.skip("livenessProbe", "readinessProbe", "startupProbe")
        parts.append(
            _DynamoService(
                name=name,
                kind=_kind(sub or kind, name, flags),
                reader=service,
                args=main.at("args"),
                template=template,
                flags=flags,
                gpus=gpus,
                vendor=vendor,
                nodes=service.table("multinode").number("nodeCount", 1) or 1,
                replicas=service.number("replicas", 1),
                scaling=_scaling(service),
            )
        )
    return parts


def _components(spec: DocumentReader) -> list[_DynamoService]:
    """Read the components of a DynamoGraphDeployment in the version v1beta1."""
    common = spec.objects("env")
    parts = []
    for component in spec.tables("components"):
        name = component.text("name")
        pod_template = component.table("podTemplate")
        metadata, pod = pod_template.table("metadata"), pod_template.table("spec")
        template = PodTemplate()
        template.labels |= metadata.words("labels")
        template.annotations |= metadata.words("annotations")
        template.add_variables(spec, "env")
        template.take(pod)
        containers = pod.tables("containers")
        main = next((each for each in containers if each.text("name") == MAIN), None) or DocumentReader(
            {}, pod.at("containers"), spec.notes
        )
        sidecar = component.text("frontendSidecar")
        template.others = [
            without_secrets(given, each.path, pod.notes)
            for given, each in zip(pod.objects("containers"), containers, strict=True)
            if each is not main and each.text("name") != sidecar
        ]
        for each in containers:
            if each is not main:
                each.skip_all()
        variables = variables_of(common, main.objects("env"))
        flags = flags_of(main.texts("command"), main.texts("args"), variables)
        gpus, vendor, rest = gpus_of(main.any("resources") or {}, main.at("resources"), spec.notes)
        template.take_container(main)
        if rest:
            template.main["resources"] = rest
        _shared_memory(
            DocumentReader({"size": component.any("sharedMemorySize")}, component.path, spec.notes), template
        )
        main.rest(OWN)
        pod.rest({"securityContext": ""})
        parts.append(
            _DynamoService(
                name=name,
                kind=_kind(component.text("type"), name, flags),
                reader=component,
                args=main.at("args"),
                template=template,
                flags=flags,
                gpus=gpus,
                vendor=vendor,
                nodes=component.table("multinode").number("nodeCount", 1) or 1,
                replicas=component.number("replicas", 1),
                scaling=_scaling(component),
            )
        )
    return parts


def _kind(type_name: str, name: str, flags: Flags) -> str:
    """Return the kind of a service by the name of its type, its flags, or its own name (rule 2); WORKER if none of them tells it."""
    if type_name in (FRONTEND, PLANNER, PICKER, ENCODER, RoleType.PREFILL.value, RoleType.DECODE.value):
        return type_name
    mode = flags.get("disaggregation-mode")
    if flags.get("is-prefill-worker") or mode == "prefill":
        return RoleType.PREFILL.value
    if flags.get("is-decode-worker") or mode == "decode":
        return RoleType.DECODE.value
    if type_name:
        return WORKER
    low = name.lower()
    return next((kind for kind in (FRONTEND, PLANNER, PICKER, "prefill", "decode") if kind in low), WORKER)


def _roles(workers: list[_DynamoService], engine: EngineKind, notes: list[Note]) -> list[RoleSpec]:
    types = {part.kind for part in workers}
    names = Names("workers")
    roles = []
    for part in workers:
        kind = RoleType.AGGREGATED if part.kind == WORKER else RoleType(part.kind)
        if part.kind == WORKER and "prefill" in types and "decode" not in types:
            # Older versions of Dynamo do not mark decode workers. So if there are prefill workers, all other workers
            # count as decode workers.
            kind = RoleType.DECODE
        path = part.reader.path
        parallelism = parallelism_of(part.flags, path, notes)
        gpus, nodes = spread(parallelism, part.gpus * part.nodes, part.nodes, part.vendor, path, notes)
        _arguments(part, engine, notes)
        roles.append(
            RoleSpec(
                name=names.give(part.name),
                type=kind,
                replicas=part.replicas,
                scaling=part.scaling,
                parallelism=parallelism,
                nodes_per_replica=nodes,
                gpus=gpus,
                drain=drain(part.template.grace_seconds),
                pod_template=part.template.built(),
            )
        )
    return roles


def _arguments(part: _DynamoService, engine: EngineKind, notes: list[Note]) -> None:
    """Convert flags of vLLM to arguments of Fleet's worker, if they have no field in the deployment and Fleet does not set them.

    Add a note for each flag that must not be passed on.
    """
    if engine is not EngineKind.VLLM or not _runs_vllm(part.flags):
        return
    path = part.args
    part.template.arguments = settings_of(part.flags.named, path, notes)
    notes.extend(
        Note(path, f"--{name}: goes to the engine as it is (vllm.extra_args)") for name in passed_on(part.flags.named)
    )
    if not part.flags.get("max-model-len"):
        notes.append(Note(path, "no --max-model-len: workers then take 4096 tokens, prompt and answer together"))


def _runs_vllm(flags: Flags) -> bool:
    return flags.runs("dynamo.vllm") or "vllm" in flags.words


def _engine(spec: DocumentReader, workers: list[_DynamoService], notes: list[Note]) -> EngineKind:
    framework = spec.text("backendFramework")
    modules = [part.flags.get("m") or next((word for word in part.flags.words if "." in word), "") for part in workers]
    if any("mocker" in module for module in modules):
        return EngineKind.SIMULATED
    others = [name for name in ("sglang", "trtllm") if framework == name or any(name in module for module in modules)]
    if others:
        notes.append(
            Note(
                spec.path,
                f"its engine is {others[0]}, for which there are no workers; vLLM takes its place, and its flags are left out",
            )
        )
    return EngineKind.VLLM


def _model(spec: DocumentReader, workers: list[_DynamoService], notes: list[Note]) -> ModelSource:
    sources = list(dict.fromkeys(part.flags.model for part in workers if part.flags.model))
    if not sources:
        raise ConfigurationRefused(f"{spec.path}: no worker says which model it serves (--model)")
    if len(sources) > 1:
        notes.append(
            Note(
                spec.path, "its workers serve different models; the first counts, and the others need one of their own"
            )
        )
    served = next((part.flags.get("served-model-name") for part in workers if part.flags.get("served-model-name")), "")
    return ModelSource(name=served or sources[0], uri=sources[0] if served and served != sources[0] else "")


def _router(frontends: list[_DynamoService], notes: list[Note]) -> tuple[RoleSpec | None, Routing]:
    routing = Routing()
    usual = RoleSpec(name="router", type=RoleType.ROUTER)
    if not frontends:
        return None, routing
    first, *others = frontends
    notes += [
        Note(part.reader.path, "is a second frontend, and a deployment has one kind of router; left out")
        for part in others
    ]
    variables = variables_of(first.template.main.get("env", []))
    mode = first.flags.get("router-mode") or variables.get("DYN_ROUTER_MODE", "")
    if mode in MODES:
        routing = Routing(policy=MODES[mode])
    elif mode:
        notes.append(Note(first.reader.path, "its router mode is not known; the default policy takes its place"))
    ours = ("router-mode", "http-port", "m", "host", "port")
    notes += [
        Note(first.args, f"--{name}: has no equal here and is left out")
        for name in first.flags.named
        if name not in ours
    ]
    template = first.template
    template.main["env"] = [each for each in template.main.get("env", []) if not each["name"].startswith("DYN_")]
    if not template.main["env"]:
        del template.main["env"]
    role = RoleSpec(
        name="router",
        type=RoleType.ROUTER,
        replicas=first.replicas,
        scaling=first.scaling,
        drain=drain(template.grace_seconds),
        pod_template=template.built(),
    )
    return None if role == usual else role, routing


def _transfer(workers: list[_DynamoService], notes: list[Note]) -> KvTransfer:
    """Return KV transfer settings: with a store if an engine's KV connector keeps blocks, otherwise the defaults."""
    kept = False
    for part in workers:
        connectors = [part.flags.get("connector")]
        if config := part.flags.get("kv-transfer-config"):
            try:
                connectors.append(json.dumps(json.loads(config)))
            except (ValueError, RecursionError):
                notes.append(Note(part.args, "--kv-transfer-config: is no JSON"))
        kept = kept or any(name in each.lower() for each in connectors for name in STORES)
    return KvTransfer(paths=(KvPath.DIRECT, KvPath.STORE)) if kept else KvTransfer()


def _scaling(reader: DocumentReader) -> Scaling:
    adapter, autoscaling = reader.any("scalingAdapter"), reader.table("autoscaling")
    enabled = autoscaling.flag("enabled")
    least, most = autoscaling.number("minReplicas", 1), autoscaling.number("maxReplicas", 64)
    autoscaling.skip_all()
    on = enabled or (adapter is not None and (not isinstance(adapter, dict) or adapter.get("enabled", True)))
    if not on:
        return Scaling()
    if enabled:
        return Scaling(mode=ScalingMode.EXTERNAL, least=least, most=max(least, most))
    return Scaling(mode=ScalingMode.EXTERNAL)


def _mounts(service: DocumentReader, template: PodTemplate) -> None:
    """Copy the PersistentVolumeClaims that a service of v1alpha1 mounts, and their mount paths, to the pod template."""
    for mount in service.tables("volumeMounts"):
        claim, place = mount.text("name"), mount.text("mountPoint")
        mount.any("useAsCompilationCache")
        if not claim or not place:
            continue
        template.spec.setdefault("volumes", []).append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
        template.main.setdefault("volumeMounts", []).append({"name": claim, "mountPath": place})


def _shared_memory(reader: DocumentReader, template: PodTemplate) -> None:
    reader.any("disabled")
    if size := reader.text("size"):
        shared = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        template.spec.setdefault("volumes", []).append(shared)


def _merged(service: Any, main: Any) -> dict[str, Any]:
    """Merge the resource requests and limits of a service with the requests and limits of its container.

    If both set a resource, the container's value is used.
    """
    merged: dict[str, Any] = {}
    for each in (service, main):
        for section, quantities in (each if isinstance(each, dict) else {}).items():
            if isinstance(quantities, dict):
                merged[section] = merged.get(section, {}) | quantities
    return merged


def _spec_rest(spec: DocumentReader) -> None:
    spec.any("backendFramework")
    if claims := [
        each.get("name", "") for each in spec.values("pvcs") if isinstance(each, dict) and each.get("create")
    ]:
        spec.note("pvcs", f"claims are not made here; make {', '.join(map(str, claims))} yourself")
    spec.rest({"restart": "", "services": "", "components": ""})
