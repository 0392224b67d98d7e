"""Tests of the measurement of what surviving streams cost: a tiny run of the script, its ratios and its limits."""

import json
import sys

import pytest

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import ROOT
from loadtests.router import resuming_cost
from loadtests.router.resuming_cost import VARIANTS, RoundFigures, check_checkout
from tests.support.fleet_processes import run_load_test

pytestmark = pytest.mark.integration


@pytest.mark.timeout(300)
def test_tiny_run_measures_each_variant(tmp_path):
    tiny = ("--rounds", "1", "--requests", "8", "--tokens", "4", "--prompts", "1", "--json", str(tmp_path / "found"))

    done = run_load_test("router.resuming_cost", *tiny, "--before", str(ROOT))

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())["variants"]
    assert [each["variant"] for each in found] == [
        *(variant.name for variant in VARIANTS),
        "gRPC, the other checkout",
        "SSE, the other checkout",
    ]
    assert all(each["cpu_microseconds"] > 0 for each in found)
    assert [each["cpu_ratio"] for each in found[-2:]] == [1.0, 1.0], "the ratios are to the other checkout"
    assert all(each["ttft_milliseconds"] > 70 for each in found), "2,048 tokens take 74 ms in the simulated engine"


def test_checkout_without_native_modules_is_refused(tmp_path):
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").touch()

    with pytest.raises(SystemUnavailable, match="build its native modules first"):
        check_checkout(tmp_path)


@pytest.mark.parametrize(
    ("cpu", "ttft", "complaint"),
    [
        (1.01, 1.01, ""),
        (1.03, 1.01, "SSE, resumable, with a peer: CPU time +3.0%, and 2 % is allowed\n"),
        (1.01, 1.04, "SSE, resumable, with a peer: first token +4.0%, and 3 % is allowed\n"),
    ],
)
def test_cost_is_limited_by_the_median_ratio(monkeypatch, capsys, cpu, ttft, complaint):
    base = [1.0, 2.0, 4.0]  # a machine whose speed changes from round to round

    def figures(cpu: float, ttft: float) -> list[RoundFigures]:
        return [RoundFigures(cpu_seconds=cpu * each, peer_cpu_seconds=0.0, ttft_seconds=ttft * each) for each in base]

    found = {variant: figures(1.0, 1.0) for variant in VARIANTS} | {VARIANTS[-1]: figures(cpu, ttft)}
    monkeypatch.setattr(resuming_cost, "measure", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["resuming_cost", "--most-cpu-percent", "2", "--most-ttft-percent", "3"])

    assert resuming_cost.main() == bool(complaint)
    assert capsys.readouterr().err == complaint
