"""Objects: builds the common part (metadata, labels, owner) of each child object's manifest.

`operators.manifests.shared` and `operators.manifests.workloads` say which child objects a deployment has.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.manifests.names import INSTANCE, MANAGED_BY, NAME, OPERATOR, DesiredDeployment

Manifest = dict[str, Any]


DIGEST = f"{GROUP}/digest"


def with_digest(manifest: Manifest) -> Manifest:
    """Return the manifest with its own digest as an annotation.

    The digest does not cover the number of replicas, because other programs change this number too.
    """
    spec = {key: value for key, value in manifest.get("spec", {}).items() if key != "replicas"}
    digest = hashlib.sha256(msgspec.json.encode(manifest | {"spec": spec}, order="sorted")).hexdigest()[:16]
    annotations = manifest["metadata"].get("annotations", {}) | {DIGEST: digest}
    return manifest | {"metadata": manifest["metadata"] | {"annotations": annotations}}


def mapping(value: Any) -> Manifest:
    """Return a part of a user's `podTemplate` as a mapping.

    The user may have written any value. If it is not a mapping, return an empty mapping.
    """
    return dict(value) if isinstance(value, Mapping) else {}


def from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def object_of(
    deployment: DesiredDeployment, api: str, kind: str, name: str, labels: Mapping[str, str], spec: Manifest
) -> Manifest:
    metadata: Manifest = {"name": name, "namespace": deployment.namespace, "labels": dict(labels)}
    if deployment.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "DisaggDeployment",
                "name": deployment.name,
                "uid": deployment.uid,
                "controller": True,
                "blockOwnerDeletion": False,  # `operators.rbac`, rule 4, says why it is False
            }
        ]
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def of_all(deployment: DesiredDeployment, api: str, kind: str, name: str, spec: Manifest) -> Manifest:
    """Return the manifest of an object that belongs to the whole deployment, and not to one role."""
    labels = {INSTANCE: deployment.name, NAME: "fleet", MANAGED_BY: OPERATOR}
    return object_of(deployment, api, kind, name, labels, spec)
