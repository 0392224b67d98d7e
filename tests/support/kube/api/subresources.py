"""Subresources other than status: the scale of an object, and the binding and the eviction of pods."""

from tests.support.kube.api import errors
from tests.support.kube.api.cluster import ObjectStore, Options, Written
from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.kinds.selectors import label_test, selector_text
from tests.support.kube.api.patching import json_patch, merge_patch, strategic_merge
from tests.support.kube.api.values import Json, Object, clone, dig, without


def scale_of(resource: ServedResource, item: Object) -> Object:
    """Return the `autoscaling/v1` Scale of an object."""
    assert resource.scale is not None
    shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    replicas = dig(item, *resource.scale.replicas)
    if replicas is None:
        replicas = 0
    status: Object = {"replicas": dig(item, *resource.scale.status) or 0}
    if selector := _scale_selector(item, resource.scale.selector):
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: item["metadata"][name] for name in shown if name in item["metadata"]},
        "spec": {"replicas": replicas} if replicas else {},
        "status": status,
    }


def _scale_selector(item: Object, path: tuple[str, ...] | None) -> str:
    found = dig(item, *path) if path else None
    return found if isinstance(found, str) else selector_text(found)


def replace_scale(
    cluster: ObjectStore, resource: ServedResource, namespace: str, name: str, scale: Json, options: Options
) -> Object:
    """Set the replicas of an object to those of a Scale.

    Raises:
        ApiError: The body is not a Scale, or the object does not allow the number.
    """
    assert resource.scale is not None
    replicas = dig(scale, "spec", "replicas") or 0
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise ApiError("BadRequest", "Scale.spec.replicas must be an integer")
    if replicas < 0:
        raise errors.invalid(
            "autoscaling",
            "Scale",
            name,
            [errors.invalid_value("spec.replicas", replicas, "must be greater than or equal to 0")],
        )
    item = clone(cluster.get(resource, namespace, name))
    place = item
    for field in resource.scale.replicas[:-1]:
        place = place.setdefault(field, {})
    place[resource.scale.replicas[-1]] = replicas
    if asked := dig(scale, "metadata", "resourceVersion"):
        item["metadata"]["resourceVersion"] = asked
    written: Written = cluster.replace(resource, namespace, name, item, options)
    return scale_of(resource, written.item)


def patch_scale(
    cluster: ObjectStore, resource: ServedResource, namespace: str, name: str, kind: str, patch: Json, options: Options
) -> Object:
    now = scale_of(resource, cluster.get(resource, namespace, name))
    now["metadata"] = without(now["metadata"], "resourceVersion")
    match kind:
        case "json-patch":
            changed = json_patch(now, patch, group="autoscaling", kind="Scale")
        case "merge-patch" | "apply-patch":
            changed = merge_patch(now, patch)
        case _:
            changed = strategic_merge(now, patch, None)
    return replace_scale(cluster, resource, namespace, name, changed, options)


def evict(cluster: ObjectStore, pods: ServedResource, namespace: str, name: str, eviction: Json) -> Object:
    """Delete a pod, unless a PodDisruptionBudget forbids it at present.

    Raises:
        ApiError: A budget forbids the eviction (429), or more than one budget covers the pod (500).
    """
    pod = cluster.get(pods, namespace, name)
    budgets = [
        each for each in cluster.storage.items(("policy", "poddisruptionbudgets"), namespace) if _speaks_for(each, pod)
    ]
    if len(budgets) > 1:
        raise ApiError(
            "InternalError",
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
        )
    if (
        budgets
        and dig(pod, "status", "phase") == "Running"
        and _disruptions_allowed(cluster, budgets[0], namespace) < 1
    ):
        refused = ApiError(
            "TooManyRequests",
            "Cannot evict pod as it would violate the pod's disruption budget.",
            retry_after_seconds=10,
        )
        text = f"The disruption budget {budgets[0]['metadata']['name']} needs more healthy pods than there are"
        refused.details["causes"] = [{"reason": "DisruptionBudget", "message": text}]
        raise refused
    cluster.delete(pods, namespace, name, dig(eviction, "deleteOptions") or {})
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def bind(cluster: ObjectStore, pods: ServedResource, namespace: str, name: str, binding: Json) -> None:
    """Bind a pod to a node, as a scheduler does.

    Raises:
        ApiError: The pod is already bound to a node, or the binding names none.
    """
    pod = clone(cluster.get(pods, namespace, name))
    node = dig(binding, "target", "name")
    if pod["spec"].get("nodeName") or not node:
        why = (
            f'pod {name} is already assigned to node "{pod["spec"].get("nodeName")}"'
            if node
            else "target.name is missing"
        )
        raise errors.conflict("", "pods/binding", name, why)
    pod["spec"]["nodeName"] = node
    cluster.storage.put(pods.place, (namespace, name), pod)


def _speaks_for(budget: Object, pod: Object) -> bool:
    return label_test(selector_text(dig(budget, "spec", "selector")))(pod)


def _disruptions_allowed(cluster: ObjectStore, budget: Object, namespace: str) -> int:
    """Return how many pods may be evicted now under the budget, as the disruption controller would compute it."""
    pods = [each for each in cluster.storage.items(("", "pods"), namespace) if _speaks_for(budget, each)]
    healthy = sum(
        any(
            each.get("type") == "Ready" and each.get("status") == "True"
            for each in dig(pod, "status", "conditions") or ()
        )
        and not pod["metadata"].get("deletionTimestamp")
        for pod in pods
    )
    if (least := dig(budget, "spec", "minAvailable")) is not None:
        return healthy - _count(least, len(pods))
    return healthy - (len(pods) - _count(dig(budget, "spec", "maxUnavailable") or 0, len(pods)))


def _count(number: int | str, whole: int) -> int:
    return number if isinstance(number, int) else -(-whole * int(number.removesuffix("%")) // 100)
