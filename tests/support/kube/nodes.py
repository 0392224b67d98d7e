"""Simulated nodes: a minimal simulation of controllers, scheduler, nodes and workers for tests of the operator.

It makes pods for Deployments, StatefulSets and LeaderWorkerSets, and the Leases of workers. It runs in the event loop
of the API server and changes the server's objects directly, so that tests are fast.
"""

import asyncio
import contextlib
import hashlib
import json
from datetime import UTC, datetime

from operators.manifests.names import INSTANCE, REVISION, ROLE, TYPE
from operators.observed.registrations import REGISTRATION, WORKER
from tests.support.kube.api.cluster import NAMESPACES, PODS, ObjectStore, Options
from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.values import clone
from tests.support.waiting import pace

DEPLOYMENTS = ("apps", "deployments")
STATEFUL_SETS = ("apps", "statefulsets")
LEADER_WORKER_SETS = ("leaderworkerset.x-k8s.io", "leaderworkersets")
LEASES = ("coordination.k8s.io", "leases")
COST = "controller.kubernetes.io/pod-deletion-cost"
OPTIONS = Options(manager="nodes")
NODES = ("", "nodes")
DOMAIN = "example.com/domain"
"""The label of Node objects whose value is the node's topology domain."""

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class Nodes:
    """Simulates controllers and nodes; its fields may be changed while it runs."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.pause = 0.002
        """Seconds between two rounds."""

        self.gpus = 1000
        """Number of GPUs of all nodes together; a pod for which too few are free is Unschedulable."""

        self.products = None
        """Values of the label `nvidia.com/gpu.product` that nodes have; None: every value in a node selector fits."""

        self.working = True
        """If false, pods are created, but never start, and their status does not change."""

        self.holds_leaving = False
        """If true, pods that are being deleted are not removed until this is false again."""

        self.registers = True
        """True if workers make Leases."""

        self.broken_images = frozenset()
        self.crashes = {}
        """Images whose containers crash: by image, the message of a container that ended with exit status 3."""

        self.restarted = {}
        """Pods that are not ready because of a restart: by pod name, the time at which its container ended."""

        self.warm = {}
        """Number of warm blocks in a worker's Lease, by pod name."""

        self.router_address = ""
        """Address of all router pods, at which the test serves the API of a router; empty: there is no such server."""

        self.quota = None
        """Maximum number of pods in a namespace; None: there is no limit."""

        self.denial = ""
        """Message with which admission control refuses every pod of a Deployment; empty: it refuses no pod."""

        self.requires_requests = False
        """True if a quota of CPU and memory refuses pods whose containers request neither."""

        self.most_gpus = 0
        """Highest number of GPUs that were in use at the same time since the last `reset`."""

        self.noise = 0
        """Number of times that the first pod is still to be written again, with 100 kB of meaningless annotations."""

    async def run(self, cluster: ObjectStore):
        self.cluster = cluster
        self._digests = {}
        changed = cluster.storage.waiter()
        try:
            while True:
                changed.clear()
                revision = cluster.storage.revision
                self.step()
                if cluster.storage.revision == revision:
                    try:
                        async with asyncio.timeout(0.05):
                            await changed.wait()
                    except TimeoutError:
                        pass
                await pace(self.pause, "the nodes report in this period")
        finally:
            cluster.storage.forget(changed)

    def step(self):
        self._owned = {}
        for pod in self.pods():
            self._owned.setdefault(_owner(pod), []).append(pod)
        for place in (DEPLOYMENTS, STATEFUL_SETS, LEADER_WORKER_SETS):
            for item in list(self.cluster.storage.items(place)):
                if not item["metadata"].get("deletionTimestamp") and self._accepts_pods(item["metadata"]["namespace"]):
                    self._control(place, item)
        self._orphans()
        self._murmur()
        for pod in list(self.cluster.storage.items(PODS)):
            self._keep(pod)

    def _accepts_pods(self, namespace):
        found = self.cluster.storage.get(NAMESPACES, ("", namespace))
        return found is not None and not found["metadata"].get("deletionTimestamp")

    def pods(self, namespace=""):
        return self.cluster.storage.items(PODS, namespace)

    def _control(self, place, item):
        metadata, spec = item["metadata"], item["spec"]
        template, per_replica = spec.get("template"), 1
        if place == LEADER_WORKER_SETS:
            template, per_replica = spec["leaderWorkerTemplate"]["workerTemplate"], spec["leaderWorkerTemplate"]["size"]
        digest = self._digest(metadata, template)
        mine = self._owned.get(metadata["uid"], [])
        alive = [pod for pod in mine if not pod["metadata"].get("deletionTimestamp")]
        fresh = [pod for pod in alive if pod["metadata"]["labels"]["pod-template-hash"] == digest]
        ready = [pod for pod in fresh if _ready(pod)]
        failure = []
        if place == DEPLOYMENTS:
            wanted = spec["replicas"]
            for index in range(wanted - len(fresh)):
                denial = self.denial
                if self.quota is not None and len(self.pods(metadata["namespace"])) >= self.quota:
                    denial = f"exceeded quota: small, requested: pods=1, used: pods={self.quota}"
                if self.requires_requests and (missing := _unrequested(template)):
                    denial = f"failed quota: compute: must specify {missing}"
                if denial:
                    text = f'pods "x" is forbidden: {denial}'
                    failure = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": text}]
                    break
                self._create(
                    item, f"{metadata['name']}-{digest}-{self.cluster.storage.revision}-{index}", template, digest, {}
                )
            surplus = sorted(fresh, key=lambda pod: (_ready(pod), _cost(pod), pod["metadata"]["name"]))[
                : max(0, len(fresh) - wanted)
            ]
            stale = [pod for pod in alive if pod not in fresh] if len(ready) >= wanted else []
            for pod in (*surplus, *stale):
                self.cluster.delete(self.cluster.catalogue.at(PODS), metadata["namespace"], pod["metadata"]["name"], {})
        else:
            for index in range(spec["replicas"]):
                for rank in range(per_replica):
                    name = f"{metadata['name']}-{index}" + (f"-{rank}" if place == LEADER_WORKER_SETS else "")
                    labels = {"apps.kubernetes.io/pod-index": str(index)}
                    if place == LEADER_WORKER_SETS:
                        prefix = "leaderworkerset.sigs.k8s.io"
                        labels = {f"{prefix}/group-index": str(index), f"{prefix}/worker-index": str(rank)}
                    if not any(pod["metadata"]["name"] == name for pod in mine):
                        self._create(item, name, template, digest, labels, per_replica)
            for pod in alive:
                index = int(pod["metadata"]["name"].split("-")[-2 if place == LEADER_WORKER_SETS else -1])
                if index >= spec["replicas"]:
                    self.cluster.delete(
                        self.cluster.catalogue.at(PODS), metadata["namespace"], pod["metadata"]["name"], {}
                    )
        self._status(place, item, len(alive), len(ready), len(fresh), failure)

    def _digest(self, metadata, template):
        """Return the hash of a pod template; it is computed only once for each generation of the object with the template."""
        generation, digest = self._digests.get(metadata["uid"], (None, ""))
        if generation != metadata["generation"]:
            digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
            self._digests[metadata["uid"]] = (metadata["generation"], digest)
        return digest

    def _create(self, owner, name, template, digest, labels, size=1):
        metadata = template.get("metadata", {})
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        body = {
            "metadata": {
                "name": name[-253:],
                "labels": metadata.get("labels", {}) | labels | {"pod-template-hash": digest},
                "annotations": metadata.get("annotations", {})
                | ({"leaderworkerset.sigs.k8s.io/size": str(size)} if size > 1 else {}),
                "ownerReferences": [reference],
            },
            "spec": clone(template["spec"]),
        }
        self.cluster.create(self.cluster.catalogue.at(PODS), owner["metadata"]["namespace"], body, OPTIONS)

    def _status(self, place, item, pods, ready, updated, conditions):
        status = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": pods,
            "readyReplicas": ready,
            "updatedReplicas": updated,
        }
        status = {key: value for key, value in status.items() if value}
        if conditions:
            status["conditions"] = conditions
        if item.get("status", {}) != status:
            self._put(place, item, status=status)

    def _murmur(self):
        for pod in self.pods()[: min(self.noise, 1)]:
            annotations = {"noise": f"{self.noise}" + "x" * 100_000}
            self._put(PODS, pod, metadata=pod["metadata"] | {"annotations": annotations})
            self.noise -= 1

    def _orphans(self):
        """Delete pods whose owner is gone, as the garbage collector does."""
        owners = {
            each["metadata"]["uid"]
            for place in (DEPLOYMENTS, STATEFUL_SETS, LEADER_WORKER_SETS)
            for each in self.cluster.storage.items(place)
        }
        for pod in list(self.pods()):
            if (
                (owner := _owner(pod)) is not None
                and owner not in owners
                and not pod["metadata"].get("deletionTimestamp")
            ):
                metadata = pod["metadata"]
                self.cluster.delete(self.cluster.catalogue.at(PODS), metadata["namespace"], metadata["name"], {})

    def _keep(self, pod):
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            if not self.holds_leaving:
                self._lease(pod, on=False)
                self.cluster.delete(
                    self.cluster.catalogue.at(PODS), metadata["namespace"], metadata["name"], {"gracePeriodSeconds": 0}
                )
            return
        has_ended = pod["status"].get("phase") in {"Succeeded", "Failed"}
        if not self.working or has_ended:  # a kubelet does not start an ended pod again
            return
        if pod["spec"].get("schedulingGates"):
            said = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            if pod["status"].get("conditions") != [said]:
                self._put(PODS, pod, status={"phase": "Pending", "conditions": [said]})
            return
        if not pod["spec"].get("nodeName"):
            machine, why = self._machine(pod) if self.cluster.storage.items(NODES) else ("node", self._unplaced(pod))
            if why is not None:
                said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
                before = pod["status"].get("conditions") or [{}]
                if before != [said | {"lastTransitionTime": before[0].get("lastTransitionTime")}]:
                    said["lastTransitionTime"] = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
                    self._put(PODS, pod, status={"phase": "Pending", "conditions": [said]})
                return
            pod = self._put(PODS, pod, spec=pod["spec"] | {"nodeName": machine})
            if _gpus(pod):
                used = sum(_gpus(each) for each in self.pods() if each["spec"].get("nodeName"))
                self.most_gpus = max(self.most_gpus, used)
        main = _main(pod)
        status = {
            "phase": "Running",
            "podIP": self._address(metadata),
            "conditions": [{"type": "PodScheduled", "status": "True"}],
        }
        ready, state, last = True, {"running": {}}, {}
        if main["image"] in self.broken_images:
            ready, state = False, {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}
        elif main["image"] in self.crashes:
            ready, state = False, {"waiting": {"reason": "CrashLoopBackOff"}}
            last = {"terminated": {"exitCode": 3, "reason": "Error", "message": self.crashes[main["image"]]}}
        if (ended := self.restarted.get(metadata["name"])) is not None:
            ready, last = False, {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": ended}}
        status["conditions"].append({"type": "Ready", "status": str(ready)})
        container = {
            "name": "main",
            "state": state,
            "ready": ready,
            "restartCount": 1 if last else 0,
            "image": "",
            "imageID": "",
        }
        status["containerStatuses"] = [container | ({"lastState": last} if last else {})]
        if pod["status"] != status:
            pod = self._put(PODS, pod, status=status)
        self._lease(pod, on=ready and self.registers)

    def _address(self, metadata):
        routes = metadata["labels"].get(TYPE) == "router"
        return self.router_address if routes and self.router_address else address(metadata["name"])

    def _machine(self, pod):
        """Return the name of the node for a pod, and None; if no node fits, an empty name and the reason.

        The fullest domain is preferred, as a scheduler does that packs pods and does not know worker groups.
        """
        free = {}
        for node in self.cluster.storage.items(NODES):
            name = node["metadata"]["name"]
            used = sum(_gpus(each) for each in self.pods() if each["spec"].get("nodeName") == name)
            free[name] = int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) - used
        labels = {node["metadata"]["name"]: node["metadata"]["labels"] for node in self.cluster.storage.items(NODES)}
        affinity = pod["spec"].get("affinity") or {}
        fitting = [name for name in free if free[name] >= _gpus(pod) and _selected(affinity, labels[name])]
        for term in (affinity.get("podAffinity") or {}).get(REQUIRED) or ():
            key = term["topologyKey"]
            mates = [each for each in self.pods() if _owner(each) == _owner(pod) and each["spec"].get("nodeName")]
            taken = {labels[each["spec"]["nodeName"]].get(key) for each in mates}
            fitting = [name for name in fitting if labels[name].get(key) and (not taken or labels[name][key] in taken)]
        if not fitting:
            return "", f"0/{len(free)} nodes are available: {len(free)} Insufficient nvidia.com/gpu."

        def left(name):
            domain = labels[name].get(DOMAIN)
            return sum(count for each, count in free.items() if labels[each].get(DOMAIN) == domain), name

        return min(fitting, key=left), None

    def _unplaced(self, pod):
        product = (pod["spec"].get("nodeSelector") or {}).get("nvidia.com/gpu.product")
        if self.products is not None and product is not None and product not in self.products:
            return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        used = sum(_gpus(each) for each in self.pods() if each["spec"].get("nodeName")) if _gpus(pod) else 0
        if used + _gpus(pod) > self.gpus:
            return "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
        return None

    def _lease(self, pod, *, on):
        metadata = pod["metadata"]
        if metadata["labels"].get(TYPE) in (None, "router") or REVISION not in metadata["labels"]:
            return
        key = (metadata["namespace"], metadata["name"])
        found = self.cluster.storage.get(LEASES, key)
        if not on:
            if found is not None and found["spec"].get("holderIdentity") == metadata["name"]:
                self.cluster.delete(self.cluster.catalogue.at(LEASES), *key, {})
            return
        annotations = (
            {"fleet-serving.io/warm-blocks": str(self.warm[metadata["name"]])} if metadata["name"] in self.warm else {}
        )
        if found is not None:
            if (found["metadata"].get("annotations") or {}) != annotations:
                self._put(LEASES, found, metadata=found["metadata"] | {"annotations": annotations})
            return
        labels = {name: metadata["labels"][name] for name in (INSTANCE, ROLE, REVISION)} | {REGISTRATION: WORKER}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = {"holderIdentity": metadata["name"], "leaseDurationSeconds": 3600, "renewTime": now}
        body = {"metadata": {"name": metadata["name"], "labels": labels, "annotations": annotations}, "spec": spec}
        with contextlib.suppress(ApiError):  # a pod of another owner has that name
            self.cluster.create(self.cluster.catalogue.at(LEASES), metadata["namespace"], body, OPTIONS)

    def _put(self, place, item, **changes):
        metadata = item["metadata"]
        # Unchanged parts are not copied: a stored object is never changed in place, so old and new object can share them.
        changed = item | {"metadata": dict(metadata)} | clone(changes)
        return self.cluster.storage.put(place, (metadata["namespace"], metadata["name"]), changed)


