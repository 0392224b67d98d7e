"""OpenAPI documents of all served kinds: version 2 as JSON and protobuf, version 3 by group and version.

Older kubectl and Helm read only version 2. Field numbers of the protobuf form are those of gnostic's
openapiv2/OpenAPIv2.proto.
"""

import hashlib
import json
from collections.abc import Callable, Iterable

from tests.support.kube.api.kinds import builtin as builtin_kinds
from tests.support.kube.api.kinds.builtin import META, definitions
from tests.support.kube.api.kinds.resources import ResourceCatalogue, ServedResource
from tests.support.kube.api.kinds.schemas import PREFIX, REF
from tests.support.kube.api.values import Json, Object, every_dict, without

GVK = "x-kubernetes-group-version-kind"
V3_PREFIX = "#/components/schemas/"
ALWAYS = (
    f"{META}DeleteOptions",
    f"{META}Status",
    f"{META}ObjectMeta",
    f"{META}ListMeta",
    "io.k8s.api.autoscaling.v1.Scale",
)
INFO = {"title": "Fleet's API server for tests", "version": f"v{builtin_kinds.VERSION}"}
PARAMETERS = ("dryRun", "fieldManager", "fieldValidation")
"""Query parameters of writes that clients use only if the document lists them."""
ONLY_OURS = ("x-kubernetes-validations", "nullable", "anyOf", "oneOf", "not", "default")


class Documents:
    """Makes each document of a catalogue when it is first requested, and again after the catalogue has changed."""

    def __init__(self, catalogue: ResourceCatalogue):
        self._catalogue = catalogue
        self._made: dict[str, tuple[int, bytes]] = {}

    def v2(self) -> bytes:
        return self._cached("v2", lambda: _json(self._second()))

    def v2_protobuf(self) -> bytes:
        return self._cached("v2 protobuf", lambda: _protobuf(self._second()))

    def v3_index(self) -> bytes:
        def make() -> bytes:
            versions = dict.fromkeys((each.group, each.version) for each in self._catalogue)
            paths = {}
            for group, version in versions:
                at = _root(group, version).removeprefix("/")
                digest = hashlib.sha256(self.v3(group, version) or b"").hexdigest()[:32]
                paths[at] = {"serverRelativeURL": f"/openapi/v3/{at}?hash={digest}"}
            return _json({"paths": paths})

        return self._cached("v3", make)

    def v3(self, group: str, version: str) -> bytes | None:
        """Return the document of a group's version; None if there is no such version."""
        served = [each for each in self._catalogue if (each.group, each.version) == (group, version)]
        return self._cached(f"v3 {group}/{version}", lambda: _json(_third(served))) if served else None

    def _cached(self, name: str, make: Callable[[], bytes]) -> bytes:
        if name not in self._made or self._made[name][0] != self._catalogue.generation:
            self._made[name] = (self._catalogue.generation, make())
        return self._made[name][1]

    def _second(self) -> Object:
        paths = {}
        for each in self._catalogue:
            parameters = [{"name": name, "in": "query", "type": "string", "uniqueItems": True} for name in PARAMETERS]
            paths[_path(each)] = {"patch": {"parameters": parameters, "responses": {}, GVK: _gvk(each)}}
        return {
            "swagger": "2.0",
            "info": INFO,
            "paths": paths,
            "definitions": _definitions(self._catalogue, second=True),
        }


def _third(served: list[ServedResource]) -> Object:
    paths: Object = {}
    for each in served:
        parameters = [
            {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}} for name in PARAMETERS
        ]
        answer = {
            "200": {
                "description": "OK",
                "content": {"application/json": {"schema": {REF: V3_PREFIX + definition_name(each)}}},
            }
        }
        operation = {GVK: _gvk(each), "responses": answer}
        paths[_path(each)] = {
            "get": operation | {"x-kubernetes-action": "get"},
            "patch": operation | {"x-kubernetes-action": "patch", "parameters": parameters},
        }
    document = {
        "openapi": "3.0.0",
        "info": INFO,
        "paths": paths,
        "components": {"schemas": _definitions(served, second=False)},
    }
    return json.loads(json.dumps(document).replace(f'"{PREFIX}', f'"{V3_PREFIX}'))


def definition_name(resource: ServedResource) -> str:
    """Return the name that Kubernetes gives a definition; for a custom kind it begins with the reversed group."""
    if resource.custom:
        return ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])
    return builtin_kinds.definition_names()[resource.group, resource.version, resource.kind]


