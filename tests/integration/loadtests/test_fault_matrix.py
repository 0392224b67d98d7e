"""Part of the fault matrix, which takes a quarter of an hour as a whole: one fault of each kind that this test can afford."""

import json
import subprocess
import sys

import pytest

from loadtests.kvstore.nodes import ROOT, environment
from tests.faults.matrix import CellPhase

pytestmark = pytest.mark.integration

PAIRS = ("decode:kill", "prefill:corrupt_frame", "store:kill")


@pytest.mark.timeout(600)
def test_part_of_the_fault_matrix_keeps_every_promise():
    command = [sys.executable, "-m", "tests.faults", "--json", "-"]
    for pair in PAIRS:
        command += ["--only", pair]

    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=580, check=False
    )

    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(f"{cell['component']}:{cell['fault']}", cell["phase"]) for cell in cells] == [
        (pair, phase.value) for pair in ("prefill:corrupt_frame", "decode:kill", "store:kill") for phase in CellPhase
    ]
    for cell in cells:
        assert cell["requests"] >= 1, cell
        assert {cell[name] for name in ("lost", "repeated", "wrong", "failed", "leaked")} == {0}, cell
