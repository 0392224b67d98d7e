"""Consistency check: `fleet kube render` refuses each DisaggDeployment that an API server refuses, by the same text."""

import pytest
import yaml

from fleet.cli.main import run
from tests.kube.chart import test_crds

(MARK,) = test_crds.test_impossible_deployment_is_refused_with_the_field.pytestmark
NAMES, SAMPLES = MARK.args


@pytest.mark.parametrize(NAMES, SAMPLES)
def test_deployment_that_the_server_refuses_is_not_rendered(tmp_path, capsys, roles, spec, said):
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(test_crds.a_deployment(*roles, **spec)))
    assert run(["kube", "render", "-f", str(file)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


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
