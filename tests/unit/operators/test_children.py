"""What a deployment becomes: settings that our own processes take, and pods that change only when they have to."""

from pathlib import Path

import msgspec
import pytest

from fleet.router.settings import RouterSettings
from operators.children import ROLE, Deployment, Images, in_bytes, merged, revision, shared, workers
from operators.resources import DisaggDeploymentSpec
from workers.settings import WorkerSettings

SAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "samples").glob("*.yaml"))
CPU = next(path for path in SAMPLES if path.stem == "cpu")
IMAGES = Images(router="router", worker_cpu="cpu", worker_cuda="cuda", worker_rocm="rocm")


def a_deployment(path=CPU, **changes):
    content = msgspec.yaml.decode(path.read_bytes())
    spec = msgspec.convert(content["spec"] | changes, DisaggDeploymentSpec)
    return Deployment(name=content["metadata"]["name"], namespace="ns", spec=spec, uid="1-2-3")


def manifests(deployment):
    present = revision(deployment, IMAGES)
    return shared(deployment, IMAGES) + [
        each for role in deployment.workers for each in workers(deployment, role, present, IMAGES)
    ]


def of_kind(found, kind):
    return [each for each in found if each["kind"] == kind]


def settings_of(config, kind, **put_in):
    """As the pod has them, which puts its name in."""
    settings = msgspec.json.decode(config["data"]["settings.json"]) | put_in
    if "embedded_store" in settings:
        settings["embedded_store"]["store_id"] = "pod"
    return msgspec.convert(settings, kind)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("paths", [["direct"], ["store", "direct"]], ids=["direct", "store"])
def test_settings_of_all_pods_are_taken_by_our_own_processes(path, paths):
    deployment = a_deployment(path, kvTransfer={"paths": paths, "storeMemory": "64Mi"})

    configs = of_kind(manifests(deployment), "ConfigMap")

    routers = [each for each in configs if each["metadata"]["labels"][ROLE] == "router"]
    (router,) = routers
    control = settings_of(router, RouterSettings).control_listen.rpartition(":")[2]
    for each in configs:
        if each is not router:
            settings = settings_of(each, WorkerSettings, worker_id="pod")
            assert settings.registry == f"{deployment.name}-router-control.ns:{control}"
            assert (settings.embedded_store is not None) == ("store" in paths)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_everything_goes_when_the_deployment_goes_and_names_are_unique(path):
    found = manifests(a_deployment(path))

    assert all(each["metadata"]["ownerReferences"][0]["uid"] == "1-2-3" for each in found)
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)


def test_services_and_budgets_select_the_pods_they_are_about_and_no_others():
    found = manifests(a_deployment())
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(found, "Deployment")
    }

    def selected(by):
        return sorted(name for name, labels in pods.items() if by.items() <= labels.items())

    services = {each["metadata"]["name"]: selected(each["spec"]["selector"]) for each in of_kind(found, "Service")}
    assert {
        name: [each.rpartition("-")[0] if name in ("tiny-prefill", "tiny-decode") else each for each in pods]
        for name, pods in services.items()
    } == {
        "tiny-router": ["tiny-router"],
        "tiny-router-control": ["tiny-router"],
        "tiny-prefill": ["tiny-prefill"],
        "tiny-decode": ["tiny-decode"],
    }
    budgets = {
        each["metadata"]["name"]: selected(each["spec"]["selector"]["matchLabels"])
        for each in of_kind(found, "PodDisruptionBudget")
    }
    assert {name: len(each) for name, each in budgets.items()} == {
        "tiny-router": 1,
        "tiny-prefill": 1,
        "tiny-decode": 1,
    }


def test_a_revision_is_the_same_for_as_long_as_no_pod_would_differ():
    deployment = a_deployment()
    roles = msgspec.yaml.decode(CPU.read_bytes())["spec"]["roles"]
    first = revision(deployment, IMAGES)

    def with_role(**fields):
        return revision(a_deployment(roles=[roles[0] | fields if each is roles[0] else each for each in roles]), IMAGES)

    worker = next(index for index, role in enumerate(roles) if role["type"] == "decode")
    scaled = [dict(role) for role in roles]
    scaled[worker]["replicas"] = 7
    assert revision(a_deployment(roles=scaled), IMAGES) == first
    assert revision(a_deployment(roles=list(reversed(roles))), IMAGES) == first
    assert revision(a_deployment(routing={"policy": "round_robin"}), IMAGES) == first
    assert with_role(replicas=3) == first
    scaled[worker]["drain"] = {"timeoutSeconds": 7}
    assert revision(a_deployment(roles=scaled), IMAGES) != first
    assert revision(a_deployment(image="another"), IMAGES) != first


def test_what_a_pod_template_says_counts_and_lists_with_names_are_merged():
    ours = {"containers": [{"name": "main", "image": "a", "env": [{"name": "A", "value": "1"}]}]}
    theirs = {
        "containers": [{"name": "side"}, {"name": "main", "env": [{"name": "B", "value": "2"}]}],
        "hostNetwork": True,
    }

    assert merged(ours, theirs) == {
        "containers": [
            {"name": "main", "image": "a", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"name": "side"},
        ],
        "hostNetwork": True,
    }


def test_labels_that_select_pods_are_not_the_users_to_change():
    roles = [
        {"name": "all", "type": "aggregated", "podTemplate": {"metadata": {"labels": {ROLE: "mine", "team": "a"}}}}
    ]
    (child,) = [
        each
        for each in manifests(a_deployment(roles=roles))
        if each["metadata"]["name"].startswith("tiny-all-") and each["kind"] == "Deployment"
    ]

    labels = child["spec"]["template"]["metadata"]["labels"]
    assert labels[ROLE] == "all"
    assert labels["team"] == "a"
    assert child["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("written", "meant"),
    [("8Gi", 8 << 30), ("500M", 500_000_000), ("1.5G", 1_500_000_000), ("1024", 1024), ("64Ki", 65536)],
)
def test_quantities_are_those_of_kubernetes(written, meant):
    assert in_bytes(written) == meant
