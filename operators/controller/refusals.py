"""Refusals: describes a write that the API server has refused, and names the field that is probably wrong. Pure.

Often the wrong field is in the user's `podTemplate`. The path of the field helps the user to find it, because the API
server does not always name the field. `operators.status.deployment` shows refusals in conditions.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, assert_never

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import Manifest, RequestDenied
from fleet.net.kubernetes.status_errors import BAD_QUANTITY, BAD_VALUE
from operators.controller.reconcile import Action, Apply, DeletePod, OpenGate, Remove, Scale, SetDeletionCost
from operators.observed.state import ApiRefusal

QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
"""The syntax of a quantity (https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/)."""

QUANTITY_MAPS = frozenset({"limits", "requests", "overhead"})
"""Names of the fields whose content is a map from resources to quantities."""

QUANTITY_FIELDS = frozenset({"sizeLimit", "divisor"})

PORT_HOLDERS = frozenset({"httpGet", "tcpSocket"})
"""Names of the fields whose `port` is a number or the name of a port."""

TIMES = {"metadata": frozenset({"creationTimestamp", "deletionTimestamp"}), "managedFields": frozenset({"time"})}
"""Names of the fields whose values are times, by the name of the field that contains them."""

TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.,][0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})")
"""The syntax of a time (RFC 3339). The API server accepts no other form of ISO 8601."""


def refusal(action: Action, error: RequestDenied) -> ApiRefusal:
    """Return the description of a refused action, for a condition.

    The API server does not name the field if the text of a value cannot be parsed, or if a number is not an integer. In
    these cases, search the manifest for the field.
    """
    message = str(error)
    match action:
        case Apply(manifest):
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            if message == BAD_QUANTITY and (fields := sorted(_bad_quantities(manifest))):
                message = f"{', '.join(fields)}: {message}"
            if message == BAD_VALUE and (misfits := sorted(_misfits(manifest.get("spec"), "spec"))):
                message = "; ".join(misfits)
        case Scale(kind, name) | Remove(kind, name):
            pass
        case SetDeletionCost(name) | DeletePod(name) | OpenGate(name):
            kind = kinds.POD.name
        case _:
            assert_never(action)
    reason = "QuotaExceeded" if "exceeded quota" in message else error.reason
    return ApiRefusal(kind, name, reason, message)


def _bad_quantities(manifest: Manifest) -> Iterator[str]:
    """Yield the paths of the quantities in a manifest that Kubernetes cannot parse."""
    for name, node, path in _fields(manifest.get("spec"), "spec"):
        if name in QUANTITY_MAPS and isinstance(node, dict):
            yield from (f"{path}.{resource}" for resource, value in node.items() if not _is_quantity(value))
        elif name in QUANTITY_FIELDS and not _is_quantity(node):
            yield path


def _misfits(manifest_part: Any, at: str) -> Iterator[str]:
    """Yield each field whose value the API server cannot convert, if the server's message does not name the field.

    Each result is the path of the field, and what its value must be. These fields are numbers that are not integers
    (quantities may be fractions), ports, and times. The API server checks the types of all other fields by the schema,
    and then its message names the field.
    """
    for name, node, path in _fields(manifest_part, at):
        parent = path.removesuffix(f".{name}").rpartition(".")[2]
        if name == "port" and parent in PORT_HOLDERS and (isinstance(node, bool) or not isinstance(node, int | str)):
            yield f"{path}: must be a whole number or the name of a port"
        elif name in TIMES.get(parent.partition("[")[0], ()) and not _is_time(node):
            yield f"{path}: must be a time such as 2026-01-31T12:00:00Z"
        elif isinstance(node, float) and not (node.is_integer() or name in QUANTITY_FIELDS or parent in QUANTITY_MAPS):
            yield f"{path}: must be a whole number"


def _fields(node: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and path of all fields below a node.

    A path names an item of a list as the API server does: by the item's `name`, or else by its index.
    """
    if isinstance(node, list):
        for index, each in enumerate(node):
            named = isinstance(each, dict) and isinstance(each.get("name"), str)
            yield from _fields(each, f'{path}[name="{each["name"]}"]' if named else f"{path}[{index}]")
    elif isinstance(node, dict):
        for name, each in node.items():
            yield name, each, f"{path}.{name}"
            yield from _fields(each, f"{path}.{name}")


def _is_quantity(value: Any) -> bool:
    if isinstance(value, str):
        return QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, str) or TIME.fullmatch(value) is None:
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True