def address(pod):
    """Return an IP address that is computed from the pod's name, so that hardly ever two pods have the same one."""
    return ".".join(map(str, (10, *hashlib.sha256(pod.encode()).digest()[:3])))


def _owner(pod):
    return next((each["uid"] for each in pod["metadata"].get("ownerReferences", ()) if each.get("controller")), None)


def _ready(pod):
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def _cost(pod):
    return int((pod["metadata"].get("annotations") or {}).get(COST, 0))


def _main(pod):
    """Return the container of the engine or the router; in a pod of the chart, that is the only container."""
    containers = pod["spec"]["containers"]
    return next((each for each in containers if each["name"] == "main"), containers[0])


def _selected(affinity, labels):
    """Return whether a node affinity allows a node with these labels."""
    terms = ((affinity.get("nodeAffinity") or {}).get(REQUIRED) or {}).get("nodeSelectorTerms")
    return not terms or any(
        all(
            (labels.get(each["key"]) in each["values"]) is (each["operator"] == "In")
            for each in term.get("matchExpressions", ())
        )
        for term in terms
    )


def _unrequested(template):
    """Return the error text of a CPU and memory quota: which containers lack which requests; empty if none lacks any."""
    containers = template["spec"]["containers"]
    lacks = {
        resource: [each["name"] for each in containers if resource not in each.get("resources", {}).get("requests", {})]
        for resource in ("cpu", "memory")
    }
    return "; ".join(f"{resource} for: {','.join(names)}" for resource, names in lacks.items() if names)


def _gpus(pod):
    main = _main(pod)
    return int((main.get("resources", {}).get("limits") or {}).get("nvidia.com/gpu", 0))
