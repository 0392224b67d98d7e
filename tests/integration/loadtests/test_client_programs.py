"""Test of the environments of client programs, in a real one."""

import pytest

from loadtests.clients.programs import registry
from loadtests.clients.results import CallOutcome
from loadtests.environments import SystemDistribution, python_of
from loadtests.kvstore.nodes import ROOT

pytestmark = pytest.mark.integration

SCRIPT = """
import importlib.util
from reporting import report_calls

report_calls({name: lambda name=name: importlib.util.find_spec(name) is None for name in ("fleet", "msgspec", "openai")})
"""


def test_program_finds_neither_fleet_nor_its_packages(tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(SCRIPT)
    (tmp_path / "reporting.py").write_text((registry.FOLDER / "reporting.py").read_text())
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    python = python_of(SystemDistribution(name="nothing", version="1", steps=()), tmp_path / "cache")

    results = registry.run_script(python, "calls.py", "address", "tiny", tmp_path, tmp_path / "scratch")

    assert {each.call: each.outcome for each in results} == dict.fromkeys(
        ("fleet", "msgspec", "openai"), CallOutcome.PASSED
    )
