"""Restricted EndpointSlices: a chart value gives this right, which OpenShift demands, only to those who write them."""

from tests.support.kube.charts import documents, helm_3_render

WRITERS = {
    "discovery": {"source": "Kubernetes"},
    "routers": {
        "settings": {
            "endpoint_picker": {},
            "openai_workers": [{"worker_id": "w", "url": "http://w:8000", "model": "m"}],
        }
    },
}
WORD = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices/restricted"], "verbs": ["create"]}


def writers(values):
    """Return the roles that may create EndpointSlices, and the roles among them that may create restricted ones."""
    roles = [each for each in documents(helm_3_render(values)) if each["kind"] in ("Role", "ClusterRole")]
    writing = {
        each["metadata"]["name"]
        for each in roles
        if any("endpointslices" in rule["resources"] and "create" in rule["verbs"] for rule in each["rules"])
    }
    return writing, {each["metadata"]["name"] for each in roles if WORD in each["rules"]}


def test_restricted_endpoint_slices_right_follows_the_value():
    writing, allowed = writers(WRITERS)
    assert len(writing) == 2
    assert allowed == set()

    assert writers(WRITERS | {"restrictedEndpointSlices": True}) == (writing, writing)
