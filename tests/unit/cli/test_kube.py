"""`fleet kube`: manifests of good files, a line about bad ones."""

from pathlib import Path

import msgspec
import pytest

from fleet.cli.main import run

SAMPLE = (Path(__file__).parents[3] / "deploy" / "samples" / "cpu.yaml").read_text()


def rendered(text, tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    return run(["kube", "render", "-f", str(file)])


def test_a_deployments_objects_are_printed_as_yaml(tmp_path, capsys):
    assert rendered(SAMPLE, tmp_path) == 0

    objects = [msgspec.yaml.decode(part) for part in capsys.readouterr().out.split("---\n") if part.strip()]
    assert {each["kind"] for each in objects} == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}


def test_definitions_of_all_kinds_are_printed(capsys):
    assert run(["kube", "crds"]) == 0

    assert capsys.readouterr().out.count("kind: CustomResourceDefinition") == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("kind: Pod", "is no fleet-serving.io/v1alpha1 DisaggDeployment"),
        (SAMPLE.replace("  name: tiny", "  labels: {}"), "metadata.name: is missing"),
        (SAMPLE.replace("type: decode", "type: encode"), "$.roles[2].type"),
        (SAMPLE.replace("type: decode", "typ: decode"), "typ"),
        ("a: [" * 50_000, "recursion"),
        ("- " * 100_000, "recursion"),
        ("a: b: c", "mapping values"),
    ],
)
def test_a_file_that_cannot_be_rendered_is_refused_in_a_line_and_nothing_is_printed(text, said, tmp_path, capsys):
    assert rendered(text, tmp_path) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
