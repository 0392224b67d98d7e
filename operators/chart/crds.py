"""CustomResourceDefinitions, generated from the types in `operators.api`.

Kubernetes demands a *structural* schema: no references, and a type for every node. msgspec's JSON schema has references
and titles, so they are resolved here. Docstrings of fields become descriptions, which `kubectl explain` shows.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta, Struct

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.api import disagg_deployment as deployment
from operators.api import fields as parts
from operators.api import role_scaler as scaler
from operators.api import serving_plan as plan
from operators.api import serving_request as request
from operators.api.disagg_deployment import DEPLOYMENT_RULES, OBJECT_RULES, DisaggDeploymentSpec, DisaggDeploymentStatus
from operators.api.role_scaler import RoleScalerSpec, RoleScalerStatus
from operators.api.serving_plan import ServingPlanSpec, ServingPlanStatus
from operators.api.serving_request import REQUEST_RULES, ServingRequestSpec, ServingRequestStatus

Schema = dict[str, Any]
MODULES = (parts, deployment, scaler, plan, request)


class PrinterColumn(Struct, frozen=True):
    """A column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class CustomKind(Struct, frozen=True, kw_only=True):
    """One custom kind."""

    name: str
    plural: str
    short: str
    spec: type[Struct]
    status: type[Struct]
    columns: tuple[PrinterColumn, ...]
    rules: Meta | None = None
    """Rules for the spec as a whole."""

    object_rules: Meta | None = None
    """Rules for the object as a whole, including its name."""

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
    """Return the CustomResourceDefinition for the API server."""
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
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": _as_written(structural(kind.status)),
                            },
                            **((kind.object_rules.extra_json_schema or {}) if kind.object_rules is not None else {}),
                        }
                    },
                }
            ],
        },
    }


def structural(of: type[Struct]) -> Schema:
    """Return the type's schema without references."""
    (root,), parts = msgspec.json.schema_components([of], ref_template="{name}")
    return _resolved(root, parts)


def _as_written(node: Schema) -> Schema:
    """Return the schema without defaults, because an absent field of a status is unknown."""
    return {
        key: _as_written(value) if isinstance(value, dict) else value for key, value in node.items() if key != "default"
    }


def _resolved(node: Mapping[str, Any], parts: Mapping[str, Schema]) -> Schema:
    # Kubernetes refuses additionalProperties beside properties: it prunes unknown fields, or refuses them in strict mode.
    without = ("$ref", "title", "additionalProperties") if "properties" in node else ("$ref", "title")
    own = {key: value for key, value in node.items() if key not in without}
    if "$ref" in node:
        part = dict(parts[node["$ref"]])
        if "properties" in part:
            described = _descriptions(part["title"])
            part["properties"] = {
                name: _described(inner, described.get(name, "")) for name, inner in part["properties"].items()
            }
        # The text where a type is used overrides the type's own documentation.
        return _resolved(part | own, parts)
    if not own.get("required", True):
        del own["required"]
    if "enum" in own:
        own["type"] = "string"
    if "properties" in own:
        own["properties"] = {name: _resolved(inner, parts) for name, inner in own["properties"].items()}
    if "items" in own:
        own["items"] = _resolved(own["items"], parts)
    return own


def _described(node: Schema, description: str) -> Schema:
    return {"description": description, **node} if description else node


@cache
def _descriptions(struct: str) -> Mapping[str, str]:
    """Return the docstrings of a type's fields, by the fields' names on the wire."""
    for module, node in ((each, node) for each in MODULES for node in ast.parse(inspect.getsource(each)).body):
        if isinstance(node, ast.ClassDef) and node.name == struct:
            wire = {each.name: each.encode_name for each in msgspec.structs.fields(getattr(module, struct))}
            return {
                wire[field.target.id]: " ".join(text.value.value.split())
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return {}
