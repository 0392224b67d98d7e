"""`fleet kube`: manifests of valid files, and one line about invalid ones."""

import io
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from fleet.cli.main import run

ROOT = Path(__file__).parents[3]
SAMPLE = (ROOT / "deploy" / "samples" / "cpu.yaml").read_text()
GRAPH = (ROOT / "tests" / "unit" / "operators" / "imports" / "graph-v1beta1.yaml").read_text()
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(10 * [f'*{before}'])}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def rendered(text, tmp_path, *options):
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    return run(["kube", "render", "-f", str(file), *options])


def imported(text, tmp_path, *options):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    return run(["kube", "import", str(file), *options])


def objects_in(text):
    return [msgspec.yaml.decode(part) for part in text.split("---\n") if part.strip()]


def names_of(objects):
    return [(each["kind"], each["metadata"]["name"]) for each in objects]


def test_a_deployments_objects_are_printed_as_yaml(tmp_path, capsys):
    assert rendered(SAMPLE, tmp_path) == 0

    kinds = {each["kind"] for each in objects_in(capsys.readouterr().out)}
    assert {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"} <= kinds


def test_json_and_standard_input_give_the_same_objects(tmp_path, capsys, monkeypatch):
    assert rendered(SAMPLE, tmp_path) == 0
    as_yaml = capsys.readouterr().out
    assert rendered(SAMPLE, tmp_path, "-o", "json") == 0
    collected = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO(SAMPLE))
    assert run(["kube", "render", "-f", "-"]) == 0

    assert capsys.readouterr().out == as_yaml
    assert (collected["kind"], collected["apiVersion"]) == ("List", "v1")
    assert collected["items"] == objects_in(as_yaml)


def test_documents_are_rendered_one_after_the_other(tmp_path, capsys):
    other = SAMPLE.replace("  name: tiny", "  name: other", 1)
    assert rendered(f"{SAMPLE}\n---\n{other}\n---\n", tmp_path) == 0
    both = names_of(objects_in(capsys.readouterr().out))
    alone = []
    for text in (SAMPLE, other):
        assert rendered(text, tmp_path) == 0
        alone += names_of(objects_in(capsys.readouterr().out))
    assert both == alone


def test_definitions_of_all_kinds_are_printed(capsys):
    assert run(["kube", "crds"]) == 0

    assert capsys.readouterr().out.count("kind: CustomResourceDefinition") == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("kind: Pod", "document 1: is not a DisaggDeployment of fleet-serving.io/v1alpha1"),
        ("[1, 2]", "document 1: is not a DisaggDeployment of fleet-serving.io/v1alpha1"),
        (f"{SAMPLE}\n---\nkind: Pod", "document 2: is not a DisaggDeployment of fleet-serving.io/v1alpha1"),
        (SAMPLE.replace("  name: tiny", "  labels: {}"), "metadata.name: is missing"),
        (SAMPLE.replace("  name: tiny", "  name: Tiny_1"), "document 1: metadata.name: must be at most 63 characters"),
        (SAMPLE.replace("  name: tiny", "  name: tiny\n  namespace: [1]"), "metadata.namespace: must be"),
        (SAMPLE.replace("metadata:\n  name: tiny", "metadata: [1]"), "metadata.name: is missing"),
        (SAMPLE.replace("spec:", "specs:", 1), "document 1: specs: is not a known key"),
        (SAMPLE.partition("spec:")[0], "document 1: spec: Expected `object`, got `null`"),
        (SAMPLE.replace("type: decode", "type: encode"), "document 1: spec.roles[2].type: Invalid enum value 'encode'"),
        (SAMPLE.replace("type: decode", "typ: decode"), "document 1: spec.roles[2].typ: is not a known key"),
        (SAMPLE.replace("      type: decode\n", ""), "document 1: spec.roles[2].type: is missing"),
        (SAMPLE.replace("type: decode", "type: router"), "document 1: spec.roles: prefill and decode need each other"),
        ("a: [" * 50_000, "recursion"),
        ("- " * 100_000, "recursion"),
        ("a: b: c", "mapping values"),
        (BOMB, "stands for more than"),
        ("a: &a [*a]", "stands for more than"),
        ("on: 1", "a key must be a text, not True; put it in quotes"),
        ("a: 2026-01-01", "a value must be a text, not a date; put it in quotes"),
        ("a: 2026-13-41", "month must be in 1..12"),
        ("a: !!bool x", "not of the type that its tag says"),
        ("a: !!timestamp x", "not of the type that its tag says"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("\x00", "special characters are not allowed"),
    ],
)
def test_invalid_file_is_refused_in_one_line_without_output(text, said, tmp_path, capsys):
    assert rendered(text, tmp_path) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    ['"SESAME', "SESAME: x", "*SESAME", "!SESAME x", "!!int SESAME", "!!float SESAME", "!!bool SESAME", "[SESAME"],
)
def test_yaml_error_does_not_quote_the_content(line, tmp_path, capsys):
    for command in (rendered, imported):
        assert command(f"a:\n  password: {line}\n", tmp_path) == 3
        assert "SESAME" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("broken", [7, "x", [7], {"spec": 7}, {"metadata": "x"}, {"spec": {"containers": [{}, 7]}}])
