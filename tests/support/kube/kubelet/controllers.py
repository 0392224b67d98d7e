"""The controllers of the one-node cluster: a scheduler, Deployments, StatefulSets, and EndpointSlices.

Each controller does only what tests need. For example, a Deployment owns its pods directly, without ReplicaSets.
"""

import hashlib
import json
import random
import string
from collections.abc import Sequence
from typing import Any

from tests.support.kube.kubelet.objects import Object, Objects, condition, ends, matches, owned, owner_reference
from tests.support.kube.kubelet.probes import port_of

HASH = "pod-template-hash"
COST = "controller.kubernetes.io/pod-deletion-cost"
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
SERVICE = "kubernetes.io/service-name"


async def settle(objects: Objects, chance: random.Random) -> None:
    """Run every controller once."""
    await _schedule(objects)
    for deployment in objects.all("deployments"):
        if not ends(deployment):
            await _deployment(objects, deployment, chance)
    for stateful in objects.all("statefulsets"):
        if not ends(stateful):
            await _stateful_set(objects, stateful)
    for service in objects.all("services"):
        if not ends(service):
            await _endpoints(objects, service)


# Scheduling.


async def _schedule(objects: Objects) -> None:
    nodes = objects.all("nodes")
    for pod in objects.all("pods"):
        if pod["spec"].get("nodeName") or pod["spec"].get("schedulingGates") or ends(pod):
            continue
        fitting = [node for node in nodes if _fits(objects, node, pod)]
        if fitting:
            await objects.bind(pod, fitting[0]["metadata"]["name"])
            pod["spec"]["nodeName"] = fitting[0]["metadata"]["name"]  # the watch reports it later
        elif not any(each["type"] == "PodScheduled" for each in pod.get("status", {}).get("conditions", ())):
            lacking = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": f"0/{len(nodes)} nodes are available: {len(nodes)} Insufficient GPUs.",
            }
            await objects.patch_status("pods", pod, {"phase": "Pending", "conditions": [lacking]})


def _fits(objects: Objects, node: Object, pod: Object) -> bool:
    if not matches(pod["spec"].get("nodeSelector") or {}, node):
        return False
    there = [each for each in objects.all("pods") if each["spec"].get("nodeName") == node["metadata"]["name"]]
    return all(
        sum(_devices(each, kind) for each in (*there, pod)) <= int(node["status"]["allocatable"].get(kind, 0))
        for kind in GPUS
        if _devices(pod, kind)
    )


def _devices(pod: Object, kind: str) -> int:
    return sum(int(_limits(each).get(kind, 0)) for each in pod["spec"]["containers"])


def _limits(container: Object) -> Object:
    return (container.get("resources") or {}).get("limits") or {}


# Deployments.


async def _deployment(objects: Objects, deployment: Object, chance: random.Random) -> None:
    spec = deployment["spec"]
    wanted = spec.get("replicas", 1)
    digest = _digest(spec["template"])
    every = owned(objects.all("pods"), deployment)
    alive = [
        pod for pod in every if not ends(pod) and pod.get("status", {}).get("phase") not in {"Failed", "Succeeded"}
    ]
    new = [pod for pod in alive if pod["metadata"]["labels"].get(HASH) == digest]
    old = [pod for pod in alive if pod not in new]
    if spec["strategy"].get("type") == "Recreate":
        going = old
        room = 0 if old or any(pod["metadata"]["labels"].get(HASH) != digest for pod in every) else wanted - len(new)
    else:
        surge, unavailable = _bounds(spec["strategy"].get("rollingUpdate") or {}, wanted)
        spare = sum(condition(pod, "Ready") for pod in alive) - (wanted - unavailable)
        going = [pod for pod in old if not condition(pod, "Ready")]
        going += [pod for pod in old if condition(pod, "Ready")][: max(0, spare)]
        room = min(wanted - len(new), wanted + surge - len(alive))
    going += sorted(new, key=_worth)[: max(0, len(new) - wanted)]
    for pod in going:
        await objects.delete("pods", pod)
    for _ in range(room):
        suffix = "".join(chance.choice(string.ascii_lowercase) for _ in range(5))
        name = f"{deployment['metadata']['name']}-{digest}-{suffix}"
        await objects.create("pods", _pod(deployment, "Deployment", name, {HASH: digest}))
    ready = sum(condition(pod, "Ready") for pod in alive)
    status = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(alive),
        "updatedReplicas": len(new),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, wanted - ready),
        "conditions": [
            {
                "type": "Available",
                "status": "True" if ready >= wanted - _bounds_of(spec)[1] else "False",
                "reason": "Toy",
            },
            {"type": "Progressing", "status": "True", "reason": "Toy"},
        ],
    }
    await _tell(objects, "deployments", deployment, status)


def _worth(pod: Object) -> tuple[int, int, str]:
    """Return the sort key by which a Deployment deletes its pods: the pod with the lowest key goes first."""
    cost = int(pod["metadata"].get("annotations", {}).get(COST, 0))
    return condition(pod, "Ready"), cost, pod["metadata"]["creationTimestamp"]


