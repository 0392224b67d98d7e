"""kubectl 1.20.2, a third-party client, against the API server: discovery, OpenAPI, tables, patches, watches, scale."""

import json
import os
import select
import time

import pytest

from tests.support.kube.tools import Command, as_input, kubectl, tools_folder
from tests.support.kube.widgets import DEFINITION, a_deployment, a_widget
from tests.support.waiting import eventually


@pytest.fixture
def kube(address, namespace, tmp_path):
    from tests.support.kube.api.running import RunningApiServer

    return Command(
        kubectl(tools_folder()), RunningApiServer(address).kubeconfig(tmp_path, namespace=namespace), tmp_path
    )


@pytest.fixture
def defined(kube):
    """Define the custom kind through kubectl."""
    kube("apply", "-f", "-", stdin=as_input(DEFINITION))
    kube("wait", "--for=condition=Established", "--timeout=10s", "crd/widgets.behaviours.fleet.dev")


def names(kube, kind: str) -> list[str]:
    return kube("get", kind, "-o", "name").split()


def test_apply_creates_then_changes_nothing_then_changes(kube):
    assert kube("apply", "-f", "-", stdin=as_input(a_deployment())) == "deployment.apps/web created\n"
    assert kube("apply", "-f", "-", stdin=as_input(a_deployment())) == "deployment.apps/web unchanged\n"
    assert kube("apply", "-f", "-", stdin=as_input(a_deployment(replicas=3))) == "deployment.apps/web configured\n"

    assert json.loads(kube("get", "deploy", "web", "-o", "json"))["spec"]["replicas"] == 3


def test_server_side_apply_reports_the_conflict(kube):
    kube("apply", "--server-side", "--field-manager=one", "-f", "-", stdin=as_input(a_deployment(replicas=2)))

    said = kube(
        "apply", "--server-side", "--field-manager=two", "-f", "-", stdin=as_input(a_deployment(replicas=3)), code=1
    )

    assert 'conflict with "one"' in said
    assert ".spec.replicas" in said
    kube(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=two",
        "-f",
        "-",
        stdin=as_input(a_deployment(replicas=3)),
    )


def test_the_clients_own_validation_knows_the_schema(kube):
    wrong = a_deployment()
    wrong["spec"]["replicsa"] = 3

    said = kube("apply", "-f", "-", stdin=as_input(wrong), code=1)

    assert 'unknown field "replicsa"' in said


def test_get_prints_the_columns_of_built_in_and_custom_kinds(kube, defined, api, namespace):
    kube("apply", "-f", "-", stdin=as_input(a_deployment(replicas=2), a_widget(replicas=3)))

    def cells():
        """Return the expected cells, made from the object's status; only a controller-manager fills the status."""
        status = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/web").expect(200).get("status", {})
        ready, updated, available = (status.get(f"{name}Replicas", 0) for name in ("ready", "updated", "available"))
        return ["web", f"{ready}/2", str(updated), str(available)]

    header, _ = kube("get", "deployments").splitlines()
    assert header.split() == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    eventually(lambda: kube("get", "deployments").splitlines()[1].split()[:4] == cells())
    header, row = kube("get", "wd").splitlines()
    assert header.split() == ["NAME", "MODEL", "REPLICAS", "PHASE", "AGE"]
    assert row.split()[:3] == ["a", "tiny", "3"]


def test_kubectl_get_watch_shows_changes_as_they_happen(kube):
    kube("apply", "-f", "-", stdin=as_input(a_deployment()))
    with kube.running("get", "deployments", "--watch") as watching:
        seen = read_until(watching, "/1 ")
        kube("scale", "deployment/web", "--replicas=4")
        seen += read_until(watching, "/4 ")

    assert seen.count("NAME") == 1


def read_until(process, text: str, seconds: float = 10) -> str:
    """Return the output up to the first occurrence of a text."""
    seen, ends = "", time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
        assert ready, f"no {text!r} in time, only {seen!r}"
        said = os.read(process.stdout.fileno(), 65536).decode()
        assert said, f"it ended after {seen!r}"
        seen += said
    return seen


def test_scale_works_on_built_in_and_custom_kinds(kube, defined):
    kube("apply", "-f", "-", stdin=as_input(a_deployment(), a_widget()))

    kube("scale", "deployment/web", "--replicas=5")
    kube("scale", "widget/a", "--replicas=6", "--current-replicas=1")

    assert kube("get", "deploy/web", "wd/a", "-o", "jsonpath={.items[*].spec.replicas}") == "5 6"


@pytest.mark.parametrize("kind", ["strategic", "merge", "json"])
def test_patch_of_every_kind(kube, kind):
    kube("apply", "-f", "-", stdin=as_input(a_deployment()))
    patch = [{"op": "replace", "path": "/spec/replicas", "value": 7}] if kind == "json" else {"spec": {"replicas": 7}}

    kube("patch", "deployment", "web", f"--type={kind}", "-p", json.dumps(patch))

    assert kube("get", "deploy/web", "-o", "jsonpath={.spec.replicas}") == "7"


def test_set_image_and_label_and_annotate(kube):
    kube("apply", "-f", "-", stdin=as_input(a_deployment()))

    kube("set", "image", "deployment/web", "main=example.invalid/web:2")
    kube("label", "deployment/web", "tier=gpu")
    kube("annotate", "deployment/web", "why=because")

    changed = json.loads(kube("get", "deploy/web", "-o", "json"))
    assert changed["spec"]["template"]["spec"]["containers"][0]["image"] == "example.invalid/web:2"
    assert changed["metadata"]["labels"]["tier"] == "gpu"
    assert changed["metadata"]["annotations"]["why"] == "because"


def test_explain_reads_schemas_of_built_in_and_custom_kinds(kube, defined):
    assert "Number of desired pods" in kube("explain", "deployment.spec.replicas")
    assert "model" in kube("explain", "widget.spec")


def test_delete_waits_until_it_is_gone(kube, defined):
    kube("apply", "-f", "-", stdin=as_input(a_deployment(), a_widget()))

    kube("delete", "deployment/web", "widget/a", "--timeout=10s")

    assert names(kube, "deployments,widgets") == []


def test_wait_sees_a_condition(kube, api, namespace):
    """The test uses a kind whose conditions no controller of Kubernetes writes."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}
    kube("apply", "-f", "-", stdin=as_input(service))
    said = {
        "type": "Open",
        "status": "True",
        "reason": "Enough",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    with kube.running("wait", "service/web", "--for=condition=Open", "--timeout=10s") as waiting:
        path = f"/api/v1/namespaces/{namespace}/services/web/status"
        api.patch(path, "merge", {"status": {"conditions": [said]}}).expect(200)
        told, _ = waiting.communicate(timeout=60)

    assert waiting.returncode == 0, told


def test_get_all_and_describe_and_api_resources(kube, defined, api):
    kube("apply", "-f", "-", stdin=as_input(a_deployment(), a_widget()))

    assert "deployment.apps/web" in kube("get", "all")
    assert "tiny" in kube("describe", "widget", "a")
    assert "widgets" in kube("api-resources", "-o", "name")
    assert api.get("/version").expect(200)["gitVersion"] in kube("version")


def test_a_refusal_reaches_the_user(kube, defined):
    said = kube("apply", "-f", "-", stdin=as_input(a_widget(replicas=11)), code=1)

    assert "more than 10 replicas need mode External" in said
    eventually(lambda: names(kube, "widgets") == [])
