"""Custom kind `Widget`, which uses every feature that tests/kube/api_server covers, and builders of its objects."""

from typing import Any

GROUP = "behaviours.fleet.dev"
API = f"{GROUP}/v1"
TEXT = {"type": "string", "maxLength": 63}
SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": TEXT,
        "replicas": {"type": "integer", "default": 1, "minimum": 0, "maximum": 100},
        "mode": {"type": "string", "enum": ["Static", "External"], "default": "Static"},
        "roles": {
            "type": "array",
            "maxItems": 8,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": TEXT, "size": {"type": "integer", "default": 1}},
            },
        },
    },
    "x-kubernetes-validations": [
        {
            "rule": "self.replicas <= 10 || self.mode == 'External'",
            "message": "more than 10 replicas need mode External",
        },
        {"rule": "self.model == oldSelf.model", "message": "model is immutable"},
    ],
}
STATUS: dict[str, Any] = {
    "type": "object",
    "properties": {"replicas": {"type": "integer"}, "selector": TEXT, "phase": TEXT},
}
DEFINITION: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"widgets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "shortNames": ["wd"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": SPEC, "status": STATUS}}},
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "additionalPrinterColumns": [
                    {"name": "Model", "type": "string", "jsonPath": ".spec.model"},
                    {"name": "Replicas", "type": "integer", "jsonPath": ".spec.replicas"},
                    {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
            }
        ],
    },
}


def a_widget(name: str = "a", *, metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "Widget",
        "metadata": {"name": name} | (metadata or {}),
        "spec": {"model": "tiny"} | spec,
    }


def a_deployment(name: str = "web", **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "main", "image": "example.invalid/web:1"}]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": template} | spec,
    }
