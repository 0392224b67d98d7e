"""`fleet sim`: figures of scenarios, and one line for invalid ones."""

import json
import re
from pathlib import Path

import pytest

from fleet.cli.main import run
from fleet.cli.sim import scenario_file
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.traces import CONVERSATION


def outcome(capsys, *argv):
    assert run(["sim", *map(str, argv), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_answers_in_one_object(scenario, capsys):
    answer = outcome(capsys, "run", scenario)

    assert answer["requests"] == 100
    assert answer["simulated_seconds"] > 8
    assert 0 < answer["ttft_ms"]["p50"] <= answer["ttft_ms"]["p99"]
    assert 0 < answer["tpot_ms"]["p50"] <= answer["tpot_ms"]["p99"]
    assert answer["attainment"] > 0.9
    assert answer["goodput_rps"] == pytest.approx(answer["attainment"] * 100 / answer["simulated_seconds"], rel=1e-3)
    assert answer["gpu_hours"] == pytest.approx(2 * answer["simulated_seconds"] / 3600, rel=1e-2)
    assert answer["cost_per_million_tokens"] > 0
    assert {"digest", "cpu_seconds", "requests_per_cpu_second", "hit_rate", "imbalance"} <= answer.keys()


def test_the_same_scenario_has_the_same_digest(scenario, capsys):
    assert outcome(capsys, "run", scenario)["digest"] == outcome(capsys, "run", scenario)["digest"]
    assert outcome(capsys, "run", scenario)["digest"] != outcome(capsys, "run", scenario, "--seed", "4")["digest"]


def test_a_field_can_be_changed_on_the_command_line(scenario, capsys):
    fast = outcome(capsys, "run", scenario, "--set", "pools.0.gpu=b200", "--set", "workload.requests=50")
    assert fast["requests"] == 50
    assert fast["tpot_ms"]["p50"] < outcome(capsys, "run", scenario)["tpot_ms"]["p50"]


def test_a_trace_runs_at_another_pace(scenario, capsys):
    trace = [f"workload={{kind='trace',file='{CONVERSATION}',requests=200,speed=4}}"]
    answer = outcome(capsys, "run", scenario, "--set", *trace, "--set", "pools.0.gpus=8")
    assert answer["requests"] == 200
    assert 0 < answer["hit_rate"] < 0.3


def test_trace_runs_at_a_hundred_times_its_rate(scenario, capsys):
    trace = [f"workload={{kind='trace',file='{CONVERSATION}',requests=400}}"]
    answer = outcome(capsys, "run", scenario, "--set", *trace, "--set", "pools.0.gpus=8")
    assert answer["simulated_seconds"] > 100 * answer["cpu_seconds"]


def test_every_request_has_a_row(scenario, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    outcome(capsys, "run", scenario, "--requests", rows)
    ended = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted(int(each["request_id"]) for each in ended) == list(range(1, 101))
    assert all(each["arrival"] < each["first_token"] <= each["end"] for each in ended)


@pytest.mark.parametrize(("options", "of_other_loads"), [((), True), (("--no-curve",), False)])
def test_the_report_is_one_page_that_fetches_nothing(scenario, tmp_path, capsys, options, of_other_loads):
    page = tmp_path / "report.html"
    assert run(["sim", "run", str(scenario), "--report", str(page), *options]) == 0
    text = page.read_text()
    assert ("Attainment against load" in text) is of_other_loads
    assert text.count('<figure class="chart">') == (14 if of_other_loads else 10)
    assert "NaN" not in text
    assert not re.search(r"(src|href)=|https?://|<script", text)
    assert "attainment" in capsys.readouterr().out


def test_a_sweep_has_a_row_for_each_combination(scenario, tmp_path, capsys):
    file = tmp_path / "rows.json"
    over = ["--over", "router.policy=fleet,round_robin", "--over", "workload.rate=4,8"]
    assert run(["sim", "sweep", str(scenario), *over, "--seeds", "1:2", "--processes", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["changes"]["router.policy"], row["changes"]["workload.rate"], row["seed"]) for row in rows] == [
        (policy, rate, seed) for policy in ("fleet", "round_robin") for rate in (4, 8) for seed in (1, 2)
    ]
    assert len({row["outcome"]["digest"] for row in rows}) == 8


def test_sweep_with_one_invalid_case_is_refused_before_any_run(scenario, capsys):
    # The run of the first case would take hours.
    over = ["--over", "router.policy=fleet,nope", "--set", "workload.requests=100000000"]

    assert run(["sim", "sweep", str(scenario), *over, "--processes", "1"]) == 3

    assert "nope" in capsys.readouterr().err


def test_capacity_is_where_the_slo_is_just_kept(scenario, capsys):
    answer = outcome(capsys, "capacity", scenario, "--attainment", "0.9", "--processes", "1")
    assert answer["attainment"] >= 0.9
    beyond = outcome(capsys, "run", scenario, "--set", f"workload.rate={answer['rate'] * 1.3}")
    assert beyond["attainment"] < 0.9
    assert answer["rate_per_gpu"] == pytest.approx(answer["rate"] / 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("pools.0.gpu=h1000", "pools[0].gpu: 'h1000' is not one of"),
        ("pools.0.gpus=0", "pools[0].gpus"),
        ("pools.0.tp=4", "pools[0].gpus: 2 is no multiple of the 4"),
        ("pools.0.role=prefill", "pools: prefill workers need"),
        ("pools=[]", "pools"),
        ("model=nowhere", "model: "),
        ("workload={kind='trace',file='nowhere'}", "workload.file: "),
        ("workload.rate=0", "workload.rate"),
        ("slo.ttft_ms=fast", "slo.ttft_ms"),
        ("slo.ttft_ms=-1", "slo.ttft_ms"),
        ("speed=2", "speed: is not a known key"),
        ("faults=[{kind='worker',at_seconds=1,worker='x-0'}]", "faults[0].worker: 'x-0' is not one of both-h100-0"),
        ("pools.3.gpus=1", "scenario.toml: pools.3.gpus: there is no '3' there"),
        ("pools", "--set: 'pools' is not PATH=VALUE"),
        ("router.policy=unheard", "router.policy"),
    ],
)
def test_invalid_scenario_is_refused_in_one_line_with_field(scenario, tmp_path, capsys, change, said):
    page = tmp_path / "report.html"
    assert run(["sim", "run", str(scenario), "--set", change, "--report", str(page)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fleet: ")
    assert said in line
    assert not page.exists()


def test_a_model_that_does_not_fit_is_refused(scenario, tmp_path, capsys):
    large = {
        **LLAMA_8B,
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
    }
    (tmp_path / "model.json").write_text(json.dumps(large))
    assert run(["sim", "run", str(scenario)]) == 3
    assert "pools[0]: model: gpu: does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("workload.rate=1e-308", "workload.rate: Expected `float` >= 1e-09"),
        ("workload.variation=1e-308", "workload.variation: "),
        ("workload.prompt_tokens=2147483648", "workload: prompt_tokens: 2,147,483,648, with all turns, are more than"),
        ("pools.0.gpus=2147483648", "pools: 2,147,483,648 workers are more than 10,000"),
        ("pools.0.dollars_per_hour=inf", "pools[0].dollars_per_hour: "),
        ('pools.0.name="a\\nb"', "pools[0].name: "),
        ("store={memory_gib=inf}", "store.memory_gib: "),
        ("store={memory_gib=10,ssd_gib=10,ssd_latency_us=1e308}", "store.ssd_latency_us: "),
        ("slo.ttft_ms=inf", "slo.ttft_ms: "),
        ('model="a\\u0000b"', "model: "),
        ("seed=" + "9" * 10_000, "seed: Expected `int`, got `str`"),
        ("seed=" + "[" * 10_000, "seed: Expected `int`, got `str`"),
        ("seed=3\nslo = 4", "seed: Expected `int`, got `str`"),
    ],
)
def test_impossible_value_is_refused(scenario, capsys, change, said):
    assert run(["sim", "run", str(scenario), "--set", change]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_fault_of_an_unknown_worker_names_a_few_that_there_are(scenario, capsys):
    fault = 'faults=[{kind="worker",at_seconds=1,worker="nobody"}]'
    assert run(["sim", "run", str(scenario), "--set", fault, "--set", "pools.0.gpus=5000"]) == 3
    assert capsys.readouterr().err.endswith("both-h100-1003 and 4,992 more\n")


def test_two_outputs_are_not_one_file(scenario, tmp_path, capsys):
    file = str(tmp_path / "out")
    assert run(["sim", "run", str(scenario), "--json", file, "--report", file]) == 3
    assert capsys.readouterr().err == f"fleet: --json: {file} is the file of --report as well\n"
    assert not list(tmp_path.glob("*out*"))


def test_no_output_replaces_the_scenario_that_is_read(scenario, capsys):
    before = scenario.read_bytes()
    assert run(["sim", "run", str(scenario), "--json", str(scenario)]) == 3
    assert capsys.readouterr().err == f"fleet: --json: {scenario} is the file which is read\n"
    assert scenario.read_bytes() == before


def test_two_outputs_are_not_one_file_by_two_names(scenario, tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (tmp_path / "sub" / ".." / "out", tmp_path / "link" / "out"):
        assert run(["sim", "run", str(scenario), "--json", str(tmp_path / "out"), "--requests", str(other)]) == 3
        assert "is the file of --requests as well" in capsys.readouterr().err
        assert not list(tmp_path.glob("*out*"))


def test_a_range_of_seeds_is_counted_before_it_is_written_out(scenario, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(["sim", "sweep", str(scenario), "--seeds", "1:9999999999999"])
    assert "are 9999999999999 seeds" in capsys.readouterr().err


def test_study_of_the_wheel_is_found_by_its_name(tmp_path, monkeypatch):
    study = tmp_path / "share" / "fleet" / "studies" / "conversation.toml"
    study.parent.mkdir(parents=True)
    study.touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path) if name == "data" else "")
    own = tmp_path / "own.toml"
    own.touch()

    assert scenario_file("conversation") == study
    assert scenario_file(str(own)) == own
    assert scenario_file("unknown") == Path("unknown")
