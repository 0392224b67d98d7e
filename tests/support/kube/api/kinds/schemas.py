"""Structural schemas: decide which values are valid, and how lists and maps in values are merged.

A `StructuralSchema` is one node of a schema. Built-in and custom kinds have the same nodes; nodes of built-in kinds
refer to each other by `$ref`.

A value passes three steps:

1. Fields that the schema does not name are pruned, unless the node preserves unknown fields.
2. Missing fields get their defaults: first those of a node, then those of the nodes below it.
3. The value is validated; every violation has the path of the field.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from tests.support.kube.api import errors
from tests.support.kube.api.errors import ErrorCause
from tests.support.kube.api.values import Json, Object, clone, key_of, within

REF = "$ref"
PREFIX = "#/definitions/"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
FORMATS: dict[str, str] = {
    "date-time": r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "int32": "",
    "int64": "",
    "uuid": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
    "byte": r"[A-Za-z0-9+/]*={0,2}",
}


class StructuralSchema:
    """Represents one node of a schema.

    Args:
        node: The node in the form of an OpenAPI document.
        definitions: The nodes that `$ref`s name.
    """

    __slots__ = ("_children", "definitions", "node")

    def __init__(self, node: Object, definitions: Mapping[str, Object] | None = None):
        while REF in node and definitions is not None:
            node = definitions[node[REF].removeprefix(PREFIX)]
        self.node = node
        self.definitions = definitions
        self._children: dict[str, StructuralSchema | None] = {}

    def field(self, name: str) -> "StructuralSchema | None":
        """Return the node of a field, or of the values of a map; None if the schema does not know the field."""
        if name not in self._children:
            node = self.node.get("properties", {}).get(name)
            if node is None and isinstance(more := self.node.get("additionalProperties"), dict):
                node = more
            if node is None and self.node.get("x-kubernetes-embedded-resource"):
                node = {"kind": _TEXT, "apiVersion": _TEXT, "metadata": _ANYTHING}.get(name)
            self._children[name] = None if node is None else StructuralSchema(node, self.definitions)
        return self._children[name]

    @property
    def item(self) -> "StructuralSchema":
        if "[]" not in self._children:
            self._children["[]"] = StructuralSchema(self.node.get("items", _ANYTHING), self.definitions)
        found = self._children["[]"]
        assert found is not None
        return found

    @property
    def named(self) -> bool:
        """True if the fields have fixed names, as in a struct; in a map, the user chooses the names."""
        return "properties" in self.node

    @property
    def open(self) -> bool:
        return (
            bool(self.node.get("x-kubernetes-preserve-unknown-fields")) or self.node.get("additionalProperties") is True
        )

    @property
    def type(self) -> str | None:
        return self.node.get("type")

    @property
    def atomic(self) -> bool:
        """True if a manager of server-side apply owns the value only as a whole, and not its parts."""
        if self.type == "array":
            return self.list_type == "atomic"
        return self.type == "object" and self.node.get("x-kubernetes-map-type") == "atomic"

    @property
    def list_type(self) -> Literal["atomic", "set", "map"]:
        return self.node.get("x-kubernetes-list-type", "atomic")

    @property
    def keys(self) -> list[str]:
        return self.node.get("x-kubernetes-list-map-keys", [])

    def keys_of(self, item: Object) -> Object:
        """Return the key fields of a list-map's item; a missing field has its default, and is left out if it has none."""
        found = {}
        for key in self.keys:
            value = item.get(key)
            if value is None and (shape := self.item.field(key)) is not None:
                value = shape.node.get("default")
            if value is not None:
                found[key] = value
        return found


_TEXT: Object = {"type": "string"}
_ANYTHING: Object = {"x-kubernetes-preserve-unknown-fields": True}


