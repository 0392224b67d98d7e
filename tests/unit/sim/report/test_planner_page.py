"""Planner report: the number of points of its lines, and pools without replicas."""

from io import StringIO

import pytest
from msgspec import structs

from fleet.sim.planning.rule_registry import rule_settings
from fleet.sim.report.planner_page import POINTS, thinned, write_planner_report
from tests.support.sim.replays import a_replay


@pytest.mark.parametrize("count", [0, 1, POINTS, POINTS + 1, 2 * POINTS - 1, 2 * POINTS, 10 * POINTS + 1])
def test_line_has_at_most_the_allowed_points(count):
    points = thinned(range(count))

    assert min(count, POINTS // 2) <= len(points) <= POINTS
    assert list(points[:1]) == list(range(count))[:1]


def test_pools_that_never_had_a_replica_are_named(tmp_path):
    replay, page, none = (
        a_replay(tmp_path, {"workload.requests": 20, "planner.warm_up_seconds": 0}),
        StringIO(),
        {"both": 0},
    )
    result = replay.run_rule("hpa", rule_settings("hpa", None))
    steps = [structs.replace(step, wanted=none, ready=none, held=none) for step in result.steps]

    write_planner_report(
        page, "day", replay.scenario, [structs.replace(result, steps=steps)], prices=replay.replica_prices
    )

    assert "These pools never had a replica: both." in page.getvalue()
    assert "both wanted" not in page.getvalue()
