"""Tests of overflow from a real cluster: requests that would wait too long go to a hosted endpoint, and its cost is accounted for."""

import asyncio
import json

import httpx
import pytest

from tests.support.backends.openai_servers import OpenAiServer, metered_tokens
from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.waiting import until_answered

pytestmark = pytest.mark.integration

TOPOLOGY = """
[[pools]]
role = "both"
max_running = 2
[pools.simulated.latency]
step_base_ms = 20.0

[router]
oversubscribe = 1.0
[router.overflow.tiny]
url = "{url}"
dollars_per_hour = {limit}
dollars_per_million_prompt_tokens = 1.0
dollars_per_million_answer_tokens = 10.0
after_seconds = 0.5

[planner]
mode = "shadow"
goals = {{ttft_seconds = 1.0, tpot_seconds = 0.05}}
rule = {{kind = "load", requests_per_replica = 1000, interval_seconds = 0.5, cool_down_seconds = 3}}
[planner.pools.both]
dollars_per_hour = 2.0
"""


async def ask(client, number):
    body = {"model": "tiny", "prompt": f"Question number {number}", "max_tokens": 40, "fleet": {"session": f"{number}"}}
    return await client.post("/v1/completions", json=body)


async def load(client, count):
    return await asyncio.gather(*(ask(client, number) for number in range(count)))


async def test_overloaded_cluster_overflows_and_accounts_for_it(tmp_path):
    server = OpenAiServer()
    server.play = metered_tokens
    await server.start()
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY.format(url=server.url, limit=1.0))
    with fleet_up(tmp_path, "--config", str(topology)) as up:
        base = up.endpoints["http"]
        async with httpx.AsyncClient(base_url=base, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
            answers = await load(client, 10)  # departures tell the router how long a wait is
            answers += await load(client, 60)
        hosted = [each for each in answers if "x-fleet-overflow" in each.headers]
        status = await asyncio.to_thread(run_fleet, "status", "--address", up.grpc)
        request = hosted[0].headers["x-request-id"] if hosted else ""
        told = await asyncio.to_thread(run_fleet, "explain", request, "--address", up.grpc)
        planner = f"unix:{up.runtime_folder()}/planner.sock"

        async def seen():
            shown = await asyncio.to_thread(run_fleet, "plan", "--json", "--planner", planner)
            overflow = json.loads(shown.stdout)["overflow"]
            return overflow if overflow["requests"] >= len(hosted) else None

        overflow = await until_answered(seen)
    await server.stop()

    assert [each.status_code for each in answers] == [200] * len(answers)
    assert 5 < len(hosted) < len(answers)
    assert len(server.seen) == len(hosted)
    assert "overflow  tiny" in status.stdout
    assert f"served {len(hosted)}" in status.stdout
    assert "overflow.after_seconds" in told.stdout
    assert "charged $0.000054 for 4 prompt and 5 answer tokens" in told.stdout
    assert overflow["dollars"] == pytest.approx(54e-6 * len(hosted))
