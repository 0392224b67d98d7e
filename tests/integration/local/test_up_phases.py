"""Test that `fleet up` says what its workers do while they start, with real worker processes and the simulated engine."""

import pytest

from fleet.local.processes import FIRST_PROGRESS
from tests.support.fleet_processes import fleet_up

pytestmark = pytest.mark.integration

TOPOLOGY = """
cluster.kv_paths = []

[[pools]]
role = "both"
replicas = 2
simulated.start_ms = {start_ms}
"""


def test_loading_of_real_workers_is_said(tmp_path):
    topology = tmp_path / "fleet.toml"
    topology.write_text(TOPOLOGY.format(start_ms=1000 * (FIRST_PROGRESS + 3)))

    with fleet_up(tmp_path, "--config", str(topology)):
        lines = (tmp_path / "up.log").read_text().splitlines()

    assert "fleet: loading: both-0, both-1" in lines
    assert not [line for line in lines if "fetching" in line or "warming" in line], "this engine has no such phases"