def test_pod_template_is_not_validated_here(broken, tmp_path, capsys):
    deployment = yaml.safe_load(SAMPLE)
    deployment["spec"]["roles"][0]["podTemplate"] = broken
    status = rendered(yaml.safe_dump(deployment), tmp_path)
    assert status == (0 if isinstance(broken, dict) else 3)
    assert "Traceback" not in capsys.readouterr().err


def test_imported_deployment_renders_and_warnings_are_separate(tmp_path, capsys):
    assert imported(GRAPH, tmp_path) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "fleet: warning: spec.components[0].eppConfig: the router picks by its own policy; `routing.policy` names another",
        "fleet: warning: spec.components[1].minAvailable: has no equal here and is left out",
    ]
    assert rendered(out, tmp_path) == 0


def test_warnings_come_as_json_a_line_each(tmp_path, capsys):
    assert imported(GRAPH, tmp_path, "--json", "--name", "other", "--namespace", "there", "-o", "json") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["path"] for line in err.splitlines()] == [
        "spec.components[0].eppConfig",
        "spec.components[1].minAvailable",
    ]
    (made,) = json.loads(out)["items"]
    assert made["metadata"] == {"name": "other", "namespace": "there"}


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", (), "is neither a values file"),
        ("kind: Pod", (), "is neither a values file"),
        (GRAPH.replace("replicas: 3", "replicas: many"), (), "spec.components[1].replicas: must be a whole number"),
        (GRAPH.replace("v1beta1", "v1"), (), "apiVersion: must be nvidia.com/v1alpha1 or v1beta1"),
        (GRAPH, ("--name", "Not_A_Name"), "--name: must be at most 63 characters"),
        (BOMB, (), "stands for more than"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_in_a_line(text, options, said, tmp_path, capsys):
    assert imported(text, tmp_path, *options) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_is_refused_in_a_line(capsys):
    for command in (["render", "-f"], ["import"]):
        assert run(["kube", *command, "/no/such/file"]) == 3
        assert capsys.readouterr().err == "fleet: /no/such/file: No such file or directory\n"


REQUEST = Path(__file__).parents[3] / "deploy" / "samples" / "requests" / "llama-70b.yaml"


def test_proposed_deployment_can_be_rendered(tmp_path, capsys):
    assert run(["kube", "propose", "-f", str(REQUEST)]) == 0
    out, err = capsys.readouterr()
    assert "GoalsMet" in err
    assert "measurements of this model on these GPUs" in err
    made = tmp_path / "made.yaml"
    made.write_text(out)
    assert run(["kube", "render", "-f", str(made)]) == 0


def test_a_request_that_nothing_keeps_prints_nothing_but_why(tmp_path, capsys):
    file = tmp_path / "request.yaml"
    file.write_text(REQUEST.read_text().replace("ttftMs: 1000", "ttftMs: 1"))
    assert run(["kube", "propose", "-f", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fleet: llama-70b-chat: TtftOutOfReach: spec.objective.ttftMs: the first token takes ")


@pytest.mark.parametrize(
    ("was", "is_now", "said"),
    [
        (
            "kind: ServingRequest",
            "kind: DisaggDeployment",
            "document 1: is not a ServingRequest of fleet-serving.io/v1alpha1",
        ),
        ("  name: llama-70b-chat", "  labels: {}", "metadata.name: is missing"),
        ("  name: llama-70b-chat", "  name: 70b-chat", "metadata.name: must be at most 47 characters"),
        ("  name: llama-70b-chat", f"  name: {'a' * 48}", "metadata.name: must be at most 47 characters"),
        ("  name: llama-70b-chat", '  name: "llama\\n"', "metadata.name: must be at most 63 characters"),
        ("ttftMs: 1000", "ttftMs: 0", "spec.objective.ttftMs: "),
        ("  apply: true", "  applied: true", "spec.applied: is not a known key"),
    ],
)
def test_invalid_request_is_refused_with_the_field(tmp_path, capsys, was, is_now, said):
    file = tmp_path / "request.yaml"
    file.write_text(REQUEST.read_text().replace(was, is_now))
    assert run(["kube", "propose", "-f", str(file)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
