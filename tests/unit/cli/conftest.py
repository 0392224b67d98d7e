"""Fixtures for tests of several commands."""

import json

import pytest

from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.scenarios import SCENARIO


@pytest.fixture
def scenario(tmp_path):
    """Return the path of a valid scenario file, next to its model file."""
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO)
    return file
