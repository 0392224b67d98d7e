"""Unrecorded behaviour of the API server: the operator relies on it, but it was not recorded from a real server.

It is known from the server's source or from reports. The same tests run against the server that FLEET_TEST_KUBE_API
names. On a server that behaves differently, the operator would create nothing, or take over objects of others.
"""

import pytest

from fleet.net.kubernetes.client import NEVER_BORN
from tests.support.kube.widgets import a_deployment
from tests.support.waiting import eventually

CHILDREN = {
    "Deployment": ("/apis/apps/v1", "deployments", a_deployment(replicas=0)["spec"], {"replicas": 2}),
    "Service": ("/api/v1", "services", {"ports": [{"port": 80}], "type": "ClusterIP"}, {"type": "NodePort"}),
    "NetworkPolicy": (
        "/apis/networking.k8s.io/v1",
        "networkpolicies",
        {"podSelector": {}, "policyTypes": ["Ingress"]},
        {"policyTypes": ["Egress"]},
    ),
}
"""Some kinds that the operator makes: path, specification, and the fields that another specification would change."""


@pytest.fixture(params=CHILDREN)
def child(request, namespace):
    """Return the path of an object, its manifest, and another manifest of the same name."""
    group, plural, spec, change = CHILDREN[request.param]
    made = {
        "apiVersion": group.removeprefix("/apis/").removeprefix("/api/"),
        "kind": request.param,
        "metadata": {"name": "web"},
        "spec": spec,
    }
    return f"{group}/namespaces/{namespace}/{plural}/web", made, made | {"spec": spec | change}


def naming(manifest, **metadata):
    return manifest | {"metadata": manifest["metadata"] | metadata}


def test_apply_with_impossible_version_creates_missing_object(api, child):
    """A missing object has no version that could differ.

    See `registry/generic/registry/store.go` (1.30 to 1.36) and kubernetes/kubernetes#106745.
    """
    path, ours, _ = child

    made = api.apply(path, naming(ours, resourceVersion=NEVER_BORN), "one", force="true").expect(201)

    assert made["metadata"]["resourceVersion"] != NEVER_BORN
    assert [each["operation"] for each in made["metadata"]["managedFields"] if each["manager"] == "one"] == ["Apply"]


def test_apply_with_impossible_version_changes_no_object(api, child):
    path, ours, theirs = child
    made = api.apply(path, ours, "one").expect(201)

    api.apply(path, naming(theirs, resourceVersion=NEVER_BORN), "two", force="true").refused(409, "Conflict")

    assert api.get(path).expect(200)["spec"] == made["spec"]


def test_apply_with_uid_creates_nothing(api, child):
    """Kubernetes tests this in its own `TestCreateOnApplyFailsWithUID`."""
    path, ours, _ = child
    named = naming(ours, uid="88e00824-7f0e-11e8-94a1-c8d3ffb15800")

    said = api.apply(path, named, "one", force="true").refused(409, "Conflict")

    assert "no existing object was found" in said["message"]
    api.get(path).refused(404, "NotFound")


def test_scheduling_gates_of_a_pod_can_only_be_removed(api, namespace):
    """Kubernetes documents this under pod scheduling readiness."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    gates = [{"name": "example.com/other"}, {"name": "fleet-serving.io/group"}]
    container = {"name": "main", "image": "registry.test/none:1"}
    made = {"metadata": {"name": "gated"}, "spec": {"schedulingGates": gates, "containers": [container]}}
    # A controller-manager makes the namespace's service account, without which a real server refuses pods.
    eventually(lambda: api.post(pods, made).code == 201)
    added = [{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "example.com/late"}}]
    removed = [
        {"op": "test", "path": "/spec/schedulingGates/1/name", "value": "fleet-serving.io/group"},
        {"op": "remove", "path": "/spec/schedulingGates/1"},
    ]

    assert "only deletion is allowed" in api.patch(f"{pods}/gated", "json", added).expect(422)["message"]
    assert api.patch(f"{pods}/gated", "json", removed).expect(200)["spec"]["schedulingGates"] == gates[:1]
