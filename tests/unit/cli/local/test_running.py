"""Which cluster of `fleet up` a command uses, and the error message if several clusters run."""

import json

import pytest

from fleet.cli.local import running
from fleet.cli.main import run
from fleet.local.runs import LocalRun, note_supervisor


@pytest.fixture
def two_clusters(tmp_path, monkeypatch):
    runs = []
    for port in (1, 2):
        folder = tmp_path / f"fleet-{port}"
        folder.mkdir()
        (folder / "router.json").write_text(json.dumps({"grpc_listen": f"127.0.0.1:{port}"}))
        note_supervisor(folder)
        runs.append(LocalRun(folder))
    monkeypatch.setattr(running, "local_runs", lambda: runs)
    return runs


def test_several_clusters_are_named_in_one_readable_line(two_clusters, capsys):
    assert run(["logs"]) == 3

    first, second = (each.folder for each in two_clusters)
    assert capsys.readouterr().err == (
        "fleet: several clusters run on this machine: --address names one of"
        f" 127.0.0.1:1 ({first}), 127.0.0.1:2 ({second})\n"
    )
