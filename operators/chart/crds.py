"""CRDs: generates the CustomResourceDefinitions of the custom kinds from the types in `operators.api`.

Kubernetes demands a *structural* schema, which has no references and states the type of every node. The JSON schema of
msgspec has references and titles, so this module resolves the references and removes the titles. The docstrings of
types and fields become descriptions, which `kubectl explain` shows.
"""

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import Meta, Struct

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.api.disagg_deployment import DEPLOYMENT_RULES, OBJECT_RULES, DisaggDeploymentSpec, DisaggDeploymentStatus
from operators.api.role_scaler import RoleScalerSpec, RoleScalerStatus
from operators.api.serving_plan import ServingPlanSpec, ServingPlanStatus
from operators.api.serving_request import REQUEST_RULES, ServingRequestSpec, ServingRequestStatus
from operators.chart.docstrings import documented_fields, documented_values, named_types

Schema = dict[str, Any]
HEAD: Schema = {
    "apiVersion": {"type": "string", "description": "Group and version of the kind."},
    "kind": {"type": "string", "description": "The kind of the object."},
    "metadata": {"type": "object", "description": "Name, namespace, labels and annotations of the object."},
}
"""Schema of the fields that every Kubernetes object has."""


class PrinterColumn(Struct, frozen=True):
    """Describes one column that `kubectl get` prints."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class CustomKind(Struct, frozen=True, kw_only=True):
    """Describes one custom kind: everything from which its CustomResourceDefinition is generated."""

    name: str
    plural: str
    short: str
    spec: type[Struct]
    status: type[Struct]
    columns: tuple[PrinterColumn, ...]
    rules: Meta | None = None
    """CEL rules for the specification as a whole; None: there are none."""

    object_rules: Meta | None = None
    """CEL rules for the whole object, such as rules for its name; None: there are none."""

    scale: bool = False


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


KINDS = (
    CustomKind(
        name="DisaggDeployment",
        plural="disaggdeployments",
        short="dd",
        spec=DisaggDeploymentSpec,
        status=DisaggDeploymentStatus,
        rules=DEPLOYMENT_RULES,
        object_rules=OBJECT_RULES,
        columns=(
            PrinterColumn("Ready", _condition("Ready")),
            PrinterColumn("Available", _condition("Available")),
            PrinterColumn("Reason", _condition("Ready", "reason")),
            PrinterColumn("Roles", ".status.readyRoles"),
            PrinterColumn("P:D", ".status.ratio"),
            PrinterColumn("GPUs", ".status.gpus", "integer"),
            PrinterColumn("Model", ".spec.model.name", wide=True),
        ),
    ),
    CustomKind(
        name="RoleScaler",
        plural="rolescalers",
        short="rsc",
        spec=RoleScalerSpec,
        status=RoleScalerStatus,
        scale=True,
        columns=(
            PrinterColumn("Target", ".spec.target.deployment"),
            PrinterColumn("Role", ".spec.target.role"),
            PrinterColumn("Desired", ".spec.replicas", "integer"),
            PrinterColumn("Current", ".status.replicas", "integer"),
            PrinterColumn("Bound", _condition("Bound")),
            PrinterColumn("Reason", _condition("Bound", "reason")),
            PrinterColumn("Bounds", _condition("WithinBounds", "reason"), wide=True),
        ),
    ),
    CustomKind(
        name="ServingPlan",
        plural="servingplans",
        short="sp",
        spec=ServingPlanSpec,
        status=ServingPlanStatus,
        columns=(
            PrinterColumn("Target", ".spec.deployment"),
            PrinterColumn("Mode", ".spec.mode"),
            PrinterColumn("Settled", _condition("Settled")),
            PrinterColumn("Reason", _condition("Settled", "reason")),
            PrinterColumn("Plan", ".status.plans[0].changes", wide=True),
        ),
    ),
    CustomKind(
        name="ServingRequest",
        plural="servingrequests",
        short="sr",
        spec=ServingRequestSpec,
        status=ServingRequestStatus,
        object_rules=REQUEST_RULES,
        columns=(
            PrinterColumn("Model", ".spec.model.name"),
            PrinterColumn("Phase", ".status.phase"),
            PrinterColumn("Reason", _condition("Feasible", "reason")),
            PrinterColumn("Deployment", ".status.deployment"),
        ),
    ),
)


def definition(kind: CustomKind) -> Schema:
    """Return the manifest of the CustomResourceDefinition of a custom kind."""
    subresources: Schema = {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    columns = [
        {"name": each.name, "type": each.type, "jsonPath": each.path, **({"priority": 1} if each.wide else {})}
        for each in kind.columns
    ]
    spec = structural(kind.spec)
    if kind.rules is not None:
        spec |= kind.rules.extra_json_schema or {}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["fleet"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        *columns,
                        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": description_of(kind),
                            "required": ["spec"],
                            "properties": HEAD | {"spec": spec, "status": _as_written(structural(kind.status))},
                            **((kind.object_rules.extra_json_schema or {}) if kind.object_rules is not None else {}),
                        }
                    },
                }
            ],
        },
    }


def structural(of: type[Struct]) -> Schema:
    """Return the JSON schema of a type, without references. The docstrings of types and fields are its descriptions."""
    (root,), parts = msgspec.json.schema_components([of], ref_template="{name}")
    types = named_types(of)
    for name, part in parts.items():
        kind = types[name]
        if issubclass(kind, Struct):
            _describe_fields(part, kind)
        else:
            part["type"], part["description"] = "string", _values_described(kind)
    return _resolved(root, parts)


def _describe_fields(part: Schema, kind: type[Struct]) -> None:
    for field, text in documented_fields(kind).items():
        part["properties"][field] = {"description": text} | part["properties"][field]


def _values_described(kind: type[Enum]) -> str:
    return " ".join(f"`{value}`: {text}" for value, text in documented_values(kind).items())


def description_of(kind: CustomKind) -> str:
    """Return the description of a kind: the first paragraph of its module's docstring."""
    said = inspect.getdoc(inspect.getmodule(kind.spec)) or ""
    text = " ".join(said.split("\n\n")[0].split()).removeprefix(f"{kind.name}: ")
    return f"{text[:1].upper()}{text[1:]}"


def _as_written(node: Schema) -> Schema:
    """Return the schema of a status without default values, because an absent field of a status means unknown."""
    return {
        key: _as_written(value) if isinstance(value, dict) else value for key, value in node.items() if key != "default"
    }


def _resolved(node: Mapping[str, Any], parts: Mapping[str, Schema]) -> Schema:
    # Kubernetes does not accept `additionalProperties` and `properties` in the same object.
    without = ("$ref", "title", "additionalProperties") if "properties" in node else ("$ref", "title")
    own = {key: value for key, value in node.items() if key not in without}
    if "$ref" in node:
        part = parts[node["$ref"]]
        # The description of a field replaces the description of its type. If the type is an enumeration, both are kept.
        texts = [own.get("description", ""), part.get("description", "")]
        text = " ".join(each for each in texts if each) if "enum" in part else next(filter(None, texts), "")
        return _resolved(part | own | ({"description": text} if text else {}), parts)
    if not own.get("required", True):
        del own["required"]
    if "properties" in own:
        own["properties"] = {name: _resolved(inner, parts) for name, inner in own["properties"].items()}
    if "items" in own:
        own["items"] = _resolved(own["items"], parts)
    return own
