"""`fleet hardware`: its output, and which input it refuses."""

import json

import pytest

from fleet.cli.console.exits import CONFIGURATION_REFUSED, DONE
from fleet.cli.main import run
from tests.support.sim.model_configs import LLAMA_70B


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path)


def answered(capsys):
    return json.loads(capsys.readouterr().out)


def test_accuracy_is_shown_by_system_backend_and_phase(capsys):
    assert run(["hardware", "accuracy", "--json", "-"]) == DONE

    rows = answered(capsys)
    figures = {"rows", "ttft_mape", "ttft_median", "tpot_mape", "tpot_median", "fitted_on", "tested_on"}
    assert all(figures | {"system", "backend", "phase", "model"} <= row.keys() for row in rows)
    assert {row["system"] for row in rows} >= {"h100", "h200", "b200", "all"}


def test_accuracy_for_people_names_what_was_left_out(capsys):
    assert run(["hardware", "accuracy"]) == DONE

    assert "models that were not fitted to at all" in capsys.readouterr().out


def test_every_gpu_is_listed_with_its_source(capsys):
    assert run(["hardware", "list", "--json"]) == DONE

    known = answered(capsys)
    assert {"h100", "h200", "b200", "mi300x", "a100", "l40s"} <= known.keys()
    assert all(each["source"] for each in known.values())
    assert all(known[name]["price"]["date"] for name in ("h100", "h200", "b200", "mi300x", "a100", "l40s"))


def test_an_estimate_says_what_it_rests_on(capsys, model):
    arguments = ["--gpu", "h100", "--tp", "8", "--weights", "fp8", "--kv", "fp8"]

    assert run(["hardware", "estimate", model, *arguments, "--json", "-"]) == DONE

    answer = answered(capsys)
    assert answer["kv_bytes_per_token"] == 163_840
    assert answer["basis"] == "model"
    assert 5 < answer["tpot_ms"] < 40
    assert answer["dollars_per_million_answer_tokens"] > 0
    assert answer["price"].startswith("RunPod")


def test_a_repository_that_is_known_needs_no_file(capsys):
    asked = ["--gpu", "h100", "--tp", "4", "--json", "-"]
    assert run(["hardware", "estimate", "meta-llama/Llama-3.3-70B-Instruct", *asked]) == DONE
    assert answered(capsys)["parameters"] == pytest.approx(70.55e9, rel=0.01)

    assert run(["hardware", "estimate", "nobody/nothing", *asked]) == CONFIGURATION_REFUSED
    assert capsys.readouterr().err == "fleet: nobody/nothing: No such file or directory\n"


def test_energy_and_cost_per_token_state_their_quality(capsys, model):
    for name in ("h100", "b200", "b300"):
        arguments = ["--gpu", name, "--tp", "8", "--weights", "fp8", "--kv", "fp8", "--concurrency", "64"]
        assert run(["hardware", "estimate", model, *arguments, "--json", "-"]) == DONE
        answer = answered(capsys)
        assert 8 * 100 < answer["watts"] < 8 * 1100
        assert answer["joules_per_answer_token"] == pytest.approx(
            answer["watts"] / answer["answer_tokens_per_second"], rel=0.01
        )
        assert 0.2 <= answer["power_error"] <= 0.5
    assert answer["price"] is None
    assert answer["dollars_per_million_answer_tokens"] is None


def test_energy_and_cost_are_printed_for_people(capsys, model):
    assert run(["hardware", "estimate", model, "--gpu", "h200", "--tp", "4"]) == DONE

    said = capsys.readouterr().out
    assert "W (± 30%, boards alone)" in said
    assert "a million of them (RunPod, secure cloud, list, 2025-06)" in said


def test_a_model_that_does_not_fit_is_refused_in_one_line(capsys, model):
    assert run(["hardware", "estimate", model, "--gpu", "l40s"]) == CONFIGURATION_REFUSED

    said = capsys.readouterr().err
    assert "does not fit" in said
    assert "it fits with tp=4, or cut like that on b200" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "hidden_size is missing"),
        (f'{{"hidden_size": 1, "num_hidden_layers": {1 << 62}}}', "num_hidden_layers must be at most 16,777,216"),
    ],
)
def test_unreadable_config_is_refused_with_file_and_field(capsys, tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)

    assert run(["hardware", "estimate", str(tmp_path), "--gpu", "h100"]) == CONFIGURATION_REFUSED

    error = capsys.readouterr().err
    assert f"{tmp_path / 'config.json'}: " in error
    assert said in error


def test_a_wheel_that_is_not_there_is_refused(capsys, tmp_path):
    assert run(["hardware", "accuracy", "--data", str(tmp_path / "absent.whl")]) == CONFIGURATION_REFUSED

    assert "absent.whl" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused(capsys, tmp_path):
    assert run(["hardware", "list", "--json", str(tmp_path / "no" / "folder.json")]) == CONFIGURATION_REFUSED

    assert "--json" in capsys.readouterr().err