def _definitions(served: Iterable[ServedResource], *, second: bool) -> dict[str, Object]:
    """Return the definitions of all served kinds, and all further definitions that these refer to."""
    found: dict[str, Object] = {}
    custom = {definition_name(each): each for each in served if each.custom}
    wanted = [*ALWAYS, *(definition_name(each) for each in served)]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = _custom(custom[name], second=second) if name in custom else definitions()[name]
        wanted += [node[REF].removeprefix(PREFIX) for node in every_dict(found[name]) if isinstance(node.get(REF), str)]
    return found


def _custom(resource: ServedResource, *, second: bool) -> Object:
    schema = resource.schema or {"type": "object"}
    shown = _second_form(schema) if second else schema
    metadata = {"description": "Standard object's metadata.", REF: f"{PREFIX}{META}ObjectMeta"}
    if "properties" in shown or not shown.get("x-kubernetes-preserve-unknown-fields"):
        known = {
            "apiVersion": definitions()[f"{META}Status"]["properties"]["apiVersion"],
            "kind": definitions()[f"{META}Status"]["properties"]["kind"],
            "metadata": metadata,
        }
        shown = shown | {"type": "object", "properties": (shown.get("properties") or {}) | known}
    return shown | {GVK: [_gvk(resource)]}


def _second_form(node: Json) -> Json:
    """Return the parts of a schema node that OpenAPI version 2 can express.

    A node that accepts unknown fields loses its type and properties, because clients of version 2 would refuse other fields.
    """
    if not isinstance(node, dict):
        return node
    kept = without(node, *ONLY_OURS)
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return without(kept, "type", "properties", "items", "additionalProperties", "required")
    if node.get("x-kubernetes-int-or-string"):
        return without(kept, "type")
    if "properties" in kept:
        kept["properties"] = {name: _second_form(each) for name, each in kept["properties"].items()}
    for name in ("items", "additionalProperties"):
        if name in kept:
            kept[name] = _second_form(kept[name])
    return kept


def _root(group: str, version: str) -> str:
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


def _path(resource: ServedResource) -> str:
    scope = "/namespaces/{namespace}" if resource.namespaced else ""
    return f"{_root(resource.group, resource.version)}{scope}/{resource.plural}/{{name}}"


def _gvk(resource: ServedResource) -> Object:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _json(document: Object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


# Encoding in protobuf; all fields are length-delimited, except one boolean.


def _protobuf(document: Object) -> bytes:
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = b"".join(
        _message(2, _text(1, path) + _message(2, _message(8, _operation(item["patch"]))))
        for path, item in document["paths"].items()
    )
    named = b"".join(_named_schema(name, node) for name, node in document["definitions"].items())
    return _text(1, document["swagger"]) + _message(2, info) + _message(8, paths) + _message(9, named)


def _operation(operation: Object) -> bytes:
    parameters = b""
    for each in operation["parameters"]:
        query = _text(2, each["in"]) + _text(4, each["name"]) + _text(6, each["type"])
        parameters += _message(8, _message(1, _message(2, _message(3, query))))
    return parameters + _message(9, b"") + _extension(13, GVK, operation[GVK])


def _named_schema(name: str, node: Json) -> bytes:
    return _message(1, _text(1, name) + _message(2, _schema(node)))


def _schema(node: Json) -> bytes:
    if not isinstance(node, dict):
        return b""
    parts = _text(1, node.get(REF, "")) + _text(2, node.get("format", "")) + _text(4, node.get("description", ""))
    for name in node.get("required") or ():
        parts += _text(19, name)
    for value in node.get("enum") or ():
        parts += _message(20, _text(2, json.dumps(value)))
    more = node.get("additionalProperties")
    if isinstance(more, dict):
        parts += _message(21, _message(1, _schema(more)))
    elif more is not None:
        parts += _message(21, _tag(2, 0) + bytes([bool(more)]))
    if "type" in node:
        parts += _message(22, _text(1, node["type"]))
    if "items" in node:
        parts += _message(23, _message(1, _schema(node["items"])))
    if "properties" in node:
        parts += _message(25, b"".join(_named_schema(name, each) for name, each in node["properties"].items()))
    for name, value in node.items():
        if name.startswith("x-"):
            parts += _extension(31, name, value)
    return parts


def _extension(number: int, name: str, value: Json) -> bytes:
    return _message(number, _text(1, name) + _message(2, _text(2, json.dumps(value))))


def _text(number: int, value: str) -> bytes:
    return _message(number, value.encode()) if value else b""


def _message(number: int, body: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(body)) + body


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
