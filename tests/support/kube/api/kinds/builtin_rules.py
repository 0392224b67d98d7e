"""Rules of built-in kinds that their schemas cannot express: dependent defaults, further checks, immutable fields."""

import base64
from collections.abc import Callable, Iterator

from tests.support.kube.api import errors
from tests.support.kube.api.errors import ErrorCause
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.values import Object, dig

Address = Callable[[], str]
"""Function that returns the next free IP address for a Service."""


def complete(resource: ServedResource, item: Object, old: Object | None, next_address: Address) -> None:
    """Fill in the fields that follow from other fields or from the object's earlier state; do nothing for custom kinds.

    The caller checks the schema afterwards.
    """
    if resource.custom:
        return
    if resource.place == ("", "services"):
        _complete_service(item, old, next_address)
    elif (finish := _COMPLETE.get(resource.kind)) is not None:
        finish(item)
    for template in (item, dig(item, "spec", "template"), dig(item, "spec", "jobTemplate", "spec", "template")):
        if isinstance(template, dict) and dig(template, "spec", "containers"):
            _complete_pod(template["spec"])


def _complete_pod(spec: Object) -> None:
    if name := spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", name)
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        if isinstance(container, dict) and isinstance(image := container.get("image"), str):
            tag = image.rpartition("/")[2].partition(":")[2]
            container.setdefault(
                "imagePullPolicy", "Always" if tag in {"", "latest"} and "@" not in image else "IfNotPresent"
            )


def _complete_deployment(item: Object) -> None:
    strategy = dig(item, "spec", "strategy")
    if isinstance(strategy, dict) and strategy.get("type", "RollingUpdate") == "RollingUpdate":
        strategy["rollingUpdate"] = {"maxSurge": "25%", "maxUnavailable": "25%"} | (strategy.get("rollingUpdate") or {})


def _complete_service(item: Object, old: Object | None, next_address: Address) -> None:
    spec = item.get("spec")
    if not isinstance(spec, dict) or spec.get("type") == "ExternalName":
        return
    if not spec.get("clusterIP"):
        spec["clusterIP"] = dig(old, "spec", "clusterIP") or next_address()
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    spec.setdefault("internalTrafficPolicy", "Cluster")
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    for port in spec.get("ports") or ():
        if isinstance(port, dict) and "port" in port:
            port.setdefault("targetPort", port["port"])
    item.setdefault("status", {"loadBalancer": {}})


def _complete_secret(item: Object) -> None:
    if texts := item.pop("stringData", None):
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
        item["data"] = (item.get("data") or {}) | encoded


def _complete_namespace(item: Object) -> None:
    item.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
    item["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = item["metadata"]["name"]
    item.setdefault("status", {}).setdefault("phase", "Active")


def _complete_pod_status(item: Object) -> None:
    item.setdefault("status", {}).setdefault("phase", "Pending")


def _complete_job(item: Object) -> None:
    uid = item["metadata"].get("uid")
    spec = item.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict) or spec.get("selector"):
        return
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    labels |= {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": item["metadata"]["name"]}


def _complete_binding(item: Object) -> None:
    for subject in item.get("subjects") or ():
        if subject.get("kind") in {"User", "Group"}:
            subject.setdefault("apiGroup", "rbac.authorization.k8s.io")


_COMPLETE: dict[str, Callable[[Object], None]] = {
    "Deployment": _complete_deployment,
    "Secret": _complete_secret,
    "Namespace": _complete_namespace,
    "Pod": _complete_pod_status,
    "Job": _complete_job,
    "RoleBinding": _complete_binding,
    "ClusterRoleBinding": _complete_binding,
}

MUTABLE_SPEC: dict[str, tuple[str, ...]] = {
    "StatefulSet": (
        *("replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit"),
        *("persistentVolumeClaimRetentionPolicy", "minReadySeconds"),
    ),
    "Pod": (
        "containers",
        "initContainers",
        "activeDeadlineSeconds",
        "tolerations",
        "terminationGracePeriodSeconds",
    ),
}
IMMUTABLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "Deployment": (("spec", "selector"),),
    "ReplicaSet": (("spec", "selector"),),
    "DaemonSet": (("spec", "selector"),),
    "Job": (("spec", "selector"), ("spec", "template"), ("spec", "completionMode")),
    "Service": (("spec", "clusterIP"),),
    "RoleBinding": (("roleRef",),),
    "ClusterRoleBinding": (("roleRef",),),
    "Secret": (("type",),),
    "EndpointSlice": (("addressType",),),
}


def further_violations(resource: ServedResource, item: Object, old: Object | None) -> Iterator[ErrorCause]:
    """Yield the violations of rules that the schema does not express; only rules are checked that operators or charts may break."""
    if resource.custom:
        return
    if resource.scale or resource.kind == "DaemonSet":
        labels = dig(item, "spec", "template", "metadata", "labels") or {}
        wanted = dig(item, "spec", "selector", "matchLabels") or {}
        if not wanted and not dig(item, "spec", "selector", "matchExpressions"):
            yield errors.invalid_value("spec.selector", {}, "empty selector is invalid for deployment")
        elif any(labels.get(key) != value for key, value in wanted.items()):
            yield errors.invalid_value(
                "spec.template.metadata.labels", labels, "`selector` does not match template `labels`"
            )
    replicas = dig(item, "spec", "replicas")
    if isinstance(replicas, int) and replicas < 0:
        yield errors.invalid_value("spec.replicas", replicas, "must be greater than or equal to 0")
    if resource.kind == "EndpointSlice":
        for index, each in enumerate(item.get("endpoints") or ()):
            for number, address in enumerate(each.get("addresses") or ()):
                if address == "::1" or address.startswith("127."):
                    field = f"endpoints[{index}].addresses[{number}]"
                    yield errors.invalid_value(
                        field, address, "may not be in the loopback range (127.0.0.0/8, ::1/128)"
                    )
    if old is None:
        return
    for path in IMMUTABLE.get(resource.kind, ()):
        if dig(old, *path) is not None and dig(item, *path) != dig(old, *path):
            yield errors.invalid_value(".".join(path), dig(item, *path), "field is immutable")
    if mutable := MUTABLE_SPEC.get(resource.kind):
        for name in sorted({*dig(item, "spec"), *dig(old, "spec")} - set(mutable)):
            if name == "schedulingGates":
                yield from _added_gates(item, old)
            elif dig(item, "spec", name) != dig(old, "spec", name):
                yield errors.forbidden_field(
                    "spec",
                    f"updates to {resource.kind.lower()} spec for fields other than {_listed(mutable)} are forbidden",
                )
                break
    if old.get("immutable") is True and any(
        item.get(name) != old.get(name) for name in ("data", "binaryData", "immutable")
    ):
        yield errors.forbidden_field("data", "field is immutable when `immutable` is set")


def _added_gates(item: Object, old: Object) -> Iterator[ErrorCause]:
    """Yield an error cause for each scheduling gate that an update adds, because an update may only remove gates."""
    before = {each["name"] for each in dig(old, "spec", "schedulingGates") or ()}
    for each in dig(item, "spec", "schedulingGates") or ():
        if each["name"] not in before:
            text = f"only deletion is allowed, but found new scheduling gate '{each['name']}'"
            yield errors.forbidden_field("spec.schedulingGates", text)


def _listed(names: tuple[str, ...]) -> str:
    quoted = [f"'{each}'" for each in names]
    return ", ".join(quoted[:-1]) + f" and {quoted[-1]}"
