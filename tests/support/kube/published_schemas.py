"""Checks objects against the schemas that each version of Kubernetes publishes for its own kinds.

The schemas are strict: an unknown field is an error. `kubernetes_validate.validate` makes the same check, but reads a
megabyte for each call; this module reads every schema once.
"""

import functools
import re
from typing import Any

import jsonschema
import kubernetes_validate.utils as published
from referencing import Registry, Resource


def check(document: dict[str, Any], version: str) -> None:
    """Check an object against the schema of its kind.

    Raises:
        jsonschema.ValidationError: The object breaks the schema.
        FileNotFoundError: The version does not have the kind.
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
