"""Tables: the form of objects that `kubectl get` requests and prints."""

from collections.abc import Sequence

from tests.support.kube.api.kinds.ages import age
from tests.support.kube.api.kinds.builtin import AGE, NAME
from tests.support.kube.api.kinds.resources import ServedResource, TableColumn
from tests.support.kube.api.values import Json, Object


def table(
    resource: ServedResource,
    items: Sequence[Object],
    metadata: Object,
    include: str,
    version: str,
    *,
    headed: bool = True,
) -> Object:
    """Return objects as a Table.

    Args:
        metadata: The metadata of the list: its revision, and the token for its next chunk.
        include: The part of each object that its row contains: `None`, `Metadata` or `Object`.
        version: The version of the kind Table.
        headed: Whether the table describes its columns; in a watch, only the first event does so.
    """
    columns = (NAME, *(resource.columns or (AGE,)))
    return {
        "kind": "Table",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": metadata,
        "columnDefinitions": [_definition(each) for each in columns] if headed else [],
        "rows": [
            {"cells": [_cell(column, each) for column in columns], "object": _carried(each, include, version)}
            for each in items
        ],
    }


def _definition(column: TableColumn) -> Object:
    return {
        "name": column.name,
        "type": column.type,
        "format": column.format,
        "description": column.description,
        "priority": column.priority,
    }


def _cell(column: TableColumn, item: Object) -> Json:
    value = column.cell(item)
    if column.type == "date":
        return age(value) if value is not None else "<unknown>"
    if column.type == "string" and value is not None and not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _carried(item: Object, include: str, version: str) -> Object | None:
    if include == "None":
        return None
    return item if include == "Object" else partial(item, version)


def partial(item: Object, version: str = "v1") -> Object:
    """Return only the metadata of an object."""
    return {"kind": "PartialObjectMetadata", "apiVersion": f"meta.k8s.io/{version}", "metadata": item["metadata"]}
