"""`fleet sim` with many runs: pairs, seeds, sweeps and curves, waiting clients, and complete files."""

import contextlib
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from fleet.cli.console.progress import ProgressBar
from fleet.cli.main import run
from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments import sweep
from tests.support.sim.scenarios import SCENARIO
from tests.support.sim.traces import AGENTIC, CONVERSATION
from tests.support.waiting import eventually

COMPUTES_SECONDS = 0.3  # processor time after which a run has begun
TRACE = f"workload={{kind='trace',file='{CONVERSATION}',requests=60}}"


def answered(capsys, *argv):
    assert run(["sim", *map(str, argv), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_scenarios_are_compared_seed_by_seed(scenario, tmp_path, capsys):
    other = tmp_path / "other.toml"
    other.write_text(SCENARIO.replace('"h100"', '"b200"'))
    answer = answered(capsys, "compare", scenario, other, "--seeds", "1:3", "--processes", "1")
    tpot = next(figure for figure in answer["figures"] if figure["name"] == "tpot_ms_p50")
    assert tpot["b"] < tpot["a"]
    assert tpot["difference"]["high"] < 0
    assert tpot["verdict"] == "better"
    assert answer["same_requests"]
    assert len(answer["runs"]) == 3
    alone = answered(capsys, "run", scenario, "--seed", "2")
    assert answer["runs"][1][0]["digest"] == alone["digest"]


def test_a_comparison_can_be_of_one_file_with_another_setting(scenario, capsys):
    answer = answered(
        capsys, "compare", scenario, scenario, "--set-b", "workload.rate=9", "--seeds", "1:2", "--processes", "1"
    )
    assert not answer["same_requests"]
    assert [pair[0]["digest"] == pair[1]["digest"] for pair in answer["runs"]] == [False, False]


def test_changes_of_the_second_scenario_are_applied_last(scenario, capsys):
    """Give changes in any order: both scenarios get the rate although it comes before the workload to which it belongs."""
    workload = "workload={kind='drawn',requests=20,rate=8.0,prompt_tokens=100,output_tokens=9}"
    both = ["--set", "workload.rate=9", "--set", workload]
    answer = answered(
        capsys,
        *("compare", scenario, scenario, *both, "--set-b", "workload.rate=4", "--seeds", "1:1", "--processes", "1"),
    )
    assert not answer["same_requests"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("foo", "--set-b: 'foo' is not PATH=VALUE"),
        ("seed=3", "--set-b: seed: many runs take theirs from --seeds"),
        ("pools.3.gpus=1", "other.toml: pools.3.gpus: there is no '3' there"),
        ("workload.rate=0", "other.toml: workload.rate: "),
        ("pools.0.gpu=h1000", "other.toml: pools[0].gpu: 'h1000' is not one of"),
        ("workload={kind='trace',file='nowhere'}", "other.toml: workload.file: "),
    ],
)
def test_invalid_change_of_the_second_scenario_is_refused(scenario, tmp_path, capsys, change, said):
    other = tmp_path / "other.toml"
    other.write_text(SCENARIO)
    assert run(["sim", "compare", str(scenario), str(other), "--set-b", change, "--processes", "1"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fleet: {said}" if said.startswith("--") else f"fleet: {tmp_path}/{said}")


def test_a_scenario_does_not_differ_from_itself(scenario, capsys):
    assert run(["sim", "compare", str(scenario), str(scenario), "--seeds", "1:2", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "attainment" in out
    assert "better" not in out
    assert "worse" not in out


def test_a_run_with_many_seeds_has_means_and_intervals(scenario, capsys):
    answer = answered(capsys, "run", scenario, "--seeds", "1:4", "--processes", "1")
    figure = answer["figures"]["attainment"]
    assert figure["low"] <= figure["mean"] <= figure["high"]
    assert figure["mean"] == pytest.approx(sum(each["attainment"] for each in answer["runs"]) / 4)
    assert len({each["digest"] for each in answer["runs"]}) == 4


def test_capacity_shows_attainment_over_load(scenario, capsys):
    asked = ("capacity", scenario, "--attainment", "0.9", "--points", "3", "--processes")
    answer = answered(capsys, *asked, "1")
    assert answered(capsys, *asked, "3") == answer  # also if more processes make runs that are not needed
    rates = [point["rate"] for point in answer["curve"]]
    assert rates == sorted(rates)
    assert answer["tries"] == len(rates)
    assert min(rates) < 0.6 * answer["rate"]
    assert max(rates) > 1.4 * answer["rate"]
    for point in answer["curve"]:
        if point["rate"] < 0.97 * answer["rate"]:
            assert point["attainment"] >= 0.88, point


def test_capacity_of_users_is_their_number(scenario, capsys):
    closed = ["--set", "clients={kind='closed',users=16}", "--set", "workload.requests=200"]
    answer = answered(capsys, "capacity", scenario, "--attainment", "0.9", "--processes", "1", *closed)
    assert answer["users"] >= 1
    more = answered(
        capsys,
        "run",
        scenario,
        *closed,
        "--set",
        f"clients.users={max(answer['users'] + 1, round(1.3 * answer['users']))}",
    )
    assert more["attainment"] < 0.9 <= answer["attainment"]


def test_sessions_of_a_trace_wait_for_answers(scenario, capsys):
    large = [
        "--set", f"workload={{kind='trace',file='{AGENTIC}',requests=150}}", "--set", "engine.memory_share=0.95",
        "--set", "pools.0.gpu=b200", "--set", "pools.0.gpus=4",
    ]  # fmt: skip
    answer = answered(
        capsys, "run", scenario, *large, "--set", "clients={kind='sessions',users=4,longest_gap_seconds=30}"
    )
    assert answer["requests"] == 150


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("clients={kind='sessions',users=4}", None),  # generated conversations of one turn
        ("clients={kind='some'}", "clients"),
        ("clients={kind='closed',users=0}", "clients.users"),
        ("clients={kind='closed',rate=2}", "clients.rate: is not a known key"),
        ("clients={deadline_seconds=0.1,kind='open'}", "slo.ttft_ms: 500 is more than clients.deadline_seconds"),
        ("slo={ttft_ms=500,e2e_ms=400}", "slo: e2e_ms: 400 for a whole answer is less than ttft_ms, 500"),
        ("workload.turns=4", "workload.turns: conversations need clients that wait"),
        ("workload.part=[0,1]", "workload.part: is not a known key"),
    ],
)
def test_contradicting_clients_and_goals_are_refused(scenario, capsys, change, said):
    assert run(["sim", "run", str(scenario), "--set", change]) == (0 if said is None else 3)
    if said is not None:
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--over", "pools.0.gpu=h100,h1000"], "pools[0].gpu: 'h1000' is not one of"),
        (["--over", "pools.0.tp=1,4"], "pools[0].gpus: 2 is no multiple"),
        (["--over", "workload.rate=1,0"], "workload.rate"),
        (["--over", "seed=1,2", "--seeds", "1:9999"], None),
        (["--over", "=1"], "--over: '=1' is not PATH=V1,V2"),
        (["--over", "workload.rate=1,2", "--over", "slo..ttft_ms=1"], "--over: 'slo..ttft_ms=1' is not PATH=V1,V2"),
        (["--over", "pools.3.gpus=1,2"], "scenario.toml: pools.3.gpus: there is no '3' there"),
        (["--over", "seed.x=1,2"], "--over: seed: many runs take theirs from --seeds"),
        (["--seeds", "1:1000", *10 * ["SCENARIO"]], "--seeds: 11,000 runs are more than 10,000"),
        (["--seeds", "1:1000", "--over", f"workload.rate={','.join(12 * '1')}"], "--over: 12,000 runs are more"),
        (["--over", "workload.rate=1", "--over", "workload.rate=2"], "--over: workload.rate is there twice"),
        (["--over", "seed=1,2"], "seed: many runs take theirs from --seeds"),
        (["--set", "seed=3"], "seed: many runs take theirs from --seeds"),
        (["--set", "workload={kind='trace',file='nowhere'}"], "workload.file: "),
        (["--set", TRACE, "--set", "workload.file=bad.jsonl"], "bad.jsonl:2: timestamp: 0 is before"),
        (["--set", TRACE, "--over", "engine.block_tokens=512,16"], "engine.block_tokens: 16, but blocks of"),
        (["--ray", "nowhere", "--over", "workload.rate=0"], "workload.rate"),
    ],
)
def test_invalid_sweep_is_refused_before_any_run(scenario, tmp_path, capsys, monkeypatch, options, said):
    rows = ({"timestamp": at, "input_length": 9, "output_length": 1, "hash_ids": [1]} for at in (5, 0))
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sweep, "simulate", lambda *_, **__: pytest.fail("something ran"))
    file = tmp_path / "rows.json"
    given = [str(scenario) if each == "SCENARIO" else each for each in options]
    argv = ["sim", "sweep", "--json", str(file), "--processes", "1", *given, str(scenario)]
    if said is None:
        with pytest.raises(SystemExit) as left:
            run(argv)
        assert left.value.code == 2
    else:
        assert run(argv) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert not file.exists()


