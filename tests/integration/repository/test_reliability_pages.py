"""Pages of promises and faults: every test, module and fault point that they name exists."""

import re

import pytest

from fleet.app.fault_simulation.fault_points import FaultPoint
from tests.faults.__main__ import pairs
from tests.support.documents import ROOT

PAGES = ("docs/faults.md", "docs/reliability.md")
TEST = re.compile(r"`(?:pytest )?(tests/[\w/]+\.py)(?:::(\w+))?`")
ONLY = re.compile(r"--only ([\w:]+)")
POINT = re.compile(r"[Ff]ault points?: (`[^.]+`)")


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    named = TEST.findall((ROOT / page).read_text())

    assert len(named) > 5
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


@pytest.mark.parametrize("page", PAGES)
def test_named_cells_and_fault_points_exist(page):
    text = (ROOT / page).read_text()

    for only in ONLY.findall(text):
        assert only == "COMPONENT:FAULT" or pairs([only]), only
    known = {point.name.lower() for point in FaultPoint}
    for points in POINT.findall(text):
        assert set(re.findall(r"`(\w+)`", points)) <= known, points
