"""Tests on the server that FLEET_TEST_KUBE_API names; here it has controllers and nodes, as a real cluster has them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kube.api.running import OTHER_SERVER, an_api_server
from tests.support.kube.nodes import Nodes

ROOT = Path(__file__).parents[3]
FILES = ("api_server", "chart/test_crds.py", "chart/test_release.py", "operator/test_manifests.py")
"""Tests that run on another server, together with tests of faults, which have to be skipped there."""


@pytest.mark.timeout(1300)  # most of the tests of this folder run again
def test_tests_pass_with_controllers_and_fault_tests_skip():
    nodes = Nodes()
    with an_api_server(with_controllers=True, beside=nodes.run) as server:
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/kube/{each}" for each in FILES)],
            cwd=ROOT,
            env=os.environ | {OTHER_SERVER: server.url},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )

    assert done.returncode == 0, done.stdout[-4000:]
    skipped = re.findall(r"^SKIPPED \[\d+\] ([^:]+):.*: (.*)$", done.stdout, re.MULTILINE)
    assert "tests/kube/api_server/test_faults.py" in {file for file, _ in skipped}
    assert all(why for _, why in skipped)
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 150
