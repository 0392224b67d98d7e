"""Built-in kinds: their schemas as published for Kubernetes 1.36, their fixed defaults, and their table columns.

The schemas come from the package `kubernetes-validate`.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.support.kube.api.kinds.ages import age
from tests.support.kube.api.kinds.resources import ResourceCatalogue, ScaleSubresource, ServedResource, TableColumn
from tests.support.kube.api.kinds.schemas import PREFIX, StructuralSchema
from tests.support.kube.api.kinds.selectors import selector_text
from tests.support.kube.api.values import Json, Object, clone, dig, every_dict

VERSION = "1.36.2"
SCHEMAS = "kubernetes-json-schema/v1.36.0-local/_definitions.json"
META = "io.k8s.apimachinery.pkg.apis.meta.v1."
CORE = "io.k8s.api.core.v1."
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"

TABLE = """
v1                              namespaces                Namespace                cluster  SG  ns
v1                              nodes                     Node                     cluster  S   no
v1                              persistentvolumes         PersistentVolume         cluster  S   pv
v1                              pods                      Pod                      names    SG  po        all
v1                              services                  Service                  names    S   svc       all
v1                              endpoints                 Endpoints                names    -   ep
v1                              configmaps                ConfigMap                names    -   cm
v1                              secrets                   Secret                   names    -   -
v1                              serviceaccounts           ServiceAccount           names    -   sa
v1                              events                    Event                    names    -   ev
v1                              persistentvolumeclaims    PersistentVolumeClaim    names    S   pvc
v1                              resourcequotas            ResourceQuota            names    S   quota
v1                              limitranges               LimitRange               names    -   limits
apps/v1                         deployments               Deployment               names    SGX deploy    all
apps/v1                         statefulsets              StatefulSet              names    SGX sts       all
apps/v1                         replicasets               ReplicaSet               names    SGX rs        all
apps/v1                         daemonsets                DaemonSet                names    SG  ds        all
apps/v1                         controllerrevisions       ControllerRevision       names    -   -
batch/v1                        jobs                      Job                      names    SG  -         all
batch/v1                        cronjobs                  CronJob                  names    SG  cj        all
autoscaling/v2                  horizontalpodautoscalers  HorizontalPodAutoscaler  names    S   hpa       all
policy/v1                       poddisruptionbudgets      PodDisruptionBudget      names    SG  pdb
networking.k8s.io/v1            networkpolicies           NetworkPolicy            names    G   netpol
networking.k8s.io/v1            ingresses                 Ingress                  names    SG  ing
rbac.authorization.k8s.io/v1    roles                     Role                     names    -   -
rbac.authorization.k8s.io/v1    rolebindings              RoleBinding              names    -   -
rbac.authorization.k8s.io/v1    clusterroles              ClusterRole              cluster  -   -
rbac.authorization.k8s.io/v1    clusterrolebindings       ClusterRoleBinding       cluster  -   -
coordination.k8s.io/v1          leases                    Lease                    names    -   -
discovery.k8s.io/v1             endpointslices            EndpointSlice            names    -   -
events.k8s.io/v1                events                    Event                    names    -   ev
scheduling.k8s.io/v1            priorityclasses           PriorityClass            cluster  -   pc
storage.k8s.io/v1               storageclasses            StorageClass             cluster  -   sc
apiregistration.k8s.io/v1       apiservices               APIService               cluster  S   -         api-extensions
apiextensions.k8s.io/v1         customresourcedefinitions CustomResourceDefinition cluster  SG  crd,crds  api-extensions
"""
"""Columns: API, plural, kind, scope, flags, short names and category.

