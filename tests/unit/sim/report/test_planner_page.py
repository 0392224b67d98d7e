"""Planner report: the number of points of its lines."""

import pytest

from fleet.sim.report.planner_page import POINTS, thinned


@pytest.mark.parametrize("count", [0, 1, POINTS, POINTS + 1, 2 * POINTS - 1, 2 * POINTS, 10 * POINTS + 1])
def test_line_has_at_most_the_allowed_points(count):
    points = thinned(range(count))

    assert min(count, POINTS // 2) <= len(points) <= POINTS
    assert list(points[:1]) == list(range(count))[:1]
