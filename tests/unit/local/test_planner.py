"""Tests of the planner's settings in a local cluster: errors name the fields of the topology."""

from pathlib import Path

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.core.roles import Role
from fleet.local.planner import planner_settings
from fleet.local.settings import LocalPlannerSection, PlannedPoolSection, PoolSection, Topology
from fleet.planner.decisions import PlanGoals
from fleet.planner.messages import PoolName


def test_bounds_of_a_pool_are_refused_by_its_name():
    bounds = {PoolName("decode"): PlannedPoolSection(least=4, most=2)}
    section = LocalPlannerSection(goals=PlanGoals(ttft_seconds=1.0, tpot_seconds=0.1), pools=bounds)
    topology = Topology(pools=(PoolSection(role=Role.PREFILL), PoolSection(role=Role.DECODE)))

    with pytest.raises(ConfigurationRefused, match=r"^planner\.pools\.decode\.least: 4 is above `most`, 2"):
        planner_settings(
            topology, section, ["prefill", "decode"], folder=Path("/run"), model=ModelName("m"), control="unix:/c"
        )