Flags of a kind: S: it has a status subresource; G: its generation is counted; X: it can be scaled."""

DEFAULTS: dict[str, Object] = {
    "core.v1.ContainerPort": {"protocol": "TCP"},
    "core.v1.ServicePort": {"protocol": "TCP"},
    "core.v1.Container": {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "resources": {},
    },
    "core.v1.Probe": {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    "core.v1.HTTPGetAction": {"scheme": "HTTP"},
    "core.v1.ObjectFieldSelector": {"apiVersion": "v1"},
    "core.v1.PodSpec": {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {},
    },
    "core.v1.ConfigMapVolumeSource": {"defaultMode": 420},
    "core.v1.SecretVolumeSource": {"defaultMode": 420},
    "core.v1.ServiceSpec": {"type": "ClusterIP", "sessionAffinity": "None"},
    "core.v1.Secret": {"type": "Opaque"},
    "core.v1.PersistentVolumeClaimSpec": {"volumeMode": "Filesystem"},
    "apps.v1.DeploymentSpec": {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "strategy": {"type": "RollingUpdate"},
    },
    "apps.v1.ReplicaSetSpec": {"replicas": 1},
    "apps.v1.StatefulSetSpec": {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "podManagementPolicy": "OrderedReady",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    },
    "apps.v1.DaemonSetSpec": {
        "revisionHistoryLimit": 10,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    },
    "batch.v1.JobSpec": {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": 6,
        "completionMode": "NonIndexed",
        "suspend": False,
    },
    "batch.v1.CronJobSpec": {
        "concurrencyPolicy": "Allow",
        "suspend": False,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 1,
    },
    "autoscaling.v2.HorizontalPodAutoscalerSpec": {"minReplicas": 1},
    "networking.v1.NetworkPolicyPort": {"protocol": "TCP"},
    "networking.v1.NetworkPolicySpec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    "discovery.v1.EndpointPort": {"protocol": "TCP", "name": ""},
}
"""Defaults that do not depend on another field, by the last part of the definition's name."""


@functools.cache
def definitions() -> dict[str, Object]:
    """Return every built-in definition as a structural schema with defaults; nodes without a type accept any value."""
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None, "the tests of Kubernetes need the package kubernetes-validate"
    [folder] = spec.submodule_search_locations or []
    found = msgspec.json.decode((Path(folder) / SCHEMAS).read_bytes().replace(b"#/$defs/", PREFIX.encode()))["$defs"]
    for definition in found.values():
        for node in every_dict(definition):
            if isinstance(node.get("type"), list):
                node["type"] = next(each for each in node["type"] if each != "null")
            node.pop("oneOf", None)
    for definition in found.values():
        _open_the_untyped(definition)
    for name in (INT_OR_STRING, QUANTITY):
        found[name] = {"description": found[name].get("description", ""), "type": "string", "format": "int-or-string"}
    for ending, values in DEFAULTS.items():
        properties = found[f"io.k8s.api.{ending}"]["properties"]
        for name, value in values.items():
            properties[name] = properties[name] | {"default": value}
    return found


def _open_the_untyped(node: Json) -> None:
    """Let nodes accept any value if they have neither fields nor a type other than object: RawExtension, JSON, FieldsV1."""
    if not isinstance(node, dict) or "$ref" in node:
        return
    if node.get("type", "object") == "object" and not node.keys() & {"properties", "additionalProperties"}:
        node["x-kubernetes-preserve-unknown-fields"] = True
    for each in (*(node.get("properties") or {}).values(), node.get("items"), node.get("additionalProperties")):
        _open_the_untyped(each)


@functools.cache
def shapes() -> dict[str, Object]:
    """Return the definitions for validation: apiVersion and kind may be any text; ports may be numbers or texts, quantities anything."""
    found = clone(definitions())
    for definition in found.values():
        for name in ("apiVersion", "kind"):
            if name in definition.get("properties", {}):
                definition["properties"][name] = {"type": "string"}
    found[INT_OR_STRING] = {"x-kubernetes-int-or-string": True}
    found[QUANTITY] = {}
    return found


def shape_of(definition: str) -> StructuralSchema:
    return StructuralSchema(shapes()[definition], shapes())


@functools.cache
def definition_names() -> dict[tuple[str, str, str], str]:
    """Return the name of the definition by (group, version, kind), without definitions that several kinds share."""
    return {
        (each["group"], each["version"], each["kind"]): name
        for name, definition in definitions().items()
        for each in definition.get("x-kubernetes-group-version-kind", ())
        if len(definition["x-kubernetes-group-version-kind"]) == 1
    }


def catalogue() -> ResourceCatalogue:
    return ResourceCatalogue(_resources())


