"""What tests of several commands begin with."""

import json

import pytest

from tests.unit.cli.test_sim import MODEL, SCENARIO


@pytest.fixture
def scenario(tmp_path):
    """A file that can be run."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO)
    return file
