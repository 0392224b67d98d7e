"""Scaling rules in a replay: each rule follows the load within its bounds, and rules that know the future keep their promises."""

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.planner.messages import PoolName
from fleet.sim.planning.rule_registry import RULES, rule_settings
from tests.support.sim.replays import a_replay

HINDSIGHT = {"oracle", "static_best", "static_peak", "melange"}
FEW = {"oracle": {"halvings": 4, "refinements": 1}}


def replayed(folder, rule, changes=None):
    return a_replay(folder, changes).run_rule(rule, rule_settings(rule, FEW.get(rule)))


@pytest.mark.parametrize("rule", sorted(set(RULES) - HINDSIGHT))
def test_rule_follows_a_swinging_load_within_its_bounds(rule, tmp_path):
    result = replayed(tmp_path, rule, {"workload.requests": 1800, "workload.rate": 3.0, "workload.day_seconds": 600})

    wanted = [step.wanted["both"] for step in result.steps]
    assert all(1 <= count <= 12 for count in wanted)
    assert max(wanted) > 2, "it grows with the load"
    assert wanted[-1] < max(wanted) or rule in {"hpa", "kpa", "llmd_slo", "fleet"}, "it shrinks within its cool-down"
    assert result.outcome.attainment > 0.3
    assert result.outcome.plans


@pytest.mark.parametrize("rule", sorted(set(RULES) - HINDSIGHT))
def test_rule_holds_while_metrics_are_missing(rule, tmp_path):
    gaps = {"planner.gap_every_seconds": 10.0, "planner.gap_seconds": 9.99}
    result = replayed(tmp_path, rule, {**gaps, "workload.requests": 200})

    in_gap = [step for step in result.steps if step.at >= 10 and step.at % 10 < 9.99]
    assert in_gap
    assert not any(step.changed for step in in_gap)


def test_every_pool_of_a_disaggregated_cluster_is_sized(tmp_path):
    pools = [
        {"name": "prefill", "role": "prefill", "gpu": "l40s", "gpus": 1},
        {"name": "decode", "role": "decode", "gpu": "l40s", "gpus": 1},
    ]
    changes = {"pools": pools, "planner.pools": {"prefill": {"start_seconds": 8}, "decode": {"start_seconds": 8}}}
    for rule in sorted(set(RULES) - {"oracle", "static_best"}):
        result = replayed(tmp_path, rule, changes)

        most = {name: max(step.wanted[name] for step in result.steps) for name in ("prefill", "decode")}
        assert most["prefill"] > 1, rule
        assert result.outcome.requests, rule


def test_oracle_is_cheaper_than_static_pools_and_keeps_the_goal(tmp_path):
    changes = {"planner.attainment": 0.95}
    oracle, best, peak = (
        replayed(tmp_path, rule, changes).outcome for rule in ("oracle", "static_best", "static_peak")
    )

    assert min(oracle.attainment, best.attainment, peak.attainment) >= 0.95
    assert oracle.gpu_hours < best.gpu_hours <= peak.gpu_hours
    assert peak.worst_attainment >= 0.95


def test_oracle_bridges_gaps_that_are_shorter_than_a_start(tmp_path):
    slow, quick = (
        replayed(tmp_path, "oracle", {"planner.pools.both.start_seconds": seconds}).outcome for seconds in (120, 1)
    )

    assert slow.gpu_hours > quick.gpu_hours
    assert slow.plans < quick.plans


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("hpb", {}, r"^rules: 'hpb' is not one of fleet, hpa, "),
        ("hpa", {"goal": 1.0}, r"^planner\.parameters\.hpa: .*`goal`"),
        ("hpa", {"target": "high"}, r"^planner\.parameters\.hpa\.target: "),
    ],
)
def test_unknown_rule_or_parameter_is_refused_with_its_field(name, parameters, message):
    with pytest.raises(ConfigurationRefused, match=message):
        rule_settings(name, parameters)


def test_drawn_future_is_what_arrives(tmp_path):
    replay = a_replay(tmp_path)

    future = replay.context().future

    assert len(future) == 900
    assert [each.arrival for each in future] == sorted(each.arrival for each in future)
    assert replay.span == (Nanos(30 * SECOND), future[-1].arrival)
    assert replay.context().pool(PoolName("both")).most == 12