def _resources() -> Iterator[ServedResource]:
    for line in TABLE.strip().splitlines():
        api, plural, kind, scope, flags, short, *categories = line.split()
        group, _, version = api.rpartition("/")
        yield ServedResource(
            group=group,
            version=version,
            plural=plural,
            kind=kind,
            singular=kind.lower(),
            namespaced=scope == "names",
            shape=shape_of(definition_names()[group, version, kind]),
            short_names=() if short == "-" else tuple(short.split(",")),
            categories=tuple(categories),
            columns=COLUMNS.get(plural, ()),
            selectable=("metadata.name", "metadata.namespace", *SELECTABLE.get(plural, ())),
            has_status="S" in flags,
            has_generation="G" in flags,
            scale=ScaleSubresource(("spec", "replicas"), ("status", "replicas"), ("spec", "selector"))
            if "X" in flags
            else None,
        )


SELECTABLE: dict[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
    ),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "jobs": ("status.successful",),
    "events": (
        *("involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid"),
        *(
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "type",
            "source",
        ),
    ),
    "nodes": ("spec.unschedulable",),
}


# Columns.


def _of(part: str, whole: str) -> Callable[[Object], str]:
    def cell(item: Object) -> str:
        return f"{dig(item, 'status', part) or 0}/{dig(item, 'spec', whole) or 0}"

    return cell


def _pods_ready(item: Object) -> str:
    statuses = dig(item, "status", "containerStatuses") or []
    return f"{sum(bool(each.get('ready')) for each in statuses)}/{len(dig(item, 'spec', 'containers') or [])}"


def _pod_status(item: Object) -> str:
    return "Terminating" if item["metadata"].get("deletionTimestamp") else dig(item, "status", "phase") or "Pending"


def _ports(item: Object) -> str:
    return (
        ",".join(f"{each['port']}/{each.get('protocol', 'TCP')}" for each in dig(item, "spec", "ports") or ())
        or "<none>"
    )


def _count(name: str) -> Callable[[Object], str]:
    return lambda item: str(len(item.get(name) or {}))


NAME = TableColumn("Name", ".metadata.name", format="name")
AGE = TableColumn("Age", lambda item: age(item["metadata"].get("creationTimestamp")))
COLUMNS: dict[str, tuple[TableColumn, ...]] = {
    "namespaces": (TableColumn("Status", ".status.phase"), AGE),
    "pods": (
        TableColumn("Ready", _pods_ready),
        TableColumn("Status", _pod_status),
        TableColumn(
            "Restarts",
            lambda item: sum(each.get("restartCount", 0) for each in dig(item, "status", "containerStatuses") or ()),
        ),
        AGE,
        TableColumn("IP", ".status.podIP", priority=1),
        TableColumn("Node", ".spec.nodeName", priority=1),
    ),
    "deployments": (
        TableColumn("Ready", _of("readyReplicas", "replicas")),
        TableColumn("Up-to-date", lambda item: dig(item, "status", "updatedReplicas") or 0, type="integer"),
        TableColumn("Available", lambda item: dig(item, "status", "availableReplicas") or 0, type="integer"),
        AGE,
    ),
    "statefulsets": (TableColumn("Ready", _of("readyReplicas", "replicas")), AGE),
    "replicasets": (
        TableColumn("Desired", ".spec.replicas", type="integer"),
        TableColumn("Current", lambda item: dig(item, "status", "replicas") or 0, type="integer"),
        TableColumn("Ready", lambda item: dig(item, "status", "readyReplicas") or 0, type="integer"),
        AGE,
    ),
    "services": (
        TableColumn("Type", ".spec.type"),
        TableColumn("Cluster-IP", ".spec.clusterIP"),
        TableColumn("External-IP", lambda item: "<none>"),
        TableColumn("Port(s)", _ports),
        AGE,
        TableColumn(
            "Selector",
            lambda item: selector_text({"matchLabels": dig(item, "spec", "selector")}) or "<none>",
            priority=1,
        ),
    ),
    "configmaps": (TableColumn("Data", _count("data")), AGE),
    "secrets": (TableColumn("Type", ".type"), TableColumn("Data", _count("data")), AGE),
    "leases": (TableColumn("Holder", ".spec.holderIdentity"), AGE),
    "customresourcedefinitions": (TableColumn("Created At", ".metadata.creationTimestamp", type="date"),),
}