def _bounds_of(spec: Object) -> tuple[int, int]:
    return _bounds(spec["strategy"].get("rollingUpdate") or {}, spec.get("replicas", 1))


def _bounds(update: Object, replicas: int) -> tuple[int, int]:
    surge = _share(update.get("maxSurge", "25%"), replicas, up=True)
    unavailable = _share(update.get("maxUnavailable", "25%"), replicas, up=False)
    return (1, 0) if not surge and not unavailable else (surge, unavailable)


def _share(value: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * replicas
    return -(-share // 100) if up else share // 100


def _digest(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def _pod(owner: Object, kind: str, name: str, labels: dict[str, str], **spec: Any) -> Object:
    template = owner["spec"]["template"]
    metadata = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": template["metadata"].get("labels", {}) | labels,
        "annotations": template["metadata"].get("annotations") or {},
        "ownerReferences": [owner_reference("apps/v1", kind, owner)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | spec}


# StatefulSets.


async def _stateful_set(objects: Objects, stateful: Object) -> None:
    spec, name = stateful["spec"], stateful["metadata"]["name"]
    wanted = spec.get("replicas", 1)
    pods = {pod["metadata"]["name"]: pod for pod in owned(objects.all("pods"), stateful)}
    in_order = spec.get("podManagementPolicy") != "Parallel"
    for ordinal in range(wanted):
        one = f"{name}-{ordinal}"
        if one not in pods:
            labels = {"statefulset.kubernetes.io/pod-name": one, "apps.kubernetes.io/pod-index": str(ordinal)}
            more = {"hostname": one, "subdomain": spec.get("serviceName", "")}
            pods[one] = await objects.create("pods", _pod(stateful, "StatefulSet", one, labels, **more))
        if in_order and not condition(pods[one], "Ready"):
            break
    for one, pod in pods.items():
        if int(one.rpartition("-")[2]) >= wanted and not ends(pod):
            await objects.delete("pods", pod)
    alive = [pod for pod in pods.values() if not ends(pod)]
    ready = sum(condition(pod, "Ready") for pod in alive)
    status = {
        "observedGeneration": stateful["metadata"]["generation"],
        "replicas": len(alive),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "currentReplicas": len(alive),
        "updatedReplicas": len(alive),
    }
    await _tell(objects, "statefulsets", stateful, status)


async def _tell(objects: Objects, plural: str, item: Object, status: Object) -> None:
    before = item.get("status", {})
    if {**before, **status} != before:
        await objects.patch_status(plural, item, status)


# Services.


async def _endpoints(objects: Objects, service: Object) -> None:
    spec, metadata = service["spec"], service["metadata"]
    if not spec.get("selector"):
        return
    pods = [
        pod
        for pod in objects.all("pods")
        if pod["metadata"]["namespace"] == metadata["namespace"]
        and matches(spec["selector"], pod)
        and pod.get("status", {}).get("podIP")
        and pod["status"].get("phase") == "Running"
    ]
    endpoints = [_endpoint(pod, spec) for pod in sorted(pods, key=lambda pod: pod["metadata"]["name"])]
    ports = [
        {"name": each.get("name", ""), "port": port, "protocol": "TCP"}
        for each in spec.get("ports") or ()
        if (port := _target(each, pods)) is not None
    ]
    wanted: Object = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{metadata['name']}-pods",
            "namespace": metadata["namespace"],
            "labels": {SERVICE: metadata["name"]},
            "ownerReferences": [owner_reference("v1", "Service", service)],
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
    }
    known = objects.get("endpointslices", metadata["namespace"], wanted["metadata"]["name"])
    if known is None:
        await objects.create("endpointslices", wanted)
    elif (known.get("endpoints") or [], known.get("ports") or []) != (endpoints, ports):
        wanted["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
        await objects.replace("endpointslices", wanted)


def _endpoint(pod: Object, spec: Object) -> Object:
    serving = condition(pod, "Ready")
    endpoint: Object = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {
            "ready": bool(spec.get("publishNotReadyAddresses")) or (serving and not ends(pod)),
            "serving": serving,
            "terminating": ends(pod),
        },
        "targetRef": {
            "kind": "Pod",
            "namespace": pod["metadata"]["namespace"],
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        },
    }
    if spec.get("clusterIP") == "None" and (host := pod["spec"].get("hostname")):
        endpoint["hostname"] = host
    return endpoint


def _target(port: Object, pods: Sequence[Object]) -> int | None:
    """Return the port number of the pods to which a Service's port leads; None if no pod has a port of this name."""
    target = port.get("targetPort", port["port"])
    for pod in pods:
        named = {
            each["name"]: each["containerPort"]
            for container in pod["spec"]["containers"]
            for each in container.get("ports") or ()
            if "name" in each
        }
        if isinstance(target, int) or target in named:
            return port_of(target, named)
    return target if isinstance(target, int) else None
