"""`fleet sim agree`: a scenario through the production servers and through the simulation."""

import json

import pytest

from fleet.app.agreement import comparison as agreement
from fleet.cli.main import run
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.scenarios import SCENARIO


def a_scenario(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return [
        str(path),
        "--set",
        "workload.requests=30",
        "--set",
        "workload.prefixes=2",
        "--set",
        "workload.prefix_tokens=512",
    ]


def test_equal_decisions_exit_0(tmp_path, capsys):
    assert run(["sim", "agree", *a_scenario(tmp_path), "--json", "-"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["agree"]
    assert outcome["requests"] == 30
    assert outcome["lines"] > 150


def test_differences_are_shown_side_by_side_and_exit_1(tmp_path, capsys, monkeypatch):
    logged = agreement.LoggedRun(["1 refuse 1: no_worker"], [])
    monkeypatch.setattr(agreement, "served", lambda plan, traffic: logged)
    assert run(["sim", "agree", *a_scenario(tmp_path)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("production and simulation differ from line 1 on")
    assert told[1:3] == ["production:", "  1 refuse 1: no_worker"]
    assert " place 1 on " in told[4]


def test_a_scenario_that_cannot_be_run_is_refused(tmp_path, capsys):
    assert run(["sim", "agree", *a_scenario(tmp_path), "--set", "pools.0.gpu=abacus"]) == 3
    assert "pools[0].gpu" in capsys.readouterr().err


def test_unwritable_output_is_refused_before_any_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(agreement, "served", lambda *_: pytest.fail("something ran"))
    assert run(["sim", "agree", *a_scenario(tmp_path), "--json", str(tmp_path / "no" / "file")]) == 3
    assert capsys.readouterr().err.startswith("fleet: --json: ")
