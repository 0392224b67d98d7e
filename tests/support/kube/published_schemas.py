"""Checks objects against the schemas that each version of Kubernetes publishes for its own kinds.

The schemas are strict: an unknown field is an error. `kubernetes_validate.validate` makes the same check, but reads a
megabyte for each call; this module reads every schema once.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate.utils as published
from referencing import Registry, Resource


def check(document: dict[str, Any], version: str) -> None:
    """Check an object against the schema of its kind.

    Raises:
        jsonschema.ValidationError: The object breaks the schema.
        FileNotFoundError: This version of Kubernetes does not have the kind.
    """
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", document["apiVersion"])
    _validator(f"{document['kind'].lower()}-{api}", version).validate(document)


@functools.cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    schema = published.schema_contents(f"{_folder(version)}/{kind}.json", version)
    registry: Registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Registry:
    schema = published.schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource.from_contents(schema) @ Registry()


@functools.cache
def _folder(version: str) -> str:
    exact = [each for each in published.all_versions() if published.major_minor(each) == version][-1]
    return f"kubernetes-json-schema/v{exact}-local-strict"


UNTYPED = ("IntOrString", "Quantity", "Time", "MicroTime")
"""Types of Kubernetes whose values a schema does not check; a server checks them only when it converts an object."""


def untyped_fields(definition: str, version: str) -> dict[tuple[str, ...], str]:
    """Return the fields of a definition that have a type in `UNTYPED`: the type by path; `*` in a path is any list item or map key."""
    schema = published.schema_contents(f"{_folder(version)}/_definitions.json", version)
    return dict(_untyped(schema["$defs"][definition], schema["$defs"], (), ()))


def _untyped(
    node: dict[str, Any], definitions: dict[str, Any], path: tuple[str, ...], within: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    if (name := node.get("$ref", "").rpartition("/")[2]) and name not in within:
        if (short := name.rpartition(".")[2]) in UNTYPED:
            yield path, short
            return
        yield from _untyped(definitions[name], definitions, path, (*within, name))
    for field, each in node.get("properties", {}).items():
        yield from _untyped(each, definitions, (*path, field), within)
    for field in ("items", "additionalProperties"):
        if isinstance(each := node.get(field), dict):
            yield from _untyped(each, definitions, (*path, "*"), within)
