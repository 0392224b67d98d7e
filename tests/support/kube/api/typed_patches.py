"""Typed patches: the first check of a server-side apply, with the error texts of kube-apiserver.

A real server converts an applied object to a typed value (sigs.k8s.io/structured-merge-diff). The conversion fails for
a field that the schema does not declare, a value of another type, or a second item with the same key. The server does
not translate this error, so the answer is 500 without a reason. An invalid quantity is found in a later conversion, and
also gives 500.
"""

import json
import re
from collections.abc import Iterator

from tests.support.kube.api import ownership
from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Json, Object, every_dict

QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
QUANTITY_TEXT = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(\.[0-9]+)?(Z|[+-][0-9:]{5})")
TYPES = {"string": str, "boolean": bool, "integer": (int, float), "number": (int, float), "object": dict, "array": list}
WORDS = {
    "boolean": "expected boolean, got {brief}",
    "integer": "expected numeric (int or float), got {go}",
    "number": "expected numeric (int or float), got {go}",
    "object": "expected map, got {brief}",
    "array": "expected list, got {brief}",
}


def check_types(applied: Object, resource: ServedResource) -> None:
    """Check the fields, types and list keys of an object as it was sent.

    Raises:
        ApiError: A field is unknown or has another type, or two list items have the same key (500).
    """
    if found := list(_violations(applied, resource.shape, "")):
        text = found[0] if len(found) == 1 else "errors:\n" + "\n".join(f"  {each}" for each in found)
        raise _error(f"failed to create typed patch object ({_names(applied, resource)}): {text}")


def check_conversion(merged: Object, resource: ServedResource) -> None:
    """Check that values of the merged object can be converted to Go's types: quantities, integers, ports and times.

    Raises:
        ApiError: A value cannot be converted (500).
    """
    if resource.custom:
        return
    for misfit in _unconvertible_values(merged, resource.shape):
        raise _unconvertible(merged, resource, misfit)
    for part in every_dict(merged):
        for name in ("limits", "requests", "overhead"):
            values = part.get(name)
            for each in values.values() if isinstance(values, dict) else ():
                if isinstance(each, bool) or (isinstance(each, str) and not QUANTITY.fullmatch(each)):
                    raise _unconvertible(merged, resource, QUANTITY_TEXT)


def _unconvertible_values(value: Json, shape: StructuralSchema) -> Iterator[str]:
    """Yield Go's error texts, which name no field, for values that the schema allows but Go cannot convert."""
    if isinstance(value, dict):
        for name, each in value.items():
            if (child := shape.field(name)) is not None:
                yield from _unconvertible_values(each, child)
    elif isinstance(value, list):
        for each in value:
            yield from _unconvertible_values(each, shape.item)
    elif isinstance(value, float) and not value.is_integer() and shape.type == "integer":
        yield "cannot convert float64 to int32"
    elif isinstance(value, bool) and shape.node.get("x-kubernetes-int-or-string"):
        yield "json: cannot unmarshal bool into Go value of type int32"
    elif isinstance(value, str) and shape.node.get("format") == "date-time" and not TIME.fullmatch(value):
        yield f'parsing time "{value}" as "2006-01-02T15:04:05Z07:00": cannot parse "{value}" as "2006"'


def _unconvertible(item: Object, resource: ServedResource, why: str) -> ApiError:
    where = f"failed to convert new object ({_names(item, resource)}) to proper version"
    return _error(f"{where}: unable to convert unstructured object to {_kind(resource)}: {why}")


def _error(text: str) -> ApiError:
    return ApiError("", text, code=500)


def _names(item: Object, resource: ServedResource) -> str:
    metadata = item["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}; {_kind(resource)}"


def _kind(resource: ServedResource) -> str:
    return f"{resource.group}/{resource.version}, Kind={resource.kind}"


def _violations(value: Json, shape: StructuralSchema, path: str) -> Iterator[str]:
    if value is None or shape.type is None:
        return
    if not isinstance(value, TYPES[shape.type]) or (isinstance(value, bool) and shape.type != "boolean"):
        yield f"{path}: {_mistyped(value, shape.type)}"
    elif isinstance(value, dict):
        for name, each in value.items():
            child = shape.field(name)
            if child is not None:
                yield from _violations(each, child, f"{path}.{name}")
            elif not shape.open:
                yield f"{path}.{name}: field not declared in schema"
                return
    elif isinstance(value, list):
        yield from _of_items(value, shape, path)


def _of_items(items: list[Json], shape: StructuralSchema, path: str) -> Iterator[str]:
    seen = set()
    for index, each in enumerate(items):
        at = f"[{index}]"
        if shape.list_type == "map" and isinstance(each, dict):
            if missing := [name for name in shape.keys if name not in shape.keys_of(each)]:
                yield (
                    f"{path}: element {index}: associative list with keys has an element that omits key field "
                    f"{json.dumps(missing[0])} (and doesn't have default value)"
                )
                return
            at = ownership.readable(("k:" + json.dumps(dict(sorted(shape.keys_of(each).items()))),))
        elif shape.list_type == "set":
            at = f"[={json.dumps(each)}]"
        if shape.list_type != "atomic":
            if at in seen:
                yield f"{path}: duplicate entries for key {at}"
            seen.add(at)
        yield from _violations(each, shape.item, path + at)


def _mistyped(value: Json, expected: str) -> str:
    """Return the error text for a value whose type is not `expected`, with the value in Go's formats %v, %#v and %T."""
    kinds = {bool: "bool", int: "int64", float: "float64", str: "string", dict: "map[string]interface {}"}
    if expected == "string":
        text = json.dumps(value) if isinstance(value, str | int | float) else f"{value!r}"
        return f"expected string, got &value.valueUnstructured{{Value:{text}}}"
    return WORDS[expected].format(brief=f"&{{{value}}}", go=kinds.get(type(value), "[]interface {}"))
