"""Workloads: builds the child objects that create pods.

Each role of workers has one workload for each revision. If the role is `grouped`, it has one StatefulSet for each replica
instead. The routers have one Deployment.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from fleet.net.kubernetes.kinds import GROUP, VERSION, OptionalKinds
from operators.api.disagg_deployment import RoleSpec
from operators.manifests.names import (
    AVOIDED,
    DOMAIN,
    GATE,
    GATED,
    GROUP_LABEL,
    LEADER,
    RANK,
    REVISION,
    DesiredDeployment,
    GroupPlacement,
    base_name,
    child_name,
    host_of,
    labels_of,
    selected,
)
from operators.manifests.objects import Manifest, from_field, mapping, object_of
from operators.manifests.pods import Images, merged, pod_template
from operators.manifests.settings import config_map, worker_settings

SERVED = OptionalKinds()
ANYWHERE = GroupPlacement()
HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def revision(deployment: DesiredDeployment, images: Images) -> str:
    """Return the revision of a deployment's workers, as 8 characters. All roles of workers have the same revision.

    It changes if the pod template or the settings of a role change, or if a role is added or removed. The pods of all
    workers are then replaced. It does not depend on the kinds that the API server has. So the pods of workers are not
    replaced when somebody installs LeaderWorkerSets in the cluster.
    """
    roles = sorted(deployment.workers, key=lambda role: role.name)
    pods: list[Any] = [
        [pod_template(deployment, role, images, ""), worker_settings(deployment, role)] for role in roles
    ]
    return hashlib.sha256(msgspec.json.encode(pods, order="sorted")).hexdigest()[:8]


def grouped(role: RoleSpec, served: OptionalKinds) -> bool:
    """Return whether each replica of a role is a StatefulSet of its own.

    This is so if a replica has several nodes, and the API server has no LeaderWorkerSets.
    """
    return role.nodes_per_replica > 1 and not served.leader_worker_sets


def workers(
    deployment: DesiredDeployment, role: RoleSpec, of_revision: str, images: Images, served: OptionalKinds = SERVED
) -> list[Manifest]:
    """Return the manifests of one role in one revision: the ConfigMap with its settings, and the Deployment or LeaderWorkerSet.

    The caller sets the number of replicas. If the role is `grouped`, return only the ConfigMap; `group` makes its StatefulSets.
    """
    name = child_name(deployment, role.name, of_revision)
    labels = labels_of(deployment, role) | {REVISION: of_revision}
    config = config_map(deployment, role, worker_settings(deployment, role), of_revision)
    if grouped(role, served):
        return [config]
    template = pod_template(deployment, role, images, of_revision)
    if role.nodes_per_replica > 1:
        # Only newer controllers of LeaderWorkerSets set this variable, so the operator sets it with the pod's rank.
        rank = from_field(RANK, "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']")
        template["spec"] = merged(template["spec"], {"containers": [{"name": "main", "env": [rank]}]})
        spec: Manifest = {
            "leaderWorkerTemplate": {
                "size": role.nodes_per_replica,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
            "startupPolicy": "LeaderCreated",
        }
        return [config, object_of(deployment, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels, spec)]
    spec = {
        "selector": {"matchLabels": selected(deployment, role) | {REVISION: of_revision}},
        # The strategy is never used: a Deployment belongs to one revision, so its pod template does not change.
        "strategy": {"type": "Recreate"},
        "template": template,
    }
    return [config, object_of(deployment, "apps/v1", "Deployment", name, labels, spec)]


def group_name(deployment: DesiredDeployment, role: RoleSpec, of_revision: str, index: int) -> str:
    return f"{child_name(deployment, role.name, of_revision)}-{index}"


def group(
    deployment: DesiredDeployment,
    role: RoleSpec,
    of_revision: str,
    index: int,
    images: Images,
    placement: GroupPlacement = ANYWHERE,
) -> Manifest:
    """Return the StatefulSet of one replica that has several nodes.

    Its pods start and end together. They get the same environment variables as the pods of a LeaderWorkerSet.
    """
    name = group_name(deployment, role, of_revision, index)
    labels = labels_of(deployment, role) | {REVISION: of_revision, GROUP_LABEL: str(index)}
    template = pod_template(deployment, role, images, of_revision)
    template["metadata"]["labels"] = template["metadata"]["labels"] | {GROUP_LABEL: str(index)}
    own = [
        {"name": LEADER, "value": host_of(f"{name}-0.{base_name(deployment, role)}", deployment.namespace)},
        {"name": "LWS_GROUP_SIZE", "value": str(role.nodes_per_replica)},
        from_field(RANK, "metadata.labels['apps.kubernetes.io/pod-index']"),
    ]
    template["spec"] = merged(template["spec"], {"containers": [{"name": "main", "env": own}]})
    if role.topology.domain:
        for term in template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]:
            if "matchLabelKeys" in term:
                term["matchLabelKeys"] = [GROUP_LABEL]
    if placement.chosen:
        _place(template, role, placement)
    if placement.gated:
        _annotate(template, {GATED: "true"})
        gates = [*_listed(template["spec"].get("schedulingGates")), {"name": GATE}]
        template["spec"] = template["spec"] | {"schedulingGates": gates}
    spec: Manifest = {
        "serviceName": base_name(deployment, role),
        "replicas": role.nodes_per_replica,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selected(deployment, role) | {REVISION: of_revision, GROUP_LABEL: str(index)}},
        "template": template,
    }
    made = object_of(deployment, "apps/v1", "StatefulSet", name, labels, spec)
    placement_annotations = {
        DOMAIN: f"{role.topology.domain}={placement.domain}" if placement.domain else "",
        AVOIDED: ",".join(placement.avoided),
        GATED: "true" if placement.gated else "",
    }
    if annotations := {name: value for name, value in placement_annotations.items() if value}:
        made["metadata"]["annotations"] = annotations
    return made


def _place(template: Manifest, role: RoleSpec, placement: GroupPlacement) -> None:
    """Add the chosen domain and the avoided nodes to the affinity of a pod template."""
    wanted: list[Manifest] = []
    if placement.domain:
        wanted.append({"key": role.topology.domain, "operator": "In", "values": [placement.domain]})
        _annotate(template, {DOMAIN: f"{role.topology.domain}={placement.domain}"})
    if placement.avoided:
        wanted.append({"key": HOSTNAME, "operator": "NotIn", "values": list(placement.avoided)})
    affinity = mapping(template["spec"].get("affinity"))
    nodes = mapping(affinity.get("nodeAffinity"))
    required = mapping(nodes.get(REQUIRED))
    given = required.get("nodeSelectorTerms")
    terms = [mapping(each) for each in given] if isinstance(given, list) and given else [{}]
    terms = [term | {"matchExpressions": [*_listed(term.get("matchExpressions")), *wanted]} for term in terms]
    nodes |= {REQUIRED: required | {"nodeSelectorTerms": terms}}
    template["spec"] = template["spec"] | {"affinity": affinity | {"nodeAffinity": nodes}}


def _annotate(template: Manifest, annotations: Mapping[str, str]) -> None:
    metadata = template["metadata"]
    template["metadata"] = metadata | {"annotations": {**mapping(metadata.get("annotations")), **annotations}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def router_deployment(
    deployment: DesiredDeployment, images: Images, of_settings: str, client_ports: Mapping[str, int], replicas: int
) -> Manifest:
    """Return the Deployment of the routers.

    It keeps its name when the specification changes, and is updated in place.

    `of_settings` is a digest of the routers' settings. It becomes a label of the pod template, so that changed settings
    replace the pods.
    """
    router = deployment.router
    rollout = {"maxSurge": router.rollout.max_surge, "maxUnavailable": router.rollout.max_unavailable}
    spec: Manifest = {
        "replicas": replicas,
        "selector": {"matchLabels": selected(deployment, router)},
        "strategy": {"rollingUpdate": rollout},
        "template": pod_template(deployment, router, images, of_settings, client_ports),
    }
    labels = labels_of(deployment, router)
    return object_of(deployment, "apps/v1", "Deployment", base_name(deployment, router), labels, spec)


def role_scaler(deployment: DesiredDeployment, role: RoleSpec, replicas: int) -> Manifest:
    """Return the manifest of a new RoleScaler for a role whose scaling mode is not Static.

    After the operator has created it, only scalers such as HPA write its specification.
    """
    spec = {"target": {"deployment": deployment.name, "role": role.name}, "replicas": replicas}
    api = f"{GROUP}/{VERSION}"
    return object_of(deployment, api, "RoleScaler", base_name(deployment, role), labels_of(deployment, role), spec)
