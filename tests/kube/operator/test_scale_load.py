"""Load test of the operator with few deployments: it runs to its end, and reports every figure."""

import json

import pytest

from loadtests.kvstore.nodes import ROOT
from tests.support.fleet_processes import run_load_test


def test_load_test_of_the_operator_reports_its_figures():
    done = run_load_test("kube.operator_scale", "--deployments", "2")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["deployments"] == 2
    assert found["made"]["writes"]["children"] > 0
    for change in (found["made"], found["changed"]):
        assert change["most_writes_of_a_child"] == 1
        assert 1 <= change["most_writes_of_a_status"] <= 2
    assert found["scale_change_ms"] > 0
    assert found["scale_change_operator_cpu_ms"] > 0


@pytest.mark.long
def test_load_test_fails_above_the_limit_of_memory():
    within, above = (
        run_load_test("kube.operator_scale", "--deployments", "1", "--most-mib", most) for most in ("150", "20")
    )

    assert within.returncode == 0, within.stderr
    assert above.returncode == 1
    assert "MiB, of 20" in above.stderr


@pytest.mark.long
def test_load_test_fails_above_its_limits_of_time():
    limits = ("--most-seconds", "0.001", "--most-scale-ms", "1")

    done = run_load_test("kube.operator_scale", "--deployments", "1", *limits)

    assert done.returncode == 1
    assert "s, of 0.001" in done.stderr
    assert "ms, of 1" in done.stderr
    assert "MiB" not in done.stderr, "no limit was set for the memory"


def test_load_test_compares_two_checkouts():
    done = run_load_test("kube.operator_scale", "--deployments", "1", "--rounds", "1", "--before", str(ROOT))

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["made.seconds"].keys() == {"before", "now"}
    assert found["memory_mib"]["now"]["median"] > 0
