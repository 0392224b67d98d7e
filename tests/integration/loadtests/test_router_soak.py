"""Short run of the soak test, which otherwise takes half an hour: a real router whose workers join, leave, hang and die."""

import json

import pytest

from tests.support.fleet_processes import run_load_test

pytestmark = pytest.mark.integration


@pytest.mark.long
@pytest.mark.timeout(300)
def test_short_soak_loses_and_repeats_no_token():
    done = run_load_test("router.soak", "--seconds", "20", "--harm-every", "1.5", "--seed", "2", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("lost", "repeated", "broken")} == {"lost": 0, "repeated": 0, "broken": 0}
    assert found["completed"] > 50
    assert found["tokens"] > 1000
    assert found["deaths"] >= 1
    assert found["joins"] >= 1
    assert found["capacity_rps"] > 0
    assert found["fds_end"] <= found["fds_start"] + 16
