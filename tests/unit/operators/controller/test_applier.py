"""Applier: it writes exactly what was decided, or nothing."""

import pytest
from prometheus_client import CollectorRegistry

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import NameTaken, ObjectConflict
from fleet.net.kubernetes.views import ChildMetadata, ChildObject, OwnerReference
from operators.controller.applier import Applier
from operators.controller.reconcile import Apply
from operators.observed.caches import InformerCaches
from operators.telemetry import OperatorMetrics


def a_service(owner):
    reference = OwnerReference(kind="DisaggDeployment", name="dd", uid=owner, controller=True)
    metadata = ChildMetadata(
        name="dd-router", namespace="ns", uid="its-uid", resource_version="7", owner_references=(reference,)
    )
    return ChildObject(metadata=metadata)


def a_manifest(owner):
    reference = {"kind": "DisaggDeployment", "name": "dd", "uid": owner, "controller": True}
    metadata = {"name": "dd-router", "namespace": "ns", "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}}


class Cluster:
    """Fake API server with one Service, or with no object."""

    def __init__(self, there=None):
        self.there = there
        self.written = []

    async def find(self, kind, of, namespace, name):
        return self.there

    async def make(self, kind, of, namespace, manifest):
        if self.there is not None:
            raise NameTaken("it is there")
        self.written.append(manifest)
        return a_service("ours")

    async def apply(self, kind, of, manifest, part=""):
        self.written.append(manifest)
        return a_service("ours")


def a_hand(cluster, store):
    return Applier(cluster, store, lambda: True, OperatorMetrics(CollectorRegistry()), "one")


async def test_object_taken_over_by_others_is_left_alone():
    cluster, store = Cluster(a_service("theirs")), InformerCaches()
    store.of(kinds.SERVICE, ChildObject).put(a_service("theirs"))

    with pytest.raises(ObjectConflict, match="Service dd-router belongs to somebody else"):
        await a_hand(cluster, store).perform([Apply(a_manifest("ours"))], "ns")

    assert cluster.written == []


async def test_taken_name_is_in_the_cache_afterwards():
    cluster, store = Cluster(a_service("theirs")), InformerCaches()

    with pytest.raises(ObjectConflict, match="Service dd-router exists already"):
        await a_hand(cluster, store).perform([Apply(a_manifest("ours"))], "ns")

    assert cluster.written == []
    assert store.of(kinds.SERVICE, ChildObject).get("ns", "dd-router") == a_service("theirs")


async def test_known_object_is_applied_by_uid_and_new_one_created():
    cluster, store = Cluster(), InformerCaches()
    hand = a_hand(cluster, store)

    await hand.perform([Apply(a_manifest("ours"))], "ns")
    await hand.perform([Apply(a_manifest("ours"))], "ns")

    assert [each["metadata"].get("uid") for each in cluster.written] == [None, "its-uid"]
