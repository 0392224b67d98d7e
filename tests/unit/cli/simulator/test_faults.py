"""`fleet sim faults`: campaigns, single seeds, and the exploration of handoff leases."""

import json

import pytest

from fleet.app.fault_simulation import campaign, handoff_states, seed_run
from fleet.app.fault_simulation.promises import Promise, PromiseBroken
from fleet.cli.main import run


def test_kept_promises_exit_0_with_counts(capsys):
    assert run(["sim", "faults", "--seeds", "12", "--from", "5", "--processes", "1", "--json", "-"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["first_seed"], result["seeds"], result["failed"]) == (5, 12, 0)
    assert result["points"]["handed_over_direct"] > 0
    assert result["recovery_seconds_p50"] <= result["recovery_seconds_p99"] <= result["recovery_seconds_max"]


def test_processes_do_not_change_the_result(capsys):
    results = []
    for processes in "1", "2":
        assert run(["sim", "faults", "--seeds", "60", "--processes", processes, "--json", "-"]) == 0
        results.append(json.loads(capsys.readouterr().out))

    assert results[0] == results[1]


def break_promise(*_):
    raise PromiseBroken(Promise.NOTHING_HELD, "one lease")


def test_broken_promise_exits_1_with_replay_command(capsys, monkeypatch):
    monkeypatch.setattr(seed_run.SeedRun, "answered", break_promise)

    assert run(["sim", "faults", "--seeds", "1", "--from", "9", "--processes", "1"]) == 1

    told = capsys.readouterr().out
    assert "1 seeds broke a promise" in told
    assert "replay: fleet sim faults --seed 9 --keep" in told


def test_replayed_seed_lists_what_happens(capsys, monkeypatch):
    assert run(["sim", "faults", "--seed", "9", "--keep", "0,1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[:2]] == ["0", "1"]
    assert told[-1] == "no promise was broken"

    monkeypatch.setattr(seed_run.SeedRun, "answered", break_promise)
    assert run(["sim", "faults", "--seed", "9"]) == 1
    assert "return to zero: one lease" in capsys.readouterr().out


def test_missed_fault_point_exits_1(capsys, monkeypatch):
    monkeypatch.setattr(campaign, "LEAST_SEEDS", 2)

    assert run(["sim", "faults", "--seeds", "2", "--processes", "1"]) == 1
    assert "fault point reached too rarely" in capsys.readouterr().out


def test_exploration_of_handoffs_is_told(capsys, monkeypatch):
    monkeypatch.setattr(handoff_states.explore, "__defaults__", (((1, 1),),))
    assert run(["sim", "faults", "--handoffs", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["states"] > 100

    monkeypatch.setattr(handoff_states.BlockBorrower, "fail", lambda _: None)
    assert run(["sim", "faults", "--handoffs"]) == 1
    assert "waits for ever" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--seeds", "0"], "--seeds: 0"),
        (["--keep", "1"], "--keep: needs --seed"),
        (["--seed", "1", "--keep", "a"], "--keep: 'a' is not a list"),
        (["--seed", "1", "--keep", "500"], "--keep: seed 1 has the happenings"),
        (["--seed", "-1"], "a seed is not negative"),
        (["--processes", "0"], "--processes: 0"),
    ],
)
def test_wrong_option_is_refused(options, told, capsys):
    assert run(["sim", "faults", *options]) == 3
    assert told in capsys.readouterr().err
