"""Test of a sweep on a real Ray cluster, which the test starts here; its node has none of the scenario's files."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kvstore.builders import a_short_folder
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.scenarios import SCENARIO
from tests.support.sim.traces import CONVERSATION

pytest.importorskip("ray", reason="ray is not installed: the extra ray")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes a token into the home folder
}
CLUSTER = """
import sys, ray
started = ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False,
    _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1",
)
print(started.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def address():
    """Yield the address of a cluster that lives as long as this module's tests."""
    with a_short_folder() as folder, (folder / "log").open("w+") as log:
        head = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=ENVIRONMENT,
            text=True,
        )
        try:
            address = head.stdout.readline().strip()
            assert address, (folder / "log").read_text()
            yield address
        finally:
            head.stdin.close()
            try:
                head.wait(60)
            except subprocess.TimeoutExpired:
                head.kill()
                head.wait(60)
            head.stdout.close()


@pytest.fixture
def scenario(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "trace.jsonl.gz").write_bytes(CONVERSATION.read_bytes())
    file = tmp_path / "scenario.toml"
    trace = '[workload]\nkind = "trace"\nfile = "trace.jsonl.gz"\nsample = 0.1\nrequests = 50\n'
    file.write_text("\n".join((SCENARIO.split("[workload]")[0], trace, SCENARIO[SCENARIO.index("[[pools]]") :])))
    return file


def fleet(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleet.cli.main", "sim", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=ENVIRONMENT)


def test_ray_cluster_gives_the_same_results(address, scenario):
    sweep = ["sweep", scenario, "--over", "workload.speed=1,4", "--seeds", "1:2", "--json", "-"]

    spread, alone = fleet(*sweep, "--ray", address), fleet(*sweep, "--processes", "1")

    assert (spread.returncode, alone.returncode) == (0, 0), spread.stderr
    rows = [json.loads(each.stdout) for each in (spread, alone)]
    digests = [[row["outcome"]["digest"] for row in each] for each in rows]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4


def test_missing_ray_cluster_is_rejected_in_one_line(address, scenario):
    host, _, _ = address.rpartition(":")
    done = fleet("sweep", scenario, "--over", "workload.speed=1,4", "--ray", f"{host}:1")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [f"fleet: --ray: {host}:1: Connection refused"]
