"""Tests of the measurement of what tracing costs: a tiny run of the script, and its limit."""

import sys

import pytest

from loadtests.router import tracing_cost
from tests.support.fleet_processes import run_load_test

pytestmark = pytest.mark.integration


@pytest.mark.long
@pytest.mark.timeout(300)
def test_tiny_run_prints_the_cost_of_each_share():
    tiny = ("--rounds", "1", "--requests", "20", "--tokens", "4")

    done = run_load_test("router.tracing_cost", *tiny, "--most-percent", "100000")

    assert done.returncode == 0, done.stderr
    assert [line.partition("µs")[0].split()[1] for line in done.stdout.splitlines()] == ["off", "1", "100"]


@pytest.mark.parametrize(("few", "status"), [(1.04, 0), (1.06, 1)])
def test_cost_of_a_sampled_percent_is_limited(monkeypatch, capsys, few, status):
    figures = {tracing_cost.OFF: [1.0, 1.0, 1.0], tracing_cost.FEW: [few, few, 0.5], tracing_cost.ALL: [2.0, 2.0, 2.0]}
    monkeypatch.setattr(tracing_cost, "measure", lambda *_: figures)
    monkeypatch.setattr(sys, "argv", ["tracing_cost", "--most-percent", "5"])

    assert tracing_cost.main() == status
    assert ("costs +6.0% of the router's CPU time, and --most-percent allows 5 %" in capsys.readouterr().err) == bool(
        status
    )
