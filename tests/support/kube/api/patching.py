"""The three kinds of patches: JSON patch (RFC 6902), merge patch (RFC 7396), and Kubernetes' strategic merge.

A strategic merge follows the schema: if the schema gives a list a merge key, items with equal keys are merged.
Directives (`$patch`, `$retainKeys`, `$deleteFromPrimitiveList`, `$setElementOrder`) express other changes. The
Kubernetes API conventions and the notes on strategic merge patches define the directives.
"""

from collections.abc import Callable

import jsonpatch
import jsonpointer

from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Json, Object, clone


def json_patch(target: Object, operations: Json, *, group: str, kind: str) -> Object:
    """Apply a JSON patch.

    Raises:
        ApiError: The patch is malformed (400), or one of its operations fails (422).
    """
    try:
        return jsonpatch.JsonPatch(operations).apply(clone(target))
    except (jsonpatch.InvalidJsonPatch, TypeError) as error:
        raise ApiError("BadRequest", f"the body is not a JSON patch: {error}") from error
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
        details = {"group": group, "kind": kind}
        raise ApiError(
            "Invalid", f"the server rejected our request due to an error in our request: {error}", details=details
        ) from error


def merge_patch(target: Json, patch: Json) -> Json:
    if not isinstance(patch, dict):
        return clone(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, each in patch.items():
        if each is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), each)
    return merged


def strategic_merge(target: Json, patch: Json, shape: StructuralSchema | None) -> Json:
    if not isinstance(patch, dict):
        return clone(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return _bare(patch)
    if directive == "delete":
        return {}
    merged = clone(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        merged = {name: each for name, each in merged.items() if name in patch["$retainKeys"]}
    for name, each in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            merged[field] = [value for value in merged.get(field) or [] if value not in each]
    for name, each in patch.items():
        if name.startswith("$"):
            continue
        if each is None:
            merged.pop(name, None)
            continue
        child = None if shape is None else shape.field(name)
        if isinstance(each, list) and child is not None and "merge" in _strategies(child):
            merged[name] = _merge_lists(merged.get(name) or [], each, child, patch.get(f"$setElementOrder/{name}"))
        elif isinstance(each, dict) and "replace" not in _strategies(child):
            merged[name] = strategic_merge(merged.get(name), each, child)
        else:
            merged[name] = _bare(each)
    return merged


def _strategies(shape: StructuralSchema | None) -> list[str]:
    return [] if shape is None else shape.node.get("x-kubernetes-patch-strategy", "").split(",")


def _merge_lists(
    target: list[Json], patch: list[Json], shape: StructuralSchema, order: list[Json] | None
) -> list[Json]:
    key = shape.node.get("x-kubernetes-patch-merge-key")
    if key is None:
        merged = [*target, *(each for each in patch if each not in target)]
        return merged if order is None else _in_order(merged, order, lambda value: value)
    if any(isinstance(each, dict) and each.get("$patch") == "replace" and key not in each for each in patch):
        return [_bare(each) for each in patch if each.get("$patch") != "replace"]
    merged = list(target)
    for each in patch:
        if not isinstance(each, dict) or key not in each:
            raise ApiError("BadRequest", f"map: {each} does not contain declared merge key: {key}")
        at = next((index for index, item in enumerate(merged) if item.get(key) == each[key]), None)
        if each.get("$patch") == "delete":
            merged = [item for item in merged if item.get(key) != each[key]]
        elif at is None:
            merged.append(strategic_merge({}, each, shape.item))
        else:
            merged[at] = strategic_merge(merged[at], each, shape.item)
    return merged if order is None else _in_order(merged, [each.get(key) for each in order], lambda item: item.get(key))


def _in_order(items: list[Json], order: list[Json], key: Callable[[Json], Json]) -> list[Json]:
    """Order the items as the patch demands. An item that is not in `order` stays behind the item that it followed."""
    placed: list[tuple[int, int, Json]] = []
    rank = -1
    for index, each in enumerate(items):
        if key(each) in order:
            rank = order.index(key(each))
        placed.append((rank, index, each))
    return [each for _, _, each in sorted(placed, key=lambda entry: entry[:2])]


def _bare(value: Json) -> Json:
    """Return the patch without directives."""
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items() if not name.startswith("$")}
    if isinstance(value, list):
        return [_bare(each) for each in value]
    return value
