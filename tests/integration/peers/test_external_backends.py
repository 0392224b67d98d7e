"""Tests of several router processes behind one port, in front of servers that report nothing about their caches."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.backends.openai_servers import MODEL, OpenAiServer, fetch, routers_in_front_of
from tests.support.waiting import until_answered

pytestmark = pytest.mark.integration

ROUTERS = 3
SERVERS = 4


async def views_of_workers(address):
    """Return each process's view of all workers: their number, cached blocks and requests."""
    text = await asyncio.to_thread(fetch, address, "GET", "/metrics")
    columns = {"cached_blocks": 1, "booked_requests": 2, "booked_elsewhere": 2}
    by_router = {}
    for family in text_string_to_metric_families(text):
        if column := columns.get(family.name.removeprefix("fleet_worker_")):
            for sample in family.samples:
                numbers = by_router.setdefault(sample.labels["router"], [0, 0, 0])
                numbers[0] += column == 1
                numbers[column] += sample.value
    return list(by_router.values())


async def wait_until_connected(address):
    """Wait until every process is connected to all others and knows all workers."""
    return all([await views_of_workers(address) == [[SERVERS, 0, 0]] * ROUTERS for _ in range(16)])


async def test_prompt_sent_by_one_process_is_known_to_all(tmp_path):
    servers = [OpenAiServer() for _ in range(SERVERS)]
    for server in servers:
        await server.start()
    async with routers_in_front_of(tmp_path, servers, ROUTERS) as address:
        await until_answered(lambda: wait_until_connected(address), 300)
        for number in range(5):
            prompt = f"{number} is a number. " * 400
            blocks = (number + 1) * (len(prompt) // 256)
            body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True})

            async def complete(body=body):
                await asyncio.to_thread(fetch, address, "POST", "/v1/completions", body)

            async def told(blocks=blocks):
                """Wait until all processes believe the sent prompts cached and nothing running."""
                return await views_of_workers(address) == [[SERVERS, blocks, 0]] * ROUTERS

            await complete()
            await until_answered(told)
            for _ in range(8):
                await complete()
                await until_answered(told)

            places = [sum(seen.json["prompt"] == prompt for seen in server.seen) for server in servers]
            assert sorted(places) == [0] * (SERVERS - 1) + [9]
