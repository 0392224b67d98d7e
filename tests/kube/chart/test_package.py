"""Chart package: its description for Artifact Hub and its readers, example values, presets and notes."""

import asyncio
import base64
import tomllib

import msgspec
import pytest
import yaml

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from operators.chart.crds import KINDS
from operators.chart.presets import PRESETS, ResourcePreset
from operators.chart.values import Image, Values
from tests.support.kube.api.running import an_api_server
from tests.support.kube.charts import (
    CHART,
    VERSIONS,
    by_name,
    documents,
    helm_3_lint,
    helm_3_render,
    helm_4_render,
    loaded_chart,
    pods,
)
from tests.support.kube.clients import Api
from tests.support.kube.documentation import DEPLOY, is_ours
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import AskedRouters, an_operator
from tests.support.kube.pod_security import complaints
from tests.support.kube.published_schemas import check
from tests.support.kube.tools import Command, helm_3, tools_folder
from tests.support.waiting import until

SAMPLES = {"h100": "h100-llama-70b", "b200": "b200-deepseek-moe", "mi300x": "mi300x-llama-70b"}
"""The sample for which each file of example values is meant."""

EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))


def chart_file():
    return yaml.safe_load((CHART / "Chart.yaml").read_text())


def example(name):
    return yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())


def container_of(found, component):
    (container,) = found["Deployment", f"fleet-{component}"]["spec"]["template"]["spec"]["containers"]
    return container


# What Artifact Hub shows


def test_chart_names_its_version_home_maintainers_and_icon():
    chart = chart_file()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]

    assert chart["version"] == chart["appVersion"] == project["version"]
    assert chart["home"] == project["urls"]["Homepage"]
    assert [set(each) >= {"name"} for each in chart["maintainers"]] == [True]
    kind, _, icon = chart["icon"].partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert base64.b64decode(icon).startswith(b"<svg ")
    assert chart["annotations"]["artifacthub.io/license"] == project["license"]
    assert "[INFO]" not in helm_3_lint({}), "Helm recommends nothing more"


def test_annotations_list_kinds_examples_and_images():
    annotations = chart_file()["annotations"]
    assert all(isinstance(each, str) for each in annotations.values())
    listed = {
        name: yaml.safe_load(annotations[f"artifacthub.io/{name}"]) for name in ("crds", "crdsExamples", "images")
    }

    assert {each["kind"] for each in listed["crds"]} == {kind.name for kind in KINDS}
    assert all(each["description"] for each in listed["crds"])
    assert all(is_ours(each) for each in listed["crdsExamples"])
    images = msgspec.structs.asdict(Values().images)
    assert {each["image"].rpartition(":")[0] for each in listed["images"]} == {
        each.repository for each in images.values() if isinstance(each, Image)
    }


