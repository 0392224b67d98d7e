"""Short run of the soak test, which otherwise takes half an hour: a real router whose workers join, leave, hang and die."""

import json
import subprocess
import sys

import pytest

from loadtests.kvstore.nodes import ROOT, environment

pytestmark = pytest.mark.integration


@pytest.mark.timeout(300)
def test_short_soak_loses_and_repeats_no_token():
    command = [sys.executable, "-m", "loadtests.router.soak", "--seconds", "20", "--harm-every", "1.5"]

    done = subprocess.run(
        [*command, "--seed", "2", "--json"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("lost", "repeated", "broken")} == {"lost": 0, "repeated": 0, "broken": 0}
    assert found["completed"] > 50
    assert found["tokens"] > 1000
    assert found["deaths"] >= 1
    assert found["joins"] >= 1
    assert found["capacity_rps"] > 0
    assert found["fds_end"] <= found["fds_start"] + 16
