"""`fleet plan replay`: figures of the planner rules, the report page, and one line for invalid input."""

import json

import pytest

from fleet.cli.main import run
from tests.support.sim.replays import REPLAY, write_replay

KEYS = {
    "rule",
    "attainment",
    "gpu_hours",
    "dollars",
    "direction_changes",
    "most_replicas",
    "predicted_error",
}


def test_each_rule_has_one_object_with_its_figures(tmp_path, capsys):
    file = write_replay(tmp_path)

    assert run(["plan", "replay", str(file), "--rules", "static_peak,hpa", "--json", "-"]) == 0

    peak, hpa = json.loads(capsys.readouterr().out)
    assert peak.keys() >= KEYS
    assert (peak["rule"], hpa["rule"]) == ("static_peak", "hpa")
    assert peak["attainment"] >= 0.97
    assert peak["direction_changes"] == 0
    assert 0 < hpa["gpu_hours"] != peak["gpu_hours"]
    assert peak["dollars"] == pytest.approx(peak["gpu_hours"] * hpa["dollars"] / hpa["gpu_hours"], rel=1e-2)


def test_report_shows_replicas_and_decisions_with_reasons(tmp_path, capsys):
    file, page = write_replay(tmp_path), tmp_path / "page.html"

    assert run(["plan", "replay", str(file), "--report", str(page), "--set", "planner.rule=<b>"]) == 3
    assert not page.exists()
    assert run(["plan", "replay", str(file), "--report", str(page)]) == 0

    text = page.read_text()
    assert "hpa" in capsys.readouterr().out
    for wanted in ("Demand", "both wanted", "both ready", "Goals kept", "Cost", "load_up", "both is used to"):
        assert wanted in text, wanted
    assert "<script" not in text
    assert "on pools that one rule sizes." in text


def test_report_shows_all_pools_that_had_replicas(tmp_path):
    names = ["both", "b", "c", "d"]
    more = "".join(f'[[pools]]\nname = "{name}"\nrole = "both"\ngpu = "l40s"\ngpus = 2\n' for name in names[1:])
    unused = "".join(f"[planner.pools.{name}]\nleast = 0\n" for name in names[1:])
    file, page = write_replay(tmp_path, REPLAY + more + unused), tmp_path / "page.html"

    assert run(["plan", "replay", str(file), "--report", str(page)]) == 0

    text = page.read_text()
    assert "Replicas (1 of 2)" in text
    for name in names:
        assert f"{name} wanted" in text, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "hpa,hpa"], "--rules: 'hpa' is named twice"),
        (["--rules", "hpb"], "fleet: --rules: 'hpb' is not one of"),
        (["--set", "planner.rule=hpb"], "replay.toml: planner.rule: 'hpb' is not one of"),
        (["--set", "planner.parameters.hpb.target=1"], "replay.toml: planner.parameters.hpb: 'hpb' is not one of"),
        (["--set", "planner.pools.other.most=3"], "planner.pools.other: there is no such pool; there are both"),
        (["--set", "planner.pools.both.least=13"], "planner.pools.both.least: 13 is more than most, which is 12"),
        (["--set", "planner.gap_every_seconds=5"], "gap_seconds: 0 is not between 0 and gap_every_seconds, 5"),
        (["--set", "clients.kind=closed"], 'clients must be "open"'),
        (["--set", "planner.parameters.hpa={goal=1}"], "planner.parameters.hpa"),
        (["--set", "planner.parameters.hpa.target=0"], "planner.parameters.hpa.target: Expected `float` > 0"),
        (["--set", "planner.parameters.hpa.down_seconds=nan"], "planner.parameters.hpa.down_seconds: Expected `float`"),
        (
            ["--rules", "chiron", "--set", "planner.parameters.chiron.interval_seconds=0"],
            "planner.parameters.chiron.interval_seconds: Expected `float` >= 0.1",
        ),
        (
            ["--rules", "llmd_slo", "--set", "planner.parameters.llmd_slo.share=2"],
            "planner.parameters.llmd_slo.share: Expected `float` <= 1",
        ),
        (["--set", "planner.percentile=nan"], "planner.percentile"),
        (["--set", "planner.warm_up_seconds=1200000"], "planner.warm_up_seconds: 1200000 must be less than"),
        (
            ["--rules", "fleet", "--set", "planner.budget.dollars_per_hour=0.5"],
            "planner.budget.dollars_per_hour: 0.5 is below what the floors",
        ),
        (["--rules", "fleet", "--set", "planner.budget.gpus=0"], "planner.budget.gpus: 0 is below what the floors"),
        (["--set", "planner.budget.gpus=1"], "planner.budget.gpus: 1 is below the 2 GPUs of the replicas at the"),
        (["--rules", "fleet", "--set", "pools.0.role=decode"], "pools: there must be pools for prefill and for decode"),
    ],
)
def test_invalid_input_is_refused_with_its_field(tmp_path, capsys, options, message):
    file = write_replay(tmp_path)

    assert run(["plan", "replay", str(file), *options]) == 3

    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_plain_simulation_refuses_a_planner_section(tmp_path, capsys):
    assert run(["sim", "run", str(write_replay(tmp_path))]) == 3
    assert "planner" in capsys.readouterr().err


def test_scenario_without_planner_section_is_refused(tmp_path, capsys):
    file = write_replay(tmp_path, REPLAY.partition("[planner]")[0])

    assert run(["plan", "replay", str(file)]) == 3
    assert f"{file}: planner: a replay needs this section" in capsys.readouterr().err

    assert run(["plan", "replay", str(file), "--set", "planner.rule=hpa", "--set", "workload.requests=50"]) == 0


def test_table_begins_with_goals_and_names_unreached_ones(tmp_path, capsys):
    file = write_replay(tmp_path)
    few = ["--set", "workload.requests=50", "--set", "planner.warm_up_seconds=0"]

    assert run(["plan", "replay", str(file), *few, "--set", "slo.ttft_ms=3"]) == 0
    goals, _, unreached = capsys.readouterr().out.splitlines()
    assert goals == "goals ([slo]): the first token within 3 ms, further ones within 150 ms each"
    assert unreached.strip().startswith("slo.ttft_ms: no request reached 3 ms; the lowest was ")

    assert run(["plan", "replay", str(file), *few]) == 0
    assert "reached" not in capsys.readouterr().out
