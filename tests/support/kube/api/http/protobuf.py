"""Decoder of Kubernetes objects in protobuf: Helm 4 sends some objects in this form.

The module reads only the few kinds that tests need. A body is four magic bytes and a `runtime.Unknown`. The field
numbers are those of the generated.proto files of k8s.io/api and k8s.io/apimachinery. The server answers with JSON,
which clients that send protobuf accept as well.
"""

import base64
from collections.abc import Iterator
from typing import Literal

from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.values import Json, Object

MAGIC = b"k8s\0"
Type = Literal["text", "texts", "number", "truth", "text map", "bytes map", "metadata", "preconditions", "skipped"]

METADATA: dict[int, tuple[str, Type]] = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
    5: ("uid", "text"),
    6: ("resourceVersion", "text"),
    11: ("labels", "text map"),
    12: ("annotations", "text map"),
    14: ("finalizers", "texts"),
}
KINDS: dict[str, dict[int, tuple[str, Type]]] = {
    "Secret": {
        1: ("metadata", "metadata"),
        2: ("data", "bytes map"),
        3: ("type", "text"),
        4: ("stringData", "text map"),
        5: ("immutable", "truth"),
    },
    "ConfigMap": {
        1: ("metadata", "metadata"),
        2: ("data", "text map"),
        3: ("binaryData", "bytes map"),
        4: ("immutable", "truth"),
    },
    "Namespace": {1: ("metadata", "metadata")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "number"),
        2: ("preconditions", "preconditions"),
        3: ("orphanDependents", "truth"),
        4: ("propagationPolicy", "text"),
        5: ("dryRun", "texts"),
    },
}
PRECONDITIONS: dict[int, tuple[str, Type]] = {1: ("uid", "text"), 2: ("resourceVersion", "text")}


def decode(body: bytes) -> Object:
    """Decode an object.

    Raises:
        ApiError: The module does not read this kind (415), or the object is malformed (400).
    """
    try:
        envelope = dict(_fields(body.removeprefix(MAGIC)))
        named = dict(_fields(envelope[1]))
        kind, version = named[2].decode(), named[1].decode()
        if kind not in KINDS:
            raise ApiError("UnsupportedMediaType", f"{kind} in protobuf is not taken here: send application/json")
        return {"apiVersion": version, "kind": kind} | _message(envelope.get(2, b""), KINDS[kind])
    except (IndexError, KeyError, UnicodeDecodeError, TypeError) as error:
        raise ApiError("BadRequest", f"the body is no Kubernetes object in protobuf: {error}") from error


def _message(body: bytes, known: dict[int, tuple[str, Type]]) -> Object:
    found: Object = {}
    for number, value in _fields(body):
        name, kind = known.get(number, ("", "skipped"))
        match kind:
            case "text map" | "bytes map":
                entry = dict(_fields(value))
                content = entry.get(2, b"")
                text = base64.b64encode(content).decode() if kind == "bytes map" else content.decode()
                found.setdefault(name, {})[entry.get(1, b"").decode()] = text
            case "texts":
                found.setdefault(name, []).append(value.decode())
            case "text":
                if value:
                    found[name] = value.decode()
            case "number":
                found[name] = value
            case "truth":
                found[name] = bool(value)
            case "metadata":
                found[name] = _message(value, METADATA)
            case "preconditions":
                found[name] = _message(value, PRECONDITIONS)
            case "skipped":
                pass
    return found


def _fields(body: bytes) -> Iterator[tuple[int, Json]]:
    """Yield the number and the content of each field; the content is bytes or an integer."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        if tag & 7 == 0:
            value, at = _varint(body, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(body, at)
            if at + length > len(body):
                raise IndexError("it is cut short")
            yield tag >> 3, body[at : at + length]
            at += length
        else:
            raise IndexError(f"unexpected wire type {tag & 7}")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
