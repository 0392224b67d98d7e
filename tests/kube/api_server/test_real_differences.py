"""Earlier differences: behaviours in which the API server for tests once differed from kube-apiserver 1.36.2.

README.md of tests/kube lists them. The same tests run on the server that FLEET_TEST_KUBE_API names.
"""

import pytest

from tests.support.kube.widgets import DEFINITION, a_deployment, a_widget
from tests.support.waiting import eventually

GROUP = "differences.fleet.dev"
"""The API group of the custom kind that these tests define."""

APPS = "apps/v1, Kind=Deployment"
MAIN = '.spec.template.spec.containers[name="main"]'


def with_main(**fields):
    made = a_deployment(replicas=0)
    made["spec"]["template"]["spec"]["containers"][0] |= fields
    return made


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prot": 1}, f"{MAIN}.prot: field not declared in schema"),
        (
            {"env": [{"name": "A", "value": 1}]},
            f'{MAIN}.env[name="A"].value: expected string, got ',
        ),
        (
            {"ports": [{"containerPort": "80"}]},
            f'{MAIN}.ports[containerPort="80",protocol="TCP"].containerPort: expected numeric (int or float), got string',
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
            f'{MAIN}.env: duplicate entries for key [name="A"]',
        ),
    ],
    ids=("unknown-field", "number-for-text", "text-for-number", "duplicate"),
)
def test_apply_that_does_not_fit_the_schema_is_500(api, namespace, fields, words):
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"

    status = api.apply(path, with_main(**fields), "one").expect(500)

    assert status["message"].startswith(f"failed to create typed patch object ({namespace}/web; {APPS}): ")
    assert words in status["message"]
    assert not status.get("reason")
    assert api.get(path).code == 404


def test_apply_with_bad_quantity_is_500(api, namespace):
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"

    status = api.apply(path, with_main(resources={"limits": {"memory": "64 GB"}}), "one").expect(500)

    assert "quantities must match the regular expression" in status["message"]


def test_apply_of_a_fraction_for_an_integer_is_500(api, namespace):
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web"

    status = api.apply(path, with_main(ports=[{"containerPort": 80.5}]), "one").expect(500)

    assert "failed to convert new object" in status["message"]


@pytest.fixture
def defined(api):
    """Define widgets for a test; return the path of the definition."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    spec = DEFINITION["spec"] | {"group": GROUP}
    api.post(definitions, DEFINITION | {"metadata": {"name": f"widgets.{GROUP}"}, "spec": spec}).expect(201)
    yield f"{definitions}/widgets.{GROUP}"
    api.delete(f"{definitions}/widgets.{GROUP}")


@pytest.mark.usefixtures("defined")
def test_apply_of_unknown_custom_field_is_500(api, namespace):
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/widgets/a"
    misspelt = a_widget(modle="x") | {"apiVersion": f"{GROUP}/v1"}

    eventually(lambda: api.get(path.removesuffix("/a")).code == 200)
    status = eventually(lambda: (each := api.apply(path, misspelt, "one")).code != 404 and each).expect(500)

    assert ".spec.modle: field not declared in schema" in status["message"]


def test_short_watch_ends_without_a_bookmark(api, namespace):
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    since = api.get(path).expect(200)["metadata"]["resourceVersion"]

    assert list(api.watch(path, resourceVersion=since, allowWatchBookmarks="true", timeoutSeconds=1)) == []


def api_services(api):
    listed = api.get("/apis/apiregistration.k8s.io/v1/apiservices").expect(200)["items"]
    return {each["metadata"]["name"] for each in listed}


def test_each_group_version_is_an_api_service(api):
    assert {"v1.", "v1.apps", "v1.coordination.k8s.io"} <= api_services(api)


def test_custom_kind_is_an_api_service_while_it_is_defined(api, defined):
    eventually(lambda: f"v1.{GROUP}" in api_services(api))
    api.delete(defined).expect(200)
    eventually(lambda: f"v1.{GROUP}" not in api_services(api))
