"""Test of a pool that shrinks on one machine: the worker with the most valuable cache stays."""

import asyncio
import random

import pytest

from fleet.client import AsyncClient
from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.waiting import until, until_answered

pytestmark = pytest.mark.integration

TOPOLOGY = """
[cluster]
kv_paths = []
[[pools]]
role = "both"
replicas = 3
"""


async def test_worker_with_the_most_valuable_cache_stays(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY)
    with fleet_up(tmp_path, "--config", str(topology)) as up:
        async with AsyncClient(up.grpc) as client:
            shared = [random.randrange(5, 4000) for _ in range(1000)]
            for worker in ("both-0", "both-2"):  # 31 blocks each, of which the other one has the same
                await client.complete(shared, max_tokens=2, pin=worker)
            await client.complete([random.randrange(5, 4000) for _ in range(400)], max_tokens=2, pin="both-1")

            async def worth():
                workers = (await client.status()).pools[0].workers
                found = {each.worker_id: each for each in workers}
                return found if all(each.cached_blocks >= 12 for each in workers) else None

            known = await until_answered(worth)
        scaled = await asyncio.to_thread(run_fleet, "scale", "both=1", "--address", up.grpc)
        await until(lambda: not up.pid_of("both-0") and not up.pid_of("both-2"))
        assert up.pid_of("both-1")
    assert scaled.returncode == 0, scaled.stderr
    assert known["both-1"].cached_blocks < known["both-0"].cached_blocks
    assert known["both-0"].cache_seconds < known["both-1"].cache_seconds
