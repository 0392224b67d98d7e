"""`fleet scale`: its command line, and the lines about pools."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleet.cli import scale
from fleet.cli.main import run
from fleet.core.errors import ConfigurationRefused
from fleet.local import runs as local_runs
from fleet.planner.settings import EtcdTarget, FolderTarget, KubernetesTarget
from tests.support.waiting import eventually


def target(*argv):
    import argparse

    parser = argparse.ArgumentParser()
    scale.configure(parser)
    return scale.target_of(parser.parse_args(argv))


@pytest.fixture
def plans(tmp_path):
    """Return a folder of plans with the report of an orchestrator that has ended."""
    pools = {
        "decode": {"asked": 2, "ready": 1, "draining": 1, "why": "failing", "message": "decode-1 does not start"},
        "prefill": {"asked": 1, "ready": 1},
    }
    (tmp_path / "report.json").write_text(json.dumps({"pools": pools}))
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["decode"],
        ["decode=-1"],
        ["decode=10001"],
        ["=1"],
        ["decode=1", "--within", "0"],
        ["decode=1", "--within", "nan"],
        ["decode=1", "--within", "86401"],
        ["--plans", "/a", "--deployment", "b"],
    ],
)
def test_a_wrong_command_line_is_misuse(argv):
    with pytest.raises(SystemExit, match="2"):
        run(["scale", *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["decode=1", "decode=2", "--plans", "/a"], "named twice"),
        (["--deployment", "/dd"], "is not"),
        (["--connector", "/nowhere.toml"], "No such file"),
    ],
)
def test_unknown_pool_is_refused(argv, message, capsys):
    assert run(["scale", *argv]) == 3
    assert message in capsys.readouterr().err


def test_a_kubeconfig_that_is_not_there_is_named(capsys):
    pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

    assert run(["scale", "--deployment", "dd", "--kubeconfig", "/nowhere"]) == 3
    assert "/nowhere" in capsys.readouterr().err


def test_location_of_pools_has_three_options(tmp_path):
    settings = tmp_path / "connector.toml"
    settings.write_text('[connector]\nkind = "etcd"\nendpoints = ["127.0.0.1:2379"]\n')

    assert target("--plans", "/a") == FolderTarget(folder="/a")
    assert target("--deployment", "dd", "--kubeconfig", "c") == KubernetesTarget(deployment="dd", kubeconfig="c")
    assert target("--deployment", "ns/dd", "--kubeconfig", "c") == KubernetesTarget(
        deployment="dd", namespace="ns", kubeconfig="c"
    )
    assert target("--connector", str(settings)) == EtcdTarget(endpoints=("127.0.0.1:2379",))
    settings.write_text('[connector]\nkind = "etcd"\nendpoints = ["nobody"]\n')
    with pytest.raises(ConfigurationRefused, match="endpoints"):
        target("--connector", str(settings))


def test_only_cluster_on_this_machine_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(local_runs.tempfile, "gettempdir", lambda: str(tmp_path))
    others = set(local_runs.local_plans())  # other runs in /tmp

    def start(name):
        folder = tmp_path / name / "plans"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text("{}")
        return folder

    (tmp_path / "fleet-that-begins" / "plans").mkdir(parents=True)
    one = start("fleet-one")
    assert set(local_runs.local_plans()) - others == {one}
    monkeypatch.setattr(scale, "local_plans", lambda: [one])
    assert target() == FolderTarget(folder=str(one))

    for found, message in (
        ([], "no cluster"),
        ([one, start("fleet-two")], r"--address or --plans names one of(?s:.*)one(?s:.*)two"),
    ):
        monkeypatch.setattr(scale, "local_plans", lambda found=found: found)
        with pytest.raises(ConfigurationRefused, match=message):
            target()


def test_pools_are_shown_with_why_they_are_not_as_wanted(plans, capsys):
    assert run(["scale", "--plans", str(plans)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "decode   wanted 2  ready 1  draining 1  failing: decode-1 does not start",
        "prefill  wanted 1  ready 1",
    ]


def test_unfinished_pool_shows_commands_to_wait_and_go_back(plans, capsys):
    wanted = {"replicas": 3, "plan": "scale-1-1", "writer": "fleet-scale", "revision": 1, "before": 1}
    (plans / "plan.json").write_text(json.dumps({"revision": 1, "pools": {"decode": wanted}}))

    assert run(["scale", "--plans", str(plans)]) == 0

    out, err = capsys.readouterr()
    assert "decode   wanted 3  ready 1" in out
    assert err == (
        "fleet: decode: not finished: 3 wanted, 1 there, 1 draining; the change goes on by itself:"
        f" fleet scale decode=3 --plans {plans} waits for it, fleet scale decode=1 --plans {plans} goes back\n"
    )


def test_interrupted_wait_reports_that_the_plan_stays(plans):
    command = [sys.executable, "-m", "fleet.cli.main", "scale", "prefill=2", "--plans", str(plans)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
            assert "wanted 2" in waiting.stderr.readline()
            waiting.send_signal(number)
            told = waiting.communicate(timeout=30)[1]
        assert waiting.returncode == 1
        assert f"stopped waiting; the plan stays: fleet scale --plans {plans} shows the progress" in told


def test_killed_orchestrators_report_is_ignored(plans, capsys):
    (plans / ".orchestrator").touch()  # an abandoned lock file

    assert run(["scale", "prefill=2", "--plans", str(plans), "--within", "0.01"]) == 1

    assert capsys.readouterr() == (
        "",
        f"fleet: {plans}: whoever obeyed plans there was killed; start it again (fleet up)\n",
    )
    assert not (plans / "plan.json").exists()


def test_late_workers_are_given_up_and_reported(plans, capsys):
    assert run(["scale", "prefill=2", "--plans", str(plans), "--within", "0.01"]) == 1

    told = capsys.readouterr()
    assert "prefill  wanted 1  ready 1" in told.out
    assert "prefill  wanted 2  ready 1  not taken up" in told.err
    assert "workers that have not come are given up" in told.err
    assert json.loads((plans / "plan.json").read_text())["pools"]["prefill"]["replicas"] == 1


def test_forbidden_number_is_not_blamed_on_the_time_limit(plans, capsys):
    limited = {"asked": 1, "ready": 1, "why": "limited", "message": "decode needs at least 1"}
    (plans / "report.json").write_text(json.dumps({"pools": {"decode": {"asked": 1, "ready": 1}}}))

    def refuse_plan():
        eventually((plans / "plan.json").exists)
        report = plans / "report.json.new"
        report.write_text(json.dumps({"revision": 1, "pools": {"decode": limited}}))
        report.replace(plans / "report.json")

    with ThreadPoolExecutor() as orchestrator:
        refused = orchestrator.submit(refuse_plan)
        assert run(["scale", "decode=0", "--plans", str(plans), "--within", "30"]) == 1
        refused.result()

    told = capsys.readouterr().err
    assert "decode needs at least 1" in told
    assert "the bounds of the orchestrator do not allow decode=0; fleet scale took back the written numbers" in told
    assert "time limit" not in told
    assert json.loads((plans / "plan.json").read_text())["pools"]["decode"]["replicas"] == 1


def test_a_cluster_that_is_gone_is_one_line(tmp_path, capsys):
    assert run(["scale", "--plans", str(tmp_path / "away")]) == 1
    assert capsys.readouterr().err == f"fleet: {tmp_path}/away: is not there; is the orchestrator running?\n"


def test_a_cluster_on_this_machine_is_named_by_its_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local_runs.tempfile, "gettempdir", lambda: str(tmp_path))
    folders = {port: tmp_path / f"fleet-{port}" for port in (1, 2)}
    for port, folder in folders.items():
        (folder / "plans").mkdir(parents=True)
        (folder / "plans" / "report.json").write_text("{}")
        (folder / "router.json").write_text(json.dumps({"grpc_listen": f"127.0.0.1:{port}"}))

    assert target("--address", "127.0.0.1:2") == FolderTarget(folder=str(folders[2] / "plans"))
    with pytest.raises(ConfigurationRefused, match="--address: no cluster"):
        target("--address", "127.0.0.1:3")
    with pytest.raises(ConfigurationRefused, match=rf"127.0.0.1:1 \({folders[1]}"):
        target()