def test_a_wrong_row_far_down_leaves_nothing_behind(scenario, tmp_path, capsys):
    row = {"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1]}
    lines = [json.dumps({**row, "timestamp": 100 * number}) for number in range(50)]
    (tmp_path / "trace.jsonl").write_text("\n".join([*lines, json.dumps({**row, "output_length": -1})]))
    files = {option: tmp_path / f"out.{option}" for option in ("json", "requests", "report")}
    before = set(tmp_path.iterdir())
    change = "workload={kind='trace',file='trace.jsonl'}"
    options = [each for option, file in files.items() for each in (f"--{option}", str(file))]

    assert run(["sim", "run", str(scenario), "--set", change, *options]) == 3

    (line,) = capsys.readouterr().err.splitlines()
    assert "trace.jsonl:51: output_length: Expected `int` >= 0" in line
    assert set(tmp_path.iterdir()) == before


def test_unwritable_output_is_refused_before_any_run(scenario, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fleet.sim.run.simulate", lambda *_, **__: pytest.fail("something ran"))
    for option in ("--json", "--requests", "--report"):
        assert run(["sim", "run", str(scenario), option, str(tmp_path / "no" / "file")]) == 3
        assert f"{option}: " in capsys.readouterr().err


def test_rows_of_a_run_are_a_trace_of_another(scenario, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    shared = ["--set", "workload.prefixes=3", "--set", "workload.prefix_tokens=600", "--set", "engine.block_tokens=16"]
    first = answered(capsys, "run", scenario, *shared, "--requests", rows, "--with-blocks")
    again = answered(
        capsys, "run", scenario, "--set", "workload={kind='trace',file='rows.jsonl'}", "--set", "engine.block_tokens=16"
    )
    assert again["digest"] == first["digest"]
    assert first["hit_rate"] > 0.3
    assert first["hit_rate_by_tier"] == {"gpu": first["hit_rate"]}


def test_without_ray_its_package_is_named(scenario, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["sim", "sweep", str(scenario), "--ray", "auto", "--over", "workload.rate=1,2"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fleet: --ray: needs the package ray: pip install 'fleet-serving[ray]'"


def all_of(terminal: int) -> str:
    """Return the text that was written to a pseudo-terminal until its other end was closed."""
    read = b""
    with os.fdopen(terminal, "rb", buffering=0) as file, contextlib.suppress(OSError):  # EIO means the end
        while part := file.read(4096):
            read += part
    return read.decode()


def test_a_terminal_sees_a_bar_and_a_file_does_not(tmp_path):
    theirs, ours = pty.openpty()
    with os.fdopen(ours, "w") as terminal, ProgressBar(200, terminal) as progress:
        progress(50, "50 requests")
    seen = all_of(theirs)
    assert "██████░░░░░░░░░░░░░░░░░░  25%  50 requests" in seen
    assert seen.endswith("\r\x1b[K")
    with (tmp_path / "log").open("w") as log, ProgressBar(200, log) as progress:
        progress(50, "50 requests")
        progress.line("one is done")
    assert (tmp_path / "log").read_text() == "one is done\n"


@pytest.mark.parametrize("which", [0, -1], ids=["the first", "the last"])
def test_killed_run_process_reports_what_to_do(scenario, which):
    made = sweep.cases([scenario], {}, (1, 2), {"workload.requests": 3_000_000})
    rows = sweep.run_all(made, 2)
    others = {child.pid for child in multiprocessing.active_children()}  # processes of other tests

    def computes():
        ours = sorted(child.pid for child in multiprocessing.active_children() if child.pid not in others)
        return len(ours) == 2 and sum(psutil.Process(ours[which]).cpu_times()[:2]) > COMPUTES_SECONDS and ours[which]

    def kill_one():
        os.kill(eventually(computes), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(ConfigurationRefused, match="--processes: one of 2 was killed"):
        next(rows)
    killer.join()


def test_runs_end_with_a_caller_that_is_killed(scenario):
    """Kill the calling process, which cannot end its child processes any more, so that they have to notice its end."""
    script = (
        "import multiprocessing, os, psutil, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from fleet.sim.experiments import sweep\n"
        "from tests.support.waiting import eventually\n"
        "def computing():\n"
        "    times = [psutil.Process(each.pid).cpu_times() for each in multiprocessing.active_children()]\n"
        f"    return len(times) == 2 and all(each.user + each.system > {COMPUTES_SECONDS} for each in times)\n"
        "def killed():\n"
        "    eventually(computing)\n"
        "    os.write(1, ' '.join(str(each.pid) for each in multiprocessing.active_children()).encode())\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=killed, daemon=True).start()\n"
        "if __name__ == '__main__':\n"
        "    made = sweep.cases([Path(sys.argv[1])], {}, (1, 2), {'workload.requests': 3_000_000})\n"
        "    list(sweep.run_all(made, 2))\n"
    )
    said = scenario.with_name("said")
    with said.open("wb") as file:
        caller = subprocess.run([sys.executable, "-c", script, scenario], stdout=file, timeout=60, check=False)
    assert caller.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in said.read_bytes().split()]
    assert len(pids) == 2
    try:
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
