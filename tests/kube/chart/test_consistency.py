"""Consistency check: `fleet kube render` refuses each DisaggDeployment that an API server refuses, by the same text."""

from pathlib import Path

import msgspec
import pytest
import yaml

from fleet.cli.main import run
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.chart.crds import KINDS, definition
from tests.kube.chart import test_crds

(MARK,) = test_crds.test_impossible_deployment_is_refused_with_the_field.pytestmark
NAMES, SAMPLES = MARK.args
DEPLOYMENTS = Path(__file__).parents[3] / "deploy" / "samples"


@pytest.mark.parametrize(NAMES, SAMPLES)
def test_deployment_that_the_server_refuses_is_not_rendered(tmp_path, capsys, roles, spec, said):
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(test_crds.a_deployment(*roles, **spec)))
    assert run(["kube", "render", "-f", str(file)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def rules_of(schema):
    """Yield the CEL rules of a schema and of all schemas in it, except those that compare with the former object."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:
            yield rule
    inside = [schema["items"]] if "items" in schema else []
    for inner in (*schema.get("properties", {}).values(), *inside):
        yield from rules_of(inner)


def test_each_rule_has_a_sample_that_breaks_it():
    [version] = definition(KINDS[0])["spec"]["versions"]
    messages = [rule["message"] for rule in rules_of(version["schema"]["openAPIV3Schema"]["properties"]["spec"])]

    assert KINDS[0].name == "DisaggDeployment"
    assert messages
    assert [message for message in messages if not any(said in message for *_, said in SAMPLES)] == []


@pytest.mark.parametrize("path", sorted(DEPLOYMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_deployment_of_deploy_samples_contradicts_nothing(path):
    content = msgspec.yaml.decode(path.read_bytes())
    spec = msgspec.convert(content["spec"], DisaggDeploymentSpec)
    assert list(contradictions(spec, content["metadata"]["name"])) == []


def test_name_too_long_beside_the_routers_is_not_rendered(tmp_path, capsys):
    file = tmp_path / "deployment.yaml"
    deployment = test_crds.a_deployment(test_crds.a_role("aggregated") | {"name": "a"})
    for length, status in ((48, 0), (49, 3)):
        deployment["metadata"]["name"] = "d" * length
        file.write_text(yaml.safe_dump(deployment))
        assert run(["kube", "render", "-f", str(file)]) == status
    assert "too long beside the name of the routers' role" in capsys.readouterr().err


def test_name_that_the_server_refuses_is_not_rendered(tmp_path, capsys):
    file = tmp_path / "deployment.yaml"
    deployment = test_crds.a_deployment(test_crds.a_role("aggregated"))
    for length, status in ((54, 0), (55, 3)):
        deployment["metadata"]["name"] = "d" * (length - len("aggregated"))
        file.write_text(yaml.safe_dump(deployment))
        assert run(["kube", "render", "-f", str(file)]) == status
    assert "metadata.name: too long beside the name of a role" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "proposed"), [("llama-3.3-70b", "llama-3-3-70b"), ("7b", "m-7b")])
def test_name_with_dots_or_digit_is_not_rendered(tmp_path, capsys, name, proposed):
    file = tmp_path / "deployment.yaml"
    deployment = test_crds.a_deployment(test_crds.a_role("aggregated"))
    deployment["metadata"]["name"] = name
    file.write_text(yaml.safe_dump(deployment))

    assert run(["kube", "render", "-f", str(file)]) == 3

    assert f"use {proposed}" in capsys.readouterr().err
