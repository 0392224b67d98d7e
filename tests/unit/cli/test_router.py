"""`fleet router`."""

import json

from fleet.cli.main import run
from fleet.cli.router import break_even_lines
from fleet.client.results import remote_prefill_of
from fleet.router.placement.policies.built_in import BUILT_IN
from fleet.v1 import control_pb2 as pb


def test_policies_are_listed_with_the_default_marked(capsys):
    assert run(["router", "policies"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(BUILT_IN.policies)]] == list(BUILT_IN.policies)
    assert [line.endswith("(default)") for line in lines].count(True) == 1
    assert lines[0].startswith("fleet ")


def test_the_policies_as_json_have_their_parameters(capsys):
    assert run(["router", "policies", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["default"] == "fleet"
    by_name = {each["name"]: each for each in told["policies"]}
    assert by_name["dynamo"]["parameters"]["host_cache_hit_weight"] == 0.75
    assert all(each["summary"] for each in by_name.values())


def test_older_router_without_measurements_prints_none():
    """Read the thresholds of an earlier version's router, which lack the field with the measurements."""
    assert list(break_even_lines(remote_prefill_of(pb.Thresholds().remote_prefill))) == []


def test_measurements_are_shown_by_worker_once_sufficient():
    workers = [pb.BreakEven(worker_id="d1", requests=3, token_ms=0.5, min_tokens=80), pb.BreakEven(worker_id="d2")]
    told = pb.RemotePrefill(learned=True, handoffs=7, handoffs_needed=8, handoff_ms=120.0, workers=workers)

    assert list(break_even_lines(remote_prefill_of(told))) == ["measured: 7 hand-offs, of 8 that are needed; it counts"]
    told.handoffs = 8
    assert list(break_even_lines(remote_prefill_of(told))) == [
        "measured: 8 hand-offs, lately 120 ms; it counts",
        "  d1: from 80 tokens on, with 3 requests there and 0.5 ms a token",
        "  d2: not known yet what a token takes",
    ]