def test_readme_explains_every_value():
    rows = [line for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `")]
    cells = {row.split("|")[1].strip(" `"): row.split("|")[-2].strip() for row in rows}

    def keys(value, path=""):
        for field in msgspec.structs.fields(value):
            inner = getattr(value, field.name)
            if isinstance(inner, msgspec.Struct) and type(inner).__module__ == Values.__module__:
                yield from keys(inner, f"{path}{field.encode_name}.")
            else:
                yield f"{path}{field.encode_name}"

    assert [key for key in keys(Values()) if not cells.get(key)] == []


# Example values


def test_each_example_has_a_sample():
    assert sorted(SAMPLES) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_rendered_alike_and_valid_everywhere(name):
    values = example(name)
    assert "0 chart(s) failed" in helm_3_lint(values)

    found = documents(helm_3_render(values))

    assert by_name(found) == by_name(documents(helm_4_render(values)))
    for document in found:
        for version in VERSIONS:
            check(document, version)
    assert [said for _, spec in pods(found) for said in complaints(spec)] == []


def b200_nodes():
    """Return eight nodes of one NVLink domain, with the labels that the vendor's feature discovery sets."""
    allocatable = {"nvidia.com/gpu": "8", "rdma/hca": "8", "cpu": "128", "memory": "2Ti", "pods": "110"}
    for number in range(8):
        name = f"b200-{number}"
        labels = {
            "kubernetes.io/hostname": name,
            "nvidia.com/gpu.product": "NVIDIA-B200",
            "nvidia.com/gpu.clique": "a.0",
        }
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        yield {"metadata": {"name": name, "labels": labels}, "status": status}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_example_is_installed_and_its_sample_becomes_ready(name, tmp_path):
    manifest = yaml.safe_load((DEPLOY / "samples" / f"{SAMPLES[name]}.yaml").read_text())
    with an_api_server(with_controllers=True, beside=Nodes().run) as server, Api(server.url) as api:
        asked = AskedRouters(server, api, "serving", tmp_path)
        config = server.kubeconfig(tmp_path, namespace="serving")
        helm = Command(helm_3(tools_folder()), config, tmp_path)
        for node in b200_nodes() if name == "b200" else ():
            api.post("/api/v1/nodes", {"metadata": node["metadata"]}).expect(201)
            path = f"/api/v1/nodes/{node['metadata']['name']}/status"
            api.patch(path, "merge", {"status": node["status"]}).expect(200)
        path = str(CHART / "examples" / f"{name}.yaml")
        await asyncio.to_thread(helm, "install", "fleet", str(CHART), "--create-namespace", "--values", path)
        async with an_operator(asked):
            asked.apply(manifest).expect(201)
            await until(lambda: asked.ready(manifest["metadata"]["name"]), 120)


# Presets, spreading, notes


@pytest.mark.parametrize("component", sorted(PRESETS))
def test_preset_sets_the_resources_of_a_component(component):
    def resources(**values):
        enabled = {"planner": {"enabled": True}} | {component: {"enabled": True} | values}
        return container_of(by_name(documents(helm_3_render(enabled))), component).get("resources")

    small = PRESETS[component]["Small"]
    assert resources() == resources(preset="Small") == small
    assert resources(preset="Large") == PRESETS[component]["Large"] != small
    own = resources(preset="Medium", pods={"resources": {"requests": {"cpu": "3"}}})
    assert own["requests"] == {"cpu": "3", "memory": PRESETS[component]["Medium"]["requests"]["memory"]}
    assert resources(preset="None") is None
    assert set(PRESETS[component]) == {each.value for each in ResourcePreset} - {"None"}


def test_spread_constraint_gets_the_selector_of_its_pods():
    theirs = {"matchLabels": {"mine": "yes"}}
    zone = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    told = {"pods": {"topologySpreadConstraints": [zone, zone | {"labelSelector": theirs}]}}
    values = {"routers": told, "operator": told, "planner": told | {"enabled": True}}
    found = by_name(documents(helm_3_render(values)))

    for component in ("routers", "operator", "planner"):
        spec = found["Deployment", f"fleet-{component}"]["spec"]
        own, given = spec["template"]["spec"]["topologySpreadConstraints"]
        assert own == zone | {"labelSelector": spec["selector"]}
        assert given == zone | {"labelSelector": theirs}


def notes(values):
    rendered = loaded_chart().render(values, name="fleet", namespace="serving")
    return next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))


def test_notes_contain_the_next_command():
    said = notes({})

    assert "kubectl -n serving apply -f deploy/samples/cpu.yaml" in said
    assert "kubectl -n serving wait disaggdeployment/tiny --for=condition=Available" in said
    assert "helm test -n serving fleet" in said
    assert "apply -f" not in notes({"operator": {"enabled": False}})


def test_notes_say_that_metrics_are_closed_if_they_are():
    warning = "Metrics at port 8080 are closed without a key"
    opened = {"settings": {"metrics_access": {"open": True}}}
    routers = "routers (once tenants have API keys)"

    assert f"{warning}: those of operator, {routers}.\n" in notes({})
    assert f"{warning}: those of operator, planner, {routers}.\n" in notes({"planner": {"enabled": True}})
    assert warning not in notes({"monitoring": {"access": {"open": True}}})
    assert f"{warning}: those of {routers}.\n" in notes({"operator": opened})
    unasked = {"settings": {"metrics_access": {"ask_on_health": False}}}
    assert warning not in notes({"operator": opened, "routers": unasked})
    closed = {"settings": {"metrics_access": {"open": False}}}
    assert f"{warning}: those of operator, {routers}.\n" in notes({"operator": closed})


def test_notes_warn_of_routers_that_do_not_know_each_other():
    warning = "These routers do not know each other"

    assert warning in notes({})
    assert warning not in notes({"routers": {"controlSecret": "fleet-control"}})
    assert warning not in notes({"routers": {"replicas": 1}})
    assert warning in notes({"routers": {"controlSecret": "fleet-control", "processes": 2}})