def prune(value: Json, shape: StructuralSchema, path: str = "") -> list[str]:
    """Remove fields that the schema does not know, and return their paths."""
    unknown: list[str] = []
    if isinstance(value, dict):
        for name in list(value):
            child = shape.field(name)
            if child is not None:
                unknown += prune(value[name], child, within(path, name))
            elif not shape.open:
                del value[name]
                unknown.append(within(path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            unknown += prune(each, shape.item, f"{path}[{index}]")
    return unknown


def drop_nulls(value: Json, shape: StructuralSchema) -> None:
    """Remove fields that are null although the schema does not allow null, as a typed decoder does; keep nulls in untyped values."""
    if isinstance(value, dict):
        for name in list(value):
            child = shape.field(name)
            if child is None:
                continue
            if value[name] is None and not child.node.get("nullable") and not child.open:
                del value[name]
            else:
                drop_nulls(value[name], child)
    elif isinstance(value, list):
        for each in value:
            drop_nulls(each, shape.item)


def fill_defaults(value: Json, shape: StructuralSchema) -> None:
    if isinstance(value, dict):
        for name, node in shape.node.get("properties", {}).items():
            if value.get(name) is None and "default" in node and not (name in value and node.get("nullable")):
                value[name] = clone(node["default"])
        for name, each in value.items():
            if (child := shape.field(name)) is not None:
                fill_defaults(each, child)
    elif isinstance(value, list):
        for each in value:
            fill_defaults(each, shape.item)


def violations(value: Json, shape: StructuralSchema, path: str = "") -> Iterator[ErrorCause]:
    """Yield all violations of the schema, those of outer values first."""
    node = shape.node
    if value is None:
        if not (node.get("nullable") or shape.type is None):
            yield errors.invalid_value(path, "null", f'{path} in body must be of type {shape.type}: "null"')
        return
    if node.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield errors.invalid_value(path, _type_of(value), f"{path} in body must be an integer or a string")
            return
    elif shape.type and not _is(value, shape.type):
        kind = _type_of(value)
        yield errors.invalid_value(path, kind, f'{path} in body must be of type {shape.type}: "{kind}"')
        return
    if "enum" in node and value not in node["enum"]:
        yield errors.not_supported(path, value, node["enum"])
    yield from _combined(value, shape, path)
    if isinstance(value, dict):
        yield from _object_violations(value, shape, path)
    elif isinstance(value, list):
        yield from _list_violations(value, shape, path)
    elif isinstance(value, str):
        yield from _text_violations(value, node, path)
    elif not isinstance(value, bool):
        yield from _number_violations(value, node, path)


def _object_violations(value: Object, shape: StructuralSchema, path: str) -> Iterator[ErrorCause]:
    node = shape.node
    for name in node.get("required", ()):
        if name not in value:
            yield errors.required(within(path, name))
    if len(value) > node.get("maxProperties", len(value)):
        yield errors.too_many(path, len(value), node["maxProperties"])
    if len(value) < node.get("minProperties", 0):
        yield errors.invalid_value(
            path, len(value), f"{path} in body should have at least {node['minProperties']} properties"
        )
    for name, each in value.items():
        if (child := shape.field(name)) is not None:
            yield from violations(each, child, within(path, name))


def _list_violations(value: list[Json], shape: StructuralSchema, path: str) -> Iterator[ErrorCause]:
    node = shape.node
    if len(value) > node.get("maxItems", len(value)):
        yield errors.too_many(path, len(value), node["maxItems"])
    if len(value) < node.get("minItems", 0):
        yield errors.invalid_value(path, len(value), f"{path} in body should have at least {node['minItems']} items")
    seen: set[object] = set()
    for index, each in enumerate(value):
        at = f"{path}[{index}]"
        if shape.list_type == "map" and isinstance(each, dict):
            key: object = key_of(shape.keys_of(each), shape.keys)
            if key in seen:
                yield errors.duplicate(at, shape.keys_of(each))
            seen.add(key)
        elif shape.list_type == "set" or node.get("uniqueItems"):
            key = errors.brief(each)
            if key in seen:
                yield errors.duplicate(at, each)
            seen.add(key)
        yield from violations(each, shape.item, at)


def _text_violations(value: str, node: Object, path: str) -> Iterator[ErrorCause]:
    if len(value) > node.get("maxLength", len(value)):
        yield errors.too_long(path, node["maxLength"])
    if len(value) < node.get("minLength", 0):
        yield errors.invalid_value(path, value, f"{path} in body should be at least {node['minLength']} chars long")
    if "pattern" in node and not re.search(node["pattern"], value):
        yield errors.invalid_value(path, value, f"{path} in body should match '{node['pattern']}'")
    form = FORMATS.get(node.get("format", ""))
    if form and not re.fullmatch(form, value):
        yield errors.invalid_value(
            path, value, f"{path} in body must be of type {node['format']}: {errors.brief(value)}"
        )


def _number_violations(value: float, node: Object, path: str) -> Iterator[ErrorCause]:
    bounds: tuple[tuple[str, str, Callable[[float, float], bool], str], ...] = (
        ("minimum", "exclusiveMinimum", lambda value, bound: value < bound, "greater than"),
        ("maximum", "exclusiveMaximum", lambda value, bound: value > bound, "less than"),
    )
    for name, exclusive, outside, words in bounds:
        if name not in node:
            continue
        bound, strict = node[name], bool(node.get(exclusive))
        if outside(value, bound) or (strict and value == bound):
            text = words if strict else f"{words} or equal to"
            yield errors.invalid_value(path, value, f"{path} in body should be {text} {bound}")
    if "multipleOf" in node and value % node["multipleOf"]:
        yield errors.invalid_value(path, value, f"{path} in body should be a multiple of {node['multipleOf']}")


def _combined(value: Json, shape: StructuralSchema, path: str) -> Iterator[ErrorCause]:
    """Yield the violations of `allOf`, `anyOf`, `oneOf` and `not`."""

    def holds(node: Object) -> bool:
        return next(violations(value, StructuralSchema(node, shape.definitions), path), None) is None

    for each in shape.node.get("allOf", ()):
        yield from violations(value, StructuralSchema(each, shape.definitions), path)
    if (options := shape.node.get("anyOf")) and not any(holds(each) for each in options):
        yield errors.invalid_value(path, value, f"{path} in body must validate at least one schema (anyOf)")
    if (options := shape.node.get("oneOf")) and sum(holds(each) for each in options) != 1:
        yield errors.invalid_value(path, value, f"{path} in body must validate one and only one schema (oneOf)")
    if (refused := shape.node.get("not")) is not None and holds(refused):
        yield errors.invalid_value(path, value, f"{path} in body must not validate the schema (not)")


def _is(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])


def _type_of(value: Json) -> str:
    return next(kind for kind in ("object", "array", "string", "boolean", "integer", "number") if _is(value, kind))
